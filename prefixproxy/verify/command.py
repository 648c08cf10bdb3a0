"""`prefixproxy verify`: the shared-prefix corruption suite, reuse against no reuse, on a server, a proxy, or the
embedded engine. What it finds is kept in the state file, where a proxy looks before it reuses anything."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import Progress

from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.demo.prompt import briefing
from prefixproxy.ending import INTERRUPTED, run_until_told, told_to_stop
from prefixproxy.engine import Engine
from prefixproxy.errors import ProxyError, UsageError
from prefixproxy.facts.report import comparable
from prefixproxy.facts.startup import log_lines
from prefixproxy.served import Served, served_at, served_by
from prefixproxy.serving import engine_settings
from prefixproxy.settings import Settings
from prefixproxy.state import StateFile
from prefixproxy.types import UpstreamFacts
from prefixproxy.verdicts import row_name
from prefixproxy.verify.judge import Judged, Outcome, as_row, judged
from prefixproxy.verify.report import as_json, report_lines
from prefixproxy.verify.run import Suite
from prefixproxy.verify.scenarios import RECALL_SHARE, Place, Scenario, scenarios

LEAST_CTX = 512
"""Tokens; a shorter slot holds no conversation worth comparing."""
ROOT_SHARE = 0.4
"""Of a slot, at the most, for a root that grows by a few turns."""
WORTH_MARGIN = 1.3
"""Over the tokens a proxy copies a root for: its rate is a measurement, ours of tokens per byte an estimate."""
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """`url` None: the embedded engine of `settings`. `control`: where the runs without reuse go, if not there too.
    `root`, `long`: tokens of a shared root and of the long prompt. `log`: the server's startup log."""

    settings: Settings
    url: str | None = None
    control: str | None = None
    api_key: str = ""
    root: int = 600
    long: int = 4096
    log: Path | None = None
    json: bool = False


def run(options: VerifyOptions) -> int:
    """Verify, print the report, keep the verdict; the exit code. Raises UsageError for what it cannot compare."""
    if options.root < 50 or options.long < 50:
        raise UsageError("--root, --long: at least 50 tokens")
    try:
        result = run_until_told(_verified(options))
    except* ProxyError as failures:
        raise UsageError(f"verify stopped, nothing is concluded: {_first(failures)}") from None
    except* UsageError as failures:
        raise UsageError(str(_first(failures))) from None
    now = time.time()
    kept = _keep(options.settings.state.path, result, now)
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(as_json(result, now), option=orjson.OPT_INDENT_2) + b"\n")
    else:
        sys.stdout.write("\n".join([*report_lines(result), kept]) + "\n")
    return 0 if result.outcome is Outcome.PASSED else 1


def _first(failures: BaseExceptionGroup[Exception]) -> Exception:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    if not isinstance(failure, Exception):
        raise failure
    return failure


async def _verified(options: VerifyOptions) -> Judged:
    async with _target(options) as served:
        facts = _one_kind(served)
        if options.control is not None:
            _require_comparable(served, await served_at(options.control, options.api_key))
        place = _place(served, facts)
        root = min(options.root, int(place.n_ctx_slot * ROOT_SHARE))
        long = min(options.long, int(place.n_ctx_slot * RECALL_SHARE))
        found = scenarios(place, secrets.token_hex(3), root, long, briefing)
        server = LlamaServer("server", served.url, options.api_key)
        other = LlamaServer("control", options.control or served.url, options.api_key)
        try:
            with _progress(3 * sum(one.requests for one in found)) as tell:
                suite = Suite(server, other, place.n_slots, tell)
                stopped = await _walked(suite, found)
        finally:
            await server.close()
            await other.close()
        skipped = {one.name: one.skipped for one in found if one.skipped}
        if stopped is not None:
            return _cut_short(judged(facts, served.told, suite.exchanges, skipped), stopped)
        after = facts
        if options.url:
            after = _one_kind(await served_at(served.url, options.api_key, _lines(options)))
        _require_equal(facts, after, "the same server at the end")
    result = judged(facts, served.told, suite.exchanges, skipped)
    if facts.capabilities.observe:
        return result
    unseen = "GET /slots is refused: whether somebody else used the server meanwhile could not be seen"
    return replace(result, doubts=(*result.doubts, unseen))


