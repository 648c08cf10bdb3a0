"""`prefixproxy bench`: seven scenarios, straight and through the proxy, against unique-prefix controls.

A server gets a proxy of ours in front for the second arm, on a loopback port of this process and with the settings in
force; a prefixproxy's own upstream is asked for the first.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from prefixproxy.bench.measure import Arm, Measured, Report, Target, doubts
from prefixproxy.bench.plot import as_svg
from prefixproxy.bench.prompts import Sizes, shorter
from prefixproxy.bench.run import Tell, Way, measure, shared_tokens
from prefixproxy.bench.show import NOTES, as_json, tables
from prefixproxy.ending import INTERRUPTED, INTERRUPTED_CODE, run_until_told, told_to_stop
from prefixproxy.engine import Engine
from prefixproxy.errors import ProxyError, UsageError
from prefixproxy.facts.gather import proxy_status
from prefixproxy.facts.report import fact_lines
from prefixproxy.served import Served, served_at, served_by
from prefixproxy.serving import engine_settings, on_loopback
from prefixproxy.settings import Server, Settings, State, Upstream
from prefixproxy.state import MEMORY
from prefixproxy.types import Api
from prefixproxy.upkeep import Health

MOST_LANES = 32
LEAST_ROOT, MOST_ROOT_SHARE = 50, 0.7
"""Tokens, and of a slot: the rest is for turns, quotes and answers."""
MOST_URLS = 2
START_TIMEOUT_S = 300.0
READY_EVERY_S = 0.05
TABLE_WIDTH = 118


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """No `urls`: the embedded engine of `settings`, which are the proxy's too. `ask`: the model to ask for, where a
    server has several. `straight`, `proxied`: which arms."""

    settings: Settings
    urls: tuple[str, ...] = ()
    api_key: str = ""
    ask: str = ""
    lanes: int = 5
    root: int = 2500
    repeat: int = 3
    straight: bool = True
    proxied: bool = True
    json: bool = False
    plot: Path | None = None


@dataclass(slots=True, eq=False)
class _Bench:
    """A server with the ways to it."""

    target: Target
    ways: list[Way]
    sizes: Sizes
    measured: dict[Arm, Measured] = field(default_factory=dict)

    def of(self, way: Way) -> Measured:
        if way.arm not in self.measured:
            self.measured[way.arm] = Measured(way.arm)
            self.target.arms.append(self.measured[way.arm])
        return self.measured[way.arm]


def run(options: BenchOptions) -> int:
    """Measure, print and draw; the exit code. Raises UsageError when it cannot begin."""
    _check(options)
    try:
        report = run_until_told(_measured(options))
    except* (ProxyError, UsageError) as failures:
        raise UsageError(_first(failures)) from None
    if options.plot is not None:
        _write(options.plot, as_svg(report))
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2) + b"\n")
    else:
        _show(report)
    if report.failure == INTERRUPTED:
        return INTERRUPTED_CODE
    return 1 if report.failure else 0


def _check(options: BenchOptions) -> None:
    if len(options.urls) > MOST_URLS:
        raise UsageError(f"at most {MOST_URLS} servers stand side by side (got {len(options.urls)})")
    if not 1 <= options.lanes <= MOST_LANES:
        raise UsageError(f"--lanes: from 1 to {MOST_LANES} (got {options.lanes})")
    if options.root < LEAST_ROOT:
        raise UsageError(f"--root: at least {LEAST_ROOT} tokens (got {options.root})")
    if not 1 <= options.repeat <= 100:
        raise UsageError(f"--repeat: from 1 to 100 (got {options.repeat})")
    if not (options.straight or options.proxied):
        raise UsageError("--no-straight and --no-proxy leave nothing to measure")
    if options.plot is not None:
        _write(options.plot, "")


def _first(failures: BaseExceptionGroup[Exception]) -> str:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return str(failure)


async def _measured(options: BenchOptions) -> Report:
    async with AsyncExitStack() as stack:
        benches = [await stack.enter_async_context(_bench(options, url)) for url in options.urls or (None,)]
        sizes = min((bench.sizes for bench in benches), key=lambda sizes: sizes.root)
        total = options.repeat * sizes.requests * sum(len(bench.ways) for bench in benches)
        failure = ""
        with _progress(total) as tell:
            try:
                for _ in range(options.repeat):
                    for bench in benches:
                        for way in bench.ways:
                            await measure(way, bench.of(way), sizes, tell)
            except* ProxyError as failures:
                failure = _first(failures)
            except* asyncio.CancelledError:
                if not any(arm.runs for bench in benches for arm in bench.measured.values()):
                    raise
                told_to_stop()
                failure = INTERRUPTED
        return Report(sizes, options.repeat, tuple(bench.target for bench in benches), failure)


@asynccontextmanager
async def _bench(options: BenchOptions, url: str | None) -> AsyncIterator[_Bench]:
    """The server at `url`, or the embedded engine, with a proxy before it where one is to be measured."""
    async with AsyncExitStack() as stack:
        if url is None:
            served = await stack.enter_async_context(_embedded(options.settings))
        else:
            served = await served_at(url, options.api_key)
        ways = await _ways(options, served, stack)
        if not ways:
            raise UsageError(f"{served.url}: no way to it can be measured as asked")
        sizes = _fitting(options, served)
        bench = _Bench(Target(f"{served.told.kind} at {served.url}", served.told), ways, sizes)
        if served.facts.capabilities.native:
            n_shared = await shared_tokens(served.url, options.api_key, sizes)
            for way in ways:
                bench.of(way).root_tokens = n_shared
        yield bench


async def _ways(options: BenchOptions, served: Served, stack: AsyncExitStack) -> list[Way]:
    facts = served.facts
    api = Api.OLLAMA_CHAT if facts.kind == "ollama" else Api.CHAT
    model = options.ask or (facts.models[0] if facts.models else facts.model)
    straight = await _behind(served, options.api_key) if served.proxied else served.url
    counter = straight if facts.capabilities.native else ""
    ways = []
    if options.straight and straight:
        ways.append(Way(Arm.STRAIGHT, straight, api, model, options.api_key, counter))
    if options.proxied:
        through = served.url if served.proxied else await stack.enter_async_context(_proxied(options, served))
        ways.append(Way(Arm.PROXY, through, api, model, options.api_key if served.proxied else "", counter))
    return ways


async def _behind(served: Served, api_key: str) -> str:
    """The URL of a proxy's only upstream, if it can be reached from here too; "" else."""
    status = await proxy_status(served.url, api_key)
    upstreams = [one for one in (status or {}).get("upstreams", ()) if one.get("up")]
    if len(upstreams) != 1:
        return ""
    try:
        return (await served_at(str(upstreams[0]["url"]), api_key)).url
    except UsageError:
        return ""


