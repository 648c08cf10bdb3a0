"""The shared cases: short request sequences modelled on public reports, body in, body out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden_checks import NEEDS_AN_UPSTREAM, ONE, OVER_ALL, OVER_RUN, Run, View, message_text, wrong

from prefixproxy.answers import AnswerMemory
from prefixproxy.body import Body
from prefixproxy.plan import Planner
from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.tools import ToolMemory
from prefixproxy.types import API_OF_PATH
from prefixproxy.volatile.files import load_rules

FILES = sorted((Path(__file__).parent / "cases").glob("*.json"))
RULES = load_rules()


def scripted(sent: dict[int, View], i: int) -> dict[str, Any]:
    """The answer that a later request of the case carries behind the same history."""
    said = {j: [(m["role"], message_text(m)) for m in view.tail] for j, view in sent.items()}
    n = len(said[i])
    for j, other in said.items():
        if other[:n] == said[i] and len(other) > n and other[n][0] == "assistant":
            return sent[j].tail[n]
    return {"role": "assistant", "content": f"Answer {i}."}


def run_of(case: dict[str, Any], planner: Planner) -> Run:
    requests = dict(enumerate(case["requests"], 1))
    sent = {i: View(r["path"], r["body"]) for i, r in requests.items()}
    answers = {i: r.get("answer") or scripted(sent, i) for i, r in requests.items()}
    bodies = {i: (API_OF_PATH[r["path"]], Body.parse(json.dumps(r["body"]).encode())) for i, r in requests.items()}
    forwarded = {}
    if case.get("parallel"):
        for i, (api, body) in bodies.items():
            planner.arrive(api, body, str(i), 0.0)
    for i, (api, body) in bodies.items():
        planner.arrive(api, body, str(i), float(i))
        raw = planner.plan(api, body, str(i), float(i)).rendered()
        forwarded[i] = View(requests[i]["path"], json.loads(raw))
        for call in answers[i].get("tool_calls", []):
            planner.answers.learn(call["id"], call["function"]["name"], call["function"]["arguments"])
    return Run(sent, forwarded, answers)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_case(file: Path) -> None:
    case = json.loads(file.read_text(encoding="utf-8"))
    planner = Planner(Stabiliser(RULES), ToolMemory(100, 1 << 20), AnswerMemory(100, 1 << 20), "apply")
    assert wrong(case["checks"], run_of(case, planner)) is None


def test_a_proxy_that_changes_nothing_fails_the_cases_that_ask_for_a_change() -> None:
    failed = 0
    for file in FILES:
        case = json.loads(file.read_text(encoding="utf-8"))
        sent = {i: View(r["path"], r["body"]) for i, r in enumerate(case["requests"], 1)}
        answers = {i: r.get("answer") or scripted(sent, i) for i, r in enumerate(case["requests"], 1)}
        failed += wrong(case["checks"], Run(sent, sent, answers)) is not None
    assert failed == 37


def test_every_check_of_the_cases_is_known() -> None:
    named = {c["check"] for file in FILES for c in json.loads(file.read_text(encoding="utf-8"))["checks"]}
    assert named <= {*ONE, *OVER_ALL, *OVER_RUN, *NEEDS_AN_UPSTREAM}
