"""Runs the scenarios on one server, straight and through a proxy."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import orjson

from prefixproxy.backends.http import HttpUpstream
from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.bench.measure import Arm, Measured, Request, Run, Spent
from prefixproxy.bench.prompts import (
    Messages,
    Scenario,
    Sizes,
    Wave,
    continued,
    lane,
    one_by_one,
    reducer,
    shared,
    shared_at_once,
    unique,
    volatile,
)
from prefixproxy.bench.send import send
from prefixproxy.demo.prompt import briefing
from prefixproxy.types import Api
from prefixproxy.warming import Rendering, root_tokens

PATH = "/v1/chat/completions"
CALL_TIMEOUT_S = 60.0
_EVALUATED = re.compile(rb"^llamacpp:prompt_tokens_total (\d+)", re.MULTILINE)
_SECONDS = re.compile(rb"^llamacpp:prompt_seconds_total ([\d.e+-]+)", re.MULTILINE)

Tell = Callable[[str], None]
"""Called after every request, with the name of its scenario."""


@dataclass(frozen=True, slots=True)
class Way:
    """Where one arm's requests go. `counter`: the URL of the llama-server whose counters tell what it cost, or ""."""

    arm: Arm
    url: str
    api: Api
    model: str
    api_key: str = ""
    counter: str = ""


async def measure(way: Way, measured: Measured, sizes: Sizes, tell: Tell) -> None:
    """One run of every scenario, added to `measured`. Raises ProxyError when the server fails on a request."""
    client = HttpUpstream("server", way.url, way.api_key)
    try:
        await _Walk(way, client, measured, sizes, tell).walk()
    finally:
        await client.close()


async def shared_tokens(url: str, api_key: str, sizes: Sizes) -> int:
    """Tokens that two lanes share, as a llama-server's own template and tokenizer have it."""
    server = LlamaServer("server", url, api_key)
    text = briefing(secrets.token_hex(3), sizes.root)
    bodies = [orjson.dumps({"messages": list(lane(text, number))}) for number in range(2)]
    try:
        return len(await root_tokens(server, [Rendering(PATH, body) for body in bodies]))
    finally:
        await server.close()


class _Walk:
    def __init__(self, way: Way, client: HttpUpstream, measured: Measured, sizes: Sizes, tell: Tell) -> None:
        self._way = way
        self._client = client
        self._measured = measured
        self._sizes = sizes
        self._tell = tell

    async def walk(self) -> None:
        sizes = self._sizes
        await self._run(Scenario.UNIQUE, unique(sizes, _nonce(), briefing))
        waves = shared(sizes, _nonce(), briefing)
        answers = await self._run(Scenario.SHARED, waves)
        second = continued(_counted(waves), answers)
        answers = await self._run(Scenario.CONTINUED, one_by_one(second))
        third = continued(second, answers)
        answers = await self._run(Scenario.CONTINUED_AT_ONCE, [Wave(tuple(third))])
        await self._run(Scenario.REDUCER, reducer(sizes, _nonce(), answers, briefing))
        await self._run(Scenario.SHARED_AT_ONCE, shared_at_once(sizes, _nonce(), briefing))
        now = datetime.now(UTC)
        clock = [(now + timedelta(seconds=i)).isoformat(timespec="seconds") for i in range(sizes.lanes + 1)]
        await self._run(Scenario.VOLATILE, volatile(sizes, _nonce(), clock, briefing))

    async def _run(self, scenario: Scenario, waves: Sequence[Wave]) -> list[str]:
        """The answers of the requests that count."""
        requests: list[Request] = []
        answers: list[str] = []
        wall_s, before = 0.0, await self._spent()
        for number, wave in enumerate(waves):
            if wave.counted and (not number or not waves[number - 1].counted):
                before = await self._spent()
            started = time.monotonic()
            async with asyncio.TaskGroup() as group:
                sent = [group.create_task(self._send(scenario, prompt)) for prompt in wave.prompts]
            if wave.counted:
                wall_s += time.monotonic() - started
                requests += [task.result()[0] for task in sent]
                answers += [task.result()[1] for task in sent]
        after = await self._spent()
        spent = None
        if before is not None and after is not None:
            spent = Spent(after.evaluated - before.evaluated, after.prompt_ms - before.prompt_ms)
        self._measured.add(scenario, Run(wall_s, tuple(requests), spent))
        return answers

    async def _send(self, scenario: Scenario, prompt: Messages) -> tuple[Request, str]:
        done = await send(self._client, self._way.api, self._way.model, prompt)
        self._tell(scenario)
        return done

    async def _spent(self) -> Spent | None:
        """What the server has spent on prompts since it started; None where it does not count that."""
        if not self._way.counter:
            return None
        client = HttpUpstream("server", self._way.counter, self._way.api_key)
        try:
            response = await client.open("GET", "/metrics", read_timeout_s=CALL_TIMEOUT_S)
            try:
                told = await response.read()
            finally:
                await response.close()
        finally:
            await client.close()
        evaluated, seconds = _EVALUATED.search(told), _SECONDS.search(told)
        return Spent(int(evaluated[1]), 1e3 * float(seconds[1])) if evaluated and seconds else None


def _counted(waves: Sequence[Wave]) -> list[Messages]:
    return [prompt for wave in waves if wave.counted for prompt in wave.prompts]


def _nonce() -> str:
    return secrets.token_hex(3)