async def _walked(suite: Suite, found: Sequence[Scenario]) -> BaseException | None:
    """What ended it early: a server that failed or went away, or Ctrl-C."""
    stopped: BaseException | None = None
    try:
        await suite.run(found)
    except* ProxyError as failures:
        stopped = _first(failures)
    except* asyncio.CancelledError:
        told_to_stop()
        stopped = asyncio.CancelledError()
    return stopped


def _cut_short(result: Judged, why: BaseException) -> Judged:
    """Of a run that ended early only a difference counts: it was found all the same. Raises `why` without one."""
    if result.outcome is not Outcome.FAILED:
        raise why
    reason = INTERRUPTED if isinstance(why, asyncio.CancelledError) else str(why)
    return replace(result, doubts=(*result.doubts, f"it stopped before its end: {reason}"))


@asynccontextmanager
async def _target(options: VerifyOptions) -> AsyncIterator[Served]:
    if options.url is not None:
        yield await served_at(options.url, options.api_key, _lines(options))
        return
    engine = engine_settings(options.settings.model_copy(update={"upstreams": ()}))
    if engine is None:
        raise AssertionError("without upstreams there is an embedded engine")
    async with Engine(engine) as running:
        await running.wait_ready(START_TIMEOUT_S)
        yield await served_by(running, engine)


def _lines(options: VerifyOptions) -> Sequence[str]:
    return () if options.log is None else log_lines(options.log)


def _one_kind(served: Served) -> UpstreamFacts:
    """What answers there. Raises UsageError where that is not one kind of llama-server."""
    for one in served.upstreams:
        if not one.capabilities.native:
            why = "cannot be asked for an answer without reuse, so there is nothing to compare with"
            raise UsageError(f"{served.url}: {one.kind} {why}")
        if one.reuse_off:
            why = "through it nothing can be tested; verify the upstream's own URL"
            raise UsageError(f"{served.url}: this proxy reuses nothing on upstream {one.name} ({one.reuse_off}): {why}")
        _require_equal(served.facts, one, f"upstream {one.name}")
    if not served.facts.n_ctx_slot or served.facts.n_ctx_slot < LEAST_CTX:
        told = served.facts.n_ctx_slot or "an unknown number of"
        raise UsageError(f"{served.url}: a slot of {told} tokens is too short; {LEAST_CTX} are needed")
    return served.facts


def _require_comparable(served: Served, control: Served) -> None:
    _require_equal(_one_kind(served), _one_kind(control), "the control")
    may = comparable(served.told, control.told)
    if not may.ok:
        raise UsageError(f"not compared: {may.reason}")


def _require_equal(one: UpstreamFacts, other: UpstreamFacts, what: str) -> None:
    """Answers are compared on equal terms only: a smaller slot looks like a worse model."""
    pairs = {
        "n_ctx_slot": (one.n_ctx_slot, other.n_ctx_slot),
        "KV types": (one.kv_types, other.kv_types),
        "model": (one.model, other.model),
        "build": (one.build, other.build),
    }
    for name, (here, there) in pairs.items():
        if here != there:
            raise UsageError(f"not compared: {name} is {here} here and {there} on {what}")


def _place(served: Served, facts: UpstreamFacts) -> Place:
    can = facts.capabilities
    return Place(
        n_slots=sum(one.n_slots for one in served.upstreams),
        n_ctx_slot=facts.n_ctx_slot or 0,
        copies=not served.proxied and can.pin and can.snapshot,
        worth_tokens=min(int(WORTH_MARGIN * served.worth_tokens), int((facts.n_ctx_slot or 0) * RECALL_SHARE)),
    )


def _keep(path: str, result: Judged, unix_time: float) -> str:
    """Write the verdict down; what to tell of that."""
    if result.outcome is Outcome.INCONCLUSIVE:
        return "No verdict is kept."
    with StateFile(path) as state:
        written = state.persistent and state.update({row_name(result.facts): as_row(result, unix_time)})
    if not written:
        return f"The verdict is not kept: {path} is no file that can be written (state.path)."
    effect = "reuses nothing" if result.outcome is Outcome.FAILED else "may reuse prefixes"
    types = result.facts.kv_types
    cache = f"K {types[0]}, V {types[1]}" if types else "KV types that are unknown (--log FILE tells them)"
    return f"Kept in {path}: a proxy with this state file {effect} on this model, build, context per slot and {cache}."


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, on a terminal only."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda _: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("verifying", total=total)
        yield lambda scenario: progress.update(task, advance=1, description=f"verifying: {scenario}")
