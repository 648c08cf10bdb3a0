"""The simulator against the real engine: the same requests, the tokens that both evaluate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy

from prefixproxy.demo.prompt import briefing
from prefixproxy.demo.wave import evaluated_total
from prefixproxy.schedule.types import Policy
from prefixproxy.simulate.play import Fleet, play
from prefixproxy.simulate.trace import read_trace

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

N_SLOTS = 4
KV_BYTES = 272
"""Of one token of the tiny model, in a file the server saved."""
WORTH_S = 0.002
"""So little that a root is worth its warm-up at whatever rate this machine evaluates a tiny model: near the default of
half a second one root would be and the next would not, and no simulation could know which."""


class Client:
    """Talks to the proxy, one conversation at a time or many."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, messages: list[dict[str, str]], max_tokens: int = 12) -> str:
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
        answer = await self._http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def talk(self, root: str, who: str, turns: int) -> None:
        messages = [{"role": "system", "content": root}]
        for turn in range(turns):
            question = f"{who}: what does section {turn + 2} say?"
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": await self.ask(messages)})

    async def fan_out(self, root: str, lanes: int) -> None:
        async with asyncio.TaskGroup() as group:
            for lane in range(lanes):
                question = [{"role": "user", "content": f"Lane {lane}: sum up section {lane + 1} in one line."}]
                group.create_task(self.ask([{"role": "system", "content": root}, *question]))


async def fan_outs(client: Client) -> None:
    for name in ("north", "south", "north"):
        await client.fan_out(briefing(name, 1800), 5)


async def one_by_one(client: Client) -> None:
    for turn in range(4):
        await client.talk(briefing("east", 900), f"User {turn}", 3)


async def taking_turns(client: Client) -> None:
    """Seven conversations over two roots on four slots, one by one: at once, milliseconds decide who loses a slot."""
    talks: dict[int, list[dict[str, str]]] = {}
    for turn in range(3):
        for number in range(7):
            root = briefing("west" if number % 2 else "mole", 1200)
            messages = talks.setdefault(number, [{"role": "system", "content": root}])
            messages.append({"role": "user", "content": f"Talker {number}: what does section {turn + 2} say?"})
            messages.append({"role": "assistant", "content": await client.ask(messages)})


@pytest.mark.timeout(240)
@pytest.mark.parametrize("load", [fan_outs, one_by_one, taking_turns])
async def test_evaluated_tokens_are_those_of_the_engine(
    engine_factory: Callable[..., RunningEngine], load: Callable[[Client], Any]
) -> None:
    engine = engine_factory(parallel=N_SLOTS, ctx=N_SLOTS * 4096)
    async with running_proxy(engine.url) as proxy, httpx.AsyncClient(base_url=proxy.url, timeout=120) as http:
        proxy.proxy.parts.dispatcher.set_policy(Policy(root_threshold_s=WORTH_S))
        before = await evaluated_total(engine.url)
        await load(Client(http))
        after = await evaluated_total(engine.url)
        export = (await http.get("/prefixproxy/requests", params={"format": "jsonl"})).content
    assert before is not None
    assert after is not None
    trace = read_trace(export.splitlines())
    # what came one by one when it was recorded must not overlap when it is played, however fast this machine is
    apart = 1.0 if load is fan_outs else 20.0
    arrivals = [replace(arrival, time=apart * arrival.time) for arrival in trace.arrivals]
    fleet = Fleet(N_SLOTS, prefill_rate=5000.0, decode_rate=500.0, kv_bytes=KV_BYTES, root_threshold_s=WORTH_S)
    simulated = play(arrivals, fleet)
    print(f"{load.__name__}: engine {after - before}, simulated {simulated.evaluated}, least {simulated.least}")
    assert simulated.evaluated == pytest.approx(after - before, rel=0.02)
