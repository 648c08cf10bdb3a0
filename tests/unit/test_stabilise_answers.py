"""Two lanes that asked the same are told apart by what they were answered, in the live order of events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prompting import prompt_of, rendered, texts

from prefixproxy.chat import answer_message
from prefixproxy.prompt import Prompt
from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.volatile.files import load_rules

RULES = load_rules([], frozenset())
HEAD = "Current time: 2026-11-29 10:00:{:02d}\nYou are the clerk of a map archive.\nName the rule you used."


def two_lanes(s: Stabiliser) -> tuple[Prompt, Prompt]:
    """Both ask the same a second apart and are answered differently; what was sent for each."""
    sent = []
    for second, answer in ((0, "I am A."), (1, "I am B.")):
        done = s.apply(prompt_of(HEAD.format(second), "u:Who are you?"), float(second), request_id=f"r{second}")
        s.answered(f"r{second}", answer_message({"content": answer}))
        sent.append(done.prompt)
    return sent[0], sent[1]


def next_turn(s: Stabiliser, answer: str) -> Prompt:
    """The next turn of whoever was answered so; its client's clock has gone on."""
    turns = ("u:Who are you?", f"a:{answer}", "u:And who else?")
    return s.apply(prompt_of(HEAD.format(30), *turns), 30.0, request_id=answer).prompt


@pytest.mark.parametrize(("answer", "lane"), [("I am A.", 0), ("I am B.", 1)])
def test_each_lane_goes_on_with_its_own_note(answer: str, lane: int) -> None:
    s = Stabiliser(RULES)
    sent = two_lanes(s)[lane]
    later = next_turn(s, answer)
    assert f"10:00:0{lane}" in texts(later)[1]
    assert rendered(later).startswith(rendered(sent))


def test_also_after_a_restart() -> None:
    first, second = Stabiliser(RULES), Stabiliser(RULES)
    a, _ = two_lanes(first)
    assert second.load(json.loads(json.dumps(first.export()))) == []
    assert rendered(next_turn(second, "I am A.")).startswith(rendered(a))


def test_an_answer_that_its_client_changed_still_finds_the_conversation() -> None:
    s = Stabiliser(RULES)
    sent = s.apply(prompt_of(HEAD.format(0), "u:Who are you?"), 0.0, request_id="r").prompt
    s.answered("r", answer_message({"content": "I am A, the clerk."}))
    assert rendered(next_turn(s, "I am A")).startswith(rendered(sent))


def test_reasoning_that_its_client_drops_later_does_not_lose_the_notes() -> None:
    s = Stabiliser(RULES)
    thought = {"role": "assistant", "content": "I am A.", "reasoning_content": "Who am I?"}
    plain = {"role": "assistant", "content": "I am A."}
    s.apply(prompt_of(HEAD.format(0), "u:Who are you?"), 0.0, request_id="1")
    turn2 = s.apply(prompt_of(HEAD.format(9), "u:Who are you?", thought, "u:And?"), 9.0, request_id="2").prompt
    turn3 = s.apply(
        prompt_of(HEAD.format(20), "u:Who are you?", plain, "u:And?", "a:Nobody.", "u:Sure?"), 20.0, request_id="3"
    ).prompt
    users2 = [text for text, m in zip(texts(turn2), turn2.messages, strict=True) if m.role == "user"]
    users3 = [text for text, m in zip(texts(turn3), turn3.messages, strict=True) if m.role == "user"]
    assert users3[: len(users2)] == users2


def looped(ident: str) -> list[str | dict[str, Any]]:
    """A tool loop whose one call has this id."""
    function = {"name": "look", "arguments": "{}"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": ident, "type": "function", "function": function}]}
    return ["u:Hi", call, {"role": "tool", "tool_call_id": ident, "content": "1"}]


def test_calls_that_come_back_under_other_ids_lose_no_notes() -> None:
    s = Stabiliser(RULES)
    s.apply(prompt_of(HEAD.format(0), "u:Hi"), 0.0, request_id="1")
    s.apply(prompt_of(HEAD.format(1), *looped("c1")), 1.0, request_id="2")
    before = s.apply(prompt_of(HEAD.format(2), *looped("c1"), "a:B", "u:more"), 2.0, request_id="3").prompt
    later = s.apply(prompt_of(HEAD.format(3), *looped("z9"), "a:B", "u:more", "a:C", "u:third"), 3.0, request_id="4")
    assert texts(later.prompt)[: len(before.messages)] == texts(before)
    assert len(later.notes) == 3


@pytest.mark.parametrize("restart", [False, True])
def test_lanes_that_differ_in_their_ids_alone_keep_their_own_notes(restart: bool) -> None:
    s = Stabiliser(RULES)
    s.apply(prompt_of(HEAD.format(0), "u:Hi"), 0.0, request_id="0")
    sent = {}
    for second, ident in ((1, "a1"), (2, "b2")):
        done = s.apply(prompt_of(HEAD.format(second), *looped(ident), "a:B", "u:more"), float(second), request_id=ident)
        sent[ident] = done.prompt
    if restart:
        state, s = json.loads(json.dumps(s.export())), Stabiliser(RULES)
        assert s.load(state) == []
    for ident, before in sent.items():
        turns = (*looped(ident), "a:B", "u:more", "a:C", "u:third")
        later = s.apply(prompt_of(HEAD.format(9), *turns), 9.0, request_id=f"{ident}-later").prompt
        assert rendered(later).startswith(rendered(before))
