"""The journal over a restart, and its export: what `simulate` and `lint` read is what the proxy has seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_proxy import RunningProxy, proxied_stub, running_proxy
from stub_upstream import StubUpstream

from prefixproxy.errors import UsageError
from prefixproxy.lint.compare import TokenCounter
from prefixproxy.lint.input import read_input
from prefixproxy.lint.report import Report, Setup, examine
from prefixproxy.lint.show import as_json
from prefixproxy.simulate.trace import read_trace
from prefixproxy.volatile.files import load_rules

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
RULES = "".join(f"Rule {n}: check section {n} of the report, and say what is missing there.\n" for n in range(40))


def turn(number: int) -> bytes:
    """With a clock, spelled over several lines, and with half a surrogate pair in it."""
    return (
        b'{\r\n  "messages": [\n    {"role": "system", "content": "Current time: 2026-11-29 15:0%d:00\\n%b"},\n'
        b'    {"role": "user", "content": "Question %d, \\ud83d"}\n  ],\n  "max_tokens": 2\n}'
    ) % (number, RULES.replace("\n", "\\n").encode(), number)


async def ask(running: RunningProxy, body: bytes) -> None:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text


async def got(running: RunningProxy, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        answer = await client.get(path)
        assert answer.status_code == 200, answer.text
        return answer


async def export(running: RunningProxy) -> bytes:
    return (await got(running, "/prefixproxy/requests?format=jsonl")).content


class LenientStub(StubUpstream):
    """It does not read what it was sent, which orjson would refuse."""

    async def _generate(self, exchange: Any) -> None:
        exchange.request = replace(exchange.request, body=exchange.request.body.replace(rb"\ud83d", b"?"))
        await super()._generate(exchange)


async def test_records_outlive_the_process_and_can_be_explained_after_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "state__path": str(tmp_path / "state.db"),
        "journal__on_disk": True,
        "journal__store_text": True,
    }
    async with LenientStub() as stub:
        async with running_proxy(stub.url, **settings) as running:
            for number in (1, 2):
                await ask(running, turn(number))
            before = (await got(running, "/prefixproxy/requests")).json()
        async with running_proxy(stub.url, **settings) as running:
            assert (await got(running, "/prefixproxy/requests")).json() == before
            newest = before["requests"][0]["id"]
            strip = (await got(running, f"/prefixproxy/requests/{newest}")).json()["explain"]["strip"]
            assert [part["segment"] for part in strip] == ["system[0]", "user[1]"]
            assert [part for part in strip if "text" in part] == [], "text is kept in memory only"
            await ask(running, turn(3))
            after = (await got(running, "/prefixproxy/requests")).json()
            assert (after["last"], after["requests"][1:]) == (3, before["requests"])
    assert b"Question" not in (tmp_path / "state.db").read_bytes()


async def test_without_the_setting_nothing_of_it_is_kept(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"state__path": str(tmp_path / "state.db")}
    async with LenientStub() as stub:
        async with running_proxy(stub.url, **settings) as running:
            await ask(running, turn(1))
        async with running_proxy(stub.url, **settings) as running:
            assert (await got(running, "/prefixproxy/requests")).json() == {"requests": [], "last": 0}


def report(*sources: tuple[str, bytes]) -> dict[str, Any]:
    found = read_input(sources, None)
    made: Report = examine(found.samples, Setup(load_rules([], frozenset())), TokenCounter(None), "bytes/4")
    shown = as_json(made)
    for request in shown["requests"]:
        del request["source"], request["place"], request["api_guessed"]
    return shown


async def test_lint_makes_of_the_export_what_it_makes_of_the_bodies() -> None:
    bodies = [turn(number) for number in range(4)]
    async with proxied_stub(LenientStub(), journal__store_text=True) as (_, running):
        for body in bodies:
            await ask(running, body)
        exported = await export(running)
    assert len(exported.splitlines()) == 4, "a body is on the line of its record, however it was spelled"
    assert report(("export", exported)) == report(*((str(n), body) for n, body in enumerate(bodies)))
    assert len(read_trace(exported.splitlines()).arrivals) == 4, "simulate reads it as it reads one without text"


async def test_lint_says_what_an_export_without_text_lacks() -> None:
    async with proxied_stub(LenientStub()) as (_, running):
        await ask(running, turn(1))
        exported = await export(running)
    with pytest.raises(UsageError, match=r"no prompt text.*journal\.store_text = true"):
        read_input([("journal.jsonl", exported)], None)


@pytest.mark.parametrize("model", [rb"\ud800", b"m" * 5000, "modèle".encode()])
async def test_what_a_client_calls_its_model_harms_no_metric_and_no_export(model: bytes) -> None:
    async with running_proxy("http://127.0.0.1:9", wait_ready=False) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            body = b'{"model": "%b", "messages": [{"role": "user", "content": "x"}]}' % model
            assert (await client.post(CHAT, content=body)).status_code == 503
        (record,) = (await got(running, "/prefixproxy/requests")).json()["requests"]
        metrics = (await got(running, "/metrics")).text
        assert f'outcome="upstream_down",path="{CHAT}"}} 1.0' in metrics
        assert f'model="{record["model"]}"' in metrics
        assert len(record["model"]) <= 200
        assert await export(running)