@asynccontextmanager
async def _embedded(settings: Settings) -> AsyncIterator[Served]:
    engine = engine_settings(settings.model_copy(update={"upstreams": ()}))
    if engine is None:
        raise AssertionError("without upstreams there is an embedded engine")
    async with Engine(engine) as running:
        await running.wait_ready(START_TIMEOUT_S)
        yield await served_by(running, engine)


@asynccontextmanager
async def _proxied(options: BenchOptions, served: Served) -> AsyncIterator[str]:
    upstream = Upstream(name="server", url=served.url, api_key=options.api_key)
    own = {"upstreams": (upstream,), "state": State(path=MEMORY), "server": Server(), "tenants": ()}
    settings = options.settings.model_copy(update=own)
    async with on_loopback(settings, None) as (proxy, url):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not any(keeper.state.health is Health.UP for keeper in proxy.parts.dispatcher.keepers.values()):
            if time.monotonic() > deadline:
                raise UsageError(f"{served.url}: the proxy before it did not come up")
            await asyncio.sleep(READY_EVERY_S)
        yield url


def _fitting(options: BenchOptions, served: Served) -> Sizes:
    sizes = Sizes(options.lanes, options.root)
    n_ctx = served.facts.n_ctx_slot or served.told.n_ctx_slot
    if n_ctx is None:
        return sizes
    room = int(n_ctx * MOST_ROOT_SHARE)
    if room < LEAST_ROOT:
        raise UsageError(f"{served.url}: a slot of {n_ctx} tokens is too short for a root of {LEAST_ROOT}")
    return shorter(sizes, room)


def _show(report: Report) -> None:
    console = Console(file=sys.stdout, width=TABLE_WIDTH, highlight=False)
    for target in report.targets:
        console.print("\n".join(fact_lines(target.facts)) + "\n", markup=False, soft_wrap=True)
    lanes, runs = report.sizes.lanes, "one run" if report.repeat == 1 else f"{report.repeat} runs"
    console.print(f"{lanes} lanes, a root of about {report.sizes.root:,} tokens, {runs}.", markup=False)
    for table in tables(report):
        console.print(table)
    notes: list[str] = [*NOTES]
    if told := doubts(report):
        notes += ["", "What these numbers cannot say:", *(f"  {doubt}" for doubt in told)]
    if report.failure:
        notes += ["", f"It stopped early: {report.failure}"]
    console.print("\n".join(notes), markup=False, soft_wrap=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as failure:
        raise UsageError(f"--plot: cannot write {path}: {failure.strerror or failure}") from None


@contextmanager
def _progress(total: int) -> Iterator[Tell]:
    """A bar on stderr, on a terminal only."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=total)
        yield lambda scenario: progress.update(task, advance=1, description=scenario)
