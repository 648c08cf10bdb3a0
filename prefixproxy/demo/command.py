"""`prefixproxy demo`: five agents with one briefing start at once, straight to a server and through the proxy.

The same embedded engine runs twice, never at the same time: with the flags a plain `llama-server` would have, and with
the recommended ones behind a real proxy on a loopback port of this process.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson

from prefixproxy import __version__
from prefixproxy.app import EMBEDDED, Proxy
from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.body import Body
from prefixproxy.demo.prompt import Lane, briefing
from prefixproxy.demo.show import Board, Report, as_json, report_lines
from prefixproxy.demo.wave import PATH, LaneRun, Wave, run_wave
from prefixproxy.ending import run_until_told
from prefixproxy.engine import (
    Engine,
    EngineFailed,
    EngineSettings,
    check_installed,
    check_model,
    default_model,
)
from prefixproxy.errors import ProxyError, UsageError
from prefixproxy.facts.gather import engine_flags, gather_engine, look
from prefixproxy.serving import DEFAULT_CTX_TOKENS, on_loopback
from prefixproxy.settings import load_settings, packaged_config
from prefixproxy.types import Api
from prefixproxy.upkeep import Health
from prefixproxy.warming import Rendering, root_tokens

N_SLOTS = 4
BRIEFING_TOKENS = 2600
QUICK_TOKENS = 800
MOST_LANES = 64
START_TIMEOUT_S = 120.0
READY_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """`model` None: the bundled one."""

    model: Path | None = None
    lanes: int = 5
    quick: bool = False
    json: bool = False


def run(options: DemoOptions) -> int:
    """Run the demo and print its report; the exit code. Raises UsageError when it cannot even start."""
    check_installed()
    model = options.model or default_model()
    check_model(model)
    if not 1 <= options.lanes <= MOST_LANES:
        raise UsageError(f"--lanes: from 1 to {MOST_LANES} (got {options.lanes})")
    board = Board(sys.stderr)
    with board.shown():
        report = run_until_told(_Demo(options, model, board).run())
    if report.failure and not report.waves:
        raise UsageError(report.failure)
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2) + b"\n")
    else:
        sys.stdout.write("\n".join(report_lines(report)) + "\n")
    return 1 if report.failed else 0


class _Demo:
    """One run of it, step by step."""

    def __init__(self, options: DemoOptions, model: Path, board: Board) -> None:
        self._options = options
        self._board = board
        self._engine = EngineSettings(model, parallel=N_SLOTS, ctx=N_SLOTS * DEFAULT_CTX_TOKENS)
        self._report = Report(model.name, N_SLOTS, DEFAULT_CTX_TOKENS)
        self._clock = datetime.now(UTC)

    async def run(self) -> Report:
        started = time.monotonic()
        try:
            await self._straight()
            await self._through_proxy()
        except* (ProxyError, UsageError) as failures:
            self._report.failure = "; ".join(str(failure) for failure in _leaves(failures))
        self._report.total_s = time.monotonic() - started
        return self._report

    async def _straight(self) -> None:
        self._board.doing("starting llama-server with its stock flags")
        async with Engine(_stock(self._engine)) as engine:
            facts = await engine.wait_ready(START_TIMEOUT_S)
            if facts is not None:
                self._report.n_slots, self._report.n_ctx_slot = facts.n_slots, facts.n_ctx_slot
            self._report.straight = await gather_engine(engine, _stock(self._engine))
            bodies = self._bodies(self._briefing())
            await self._wave("straight", "straight to llama-server, cold", engine.url, engine.url, bodies)
            self._board.doing("stopping it")

    async def _through_proxy(self) -> None:
        self._board.doing("starting another llama-server behind prefixproxy")
        async with proxied(self._engine) as (proxy, url):
            server = await _ready(proxy)
            self._report.proxied = (await look(server.url, **_known(proxy, self._engine))).facts
            text = self._briefing()
            bodies = self._bodies(text)
            self._report.root_tokens = await _root_tokens(proxy, server, bodies)
            await self._wave("cold", "through prefixproxy, cold", url, server.url, bodies)
            again = self._bodies(text, asked=self._options.lanes)
            await self._wave("known", "through prefixproxy, new lanes on the known root", url, server.url, again)
            self._board.doing("stopping it")

    async def _wave(
        self, name: str, title: str, url: str, engine_url: str, bodies: Sequence[Mapping[str, Any]]
    ) -> None:
        wave = Wave(name, title, [LaneRun(number) for number in range(1, len(bodies) + 1)])
        self._report.waves.append(wave)
        self._board.wave(wave)
        await run_wave(wave, url, engine_url, bodies, self._board.lane)

    def _briefing(self) -> str:
        """A new one each time, so that no arm profits from another's."""
        return briefing(secrets.token_hex(3), QUICK_TOKENS if self._options.quick else BRIEFING_TOKENS)

    def _bodies(self, text: str, asked: int = 0) -> list[dict[str, Any]]:
        """One wave's lanes, each with its own clock and question, after so many questions `asked`."""
        run, of = secrets.token_hex(4), self._options.lanes
        return [Lane(n + 1, of, run, self._next_time(), asked + n).body(text) for n in range(of)]

    def _next_time(self) -> str:
        self._clock += timedelta(seconds=1)
        return self._clock.isoformat(timespec="seconds")


@asynccontextmanager
async def proxied(engine: EngineSettings) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy with default settings, on a free loopback port, over this engine; its parts and its URL."""
    settings = load_settings(packaged_config("default.toml"), {"state.path": ":memory:"}, {})
    async with on_loopback(settings, engine) as running:
        yield running


async def _ready(proxy: Proxy) -> LlamaServer:
    """Wait for the engine behind the proxy. Raises EngineFailed when it does not come up."""
    state = proxy.parts.dispatcher.keepers[EMBEDDED].state
    deadline = time.monotonic() + START_TIMEOUT_S
    while state.health is not Health.UP:
        if state.health is not Health.LOADING or time.monotonic() > deadline:
            raise EngineFailed(f"the engine behind the proxy did not come up: {state.failure}")
        await asyncio.sleep(READY_EVERY_S)
    if not isinstance(state.backend, LlamaServer):
        raise TypeError("the embedded engine is a llama-server")
    return state.backend


async def _root_tokens(proxy: Proxy, server: LlamaServer, bodies: Sequence[Mapping[str, Any]]) -> int:
    """Tokens that the lanes share once they are stabilised, by the server's template and tokenizer. Sends no prompt,
    and leaves nothing in the proxy's memory."""
    planner, now = proxy.parts.planner, proxy.parts.clock()
    plans = [planner.explain(Api.CHAT, Body.parse(orjson.dumps(body)), now) for body in bodies]
    return len(await root_tokens(server, [Rendering(PATH, plan.rendered()) for plan in plans]))


def _known(proxy: Proxy, engine: EngineSettings) -> dict[str, Any]:
    """What this process knows better of its engine than that tells."""
    facts = proxy.parts.dispatcher.keepers[EMBEDDED].state.facts
    return {
        "name": EMBEDDED,
        "kind": "llama-server",
        "flags": engine_flags(engine, "DIR"),
        "build": facts.build if facts else "",
        "through": __version__,
    }


def _stock(engine: EngineSettings) -> EngineSettings:
    return EngineSettings(engine.model, parallel=engine.parallel, ctx=engine.ctx, stock=True)


def _leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    for failure in group.exceptions:
        if isinstance(failure, BaseExceptionGroup):
            yield from _leaves(failure)
        else:
            yield failure
