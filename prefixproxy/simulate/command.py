"""`prefixproxy simulate`: recorded or made-up arrivals on other slot counts and policies, with the real scheduler."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import orjson
from rich.console import Console
from rich.progress import Progress

from prefixproxy.errors import UsageError
from prefixproxy.facts.report import UNKNOWN
from prefixproxy.simulate.play import (
    ASSUMED_DECODE_RATE,
    ASSUMED_PREFILL_RATE,
    Arrival,
    Fleet,
    Outcome,
    PolicyName,
    play,
)
from prefixproxy.simulate.report import Report, as_json, as_svg, report_lines
from prefixproxy.simulate.synthetic import WORKLOADS, Workload, synthetic
from prefixproxy.simulate.trace import read_trace

STDIN = "-"
MOST_SLOTS, MOST_SERVERS, MOST_REQUESTS = 100_000, 1_000, 10_000_000
PREFILL_RATES, DECODE_RATES = (1, 10_000_000), (0.1, 1_000_000)
"""Tokens per second. A slower prefill would take the whole virtual day, and be looked at ten times a second."""
POLICIES: tuple[PolicyName, ...] = ("cost", "fifo")


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """`trace`: a journal export, or "-"; or else `synthetic`: one of WORKLOADS, with `requests`, `rate` and `seed`.
    `slots` and `policies`: lists with commas. Rates None: as the trace shows them, else Fleet's own."""

    trace: str | None = None
    synthetic: str | None = None
    requests: int = 1000
    rate: float = 1.0
    seed: int = 1
    slots: str = "1,2,4,8"
    policies: str = "cost,fifo"
    servers: int = 1
    prefill_rate: float | None = None
    decode_rate: float | None = None
    queue_limit: int = 256
    queue_timeout_s: float = 600.0
    side_slots: int = 0
    kv_bytes: int = 50_000
    fork: bool = True
    root_threshold_s: float = 0.5
    json: bool = False
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class _Load:
    """What is replayed; each call of `arrivals` starts it anew."""

    name: str
    n: int
    arrivals: Callable[[], Iterator[Arrival]]
    prefill_rate: float | None = None
    decode_rate: float | None = None
    notes: tuple[str, ...] = ()
    model: str = "made up"
    tokens: str = "made up"


def run(options: SimulateOptions) -> int:
    """Play, print the report and return the exit code. Raises UsageError for what is wrong with options or trace."""
    _check(options)
    slots = _numbers("--slots", options.slots)
    _check_slots(options, slots)
    policies = _policies(options.policies)
    load = _recorded(options.trace, options) if options.trace is not None else _made_up(options)
    fleet = _fleet(options, load)
    outcomes: list[Outcome] = []
    with _progress(len(slots) * len(policies) * load.n) as advance:
        for n in slots:
            for policy in policies:
                done = len(outcomes) * load.n
                tell = _teller(advance, done)
                outcomes.append(play(load.arrivals(), replace(fleet, slots=n, policy=policy), tell))
    report = Report(load.name, tuple(outcomes), load.notes, load.model, load.tokens)
    if options.plot is not None:
        _write(options.plot, as_svg(report))
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2) + b"\n")
    else:
        sys.stdout.write("\n".join(report_lines(report)) + "\n")
    return 0


def _teller(advance: Callable[[int], None], done: int) -> Callable[[int], None]:
    return lambda ended: advance(done + ended)


def _check(options: SimulateOptions) -> None:
    if (options.trace is None) == (options.synthetic is None):
        raise UsageError("name one load: a TRACE (a journal export, - is standard input), or --synthetic KIND")
    if options.synthetic is not None and options.synthetic not in WORKLOADS:
        raise UsageError(f"--synthetic: {options.synthetic!r} is none of {', '.join(WORKLOADS)}")
    for name, (value, least, most) in _bounded(options).items():
        if value is not None and not least <= value <= most:
            raise UsageError(f"{name}: from {least:g} to {most:,} (got {value:g})")


def _bounded(options: SimulateOptions) -> dict[str, tuple[float | None, float, float]]:
    """Each number, and what it may be. What `[admission]` has is bounded as there; rates and times so that seconds
    still count when the last request ends."""
    return {
        "--requests": (options.requests, 1, MOST_REQUESTS),
        "--rate": (options.rate, 0.0001, 1_000_000),
        "--servers": (options.servers, 1, MOST_SERVERS),
        "--kv-bytes": (options.kv_bytes, 1, 100_000_000),
        "--prefill-rate": (options.prefill_rate, *PREFILL_RATES),
        "--decode-rate": (options.decode_rate, *DECODE_RATES),
        "--queue-limit": (options.queue_limit, 1, 65_536),
        "--queue-timeout": (options.queue_timeout_s, 0.001, 86_400),
        "--side-slots": (options.side_slots, 0, 1_024),
        "--root-threshold": (options.root_threshold_s, 0, 86_400),
    }


def _check_slots(options: SimulateOptions, slots: list[int]) -> None:
    """Of all the columns together."""
    if max(slots) * options.servers > MOST_SLOTS:
        raise UsageError(
            f"--servers: {options.servers:,} of {max(slots):,} slots each are more than {MOST_SLOTS:,} slots"
        )
    if options.side_slots >= min(slots):
        raise UsageError(
            f"--side-slots: must leave a slot for other requests: fewer than the {min(slots)} of the smallest server "
            f"(got {options.side_slots}; --slots)"
        )


def _numbers(name: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_SLOTS for part in parts):
        raise UsageError(f"{name}: whole numbers from 1 to {MOST_SLOTS} with commas between them (got {text!r})")
    return list(dict.fromkeys(map(int, parts)))


def _policies(text: str) -> list[PolicyName]:
    parts = [part.strip() for part in text.split(",")]
    if not set(parts) <= set(POLICIES):
        raise UsageError(f"--policy: cost, fifo or both with a comma between them (got {text!r})")
    return [cast(PolicyName, part) for part in dict.fromkeys(parts)]


def _recorded(name: str, options: SimulateOptions) -> _Load:
    shown = "standard input" if name == STDIN else name
    try:
        trace = read_trace(_lines(name))
    except UsageError as failure:
        raise UsageError(f"{shown}: {failure}") from None
    notes = [f"{trace.skipped} records of requests that were never evaluated are left out."] if trace.skipped else []
    notes.append(f"When it was recorded its requests evaluated {trace.evaluated:,} tokens, warm-ups not included.")
    if trace.prefill_rate is None and not options.prefill_rate:
        notes.append(f"It shows no prefill rate; {ASSUMED_PREFILL_RATE:g} tokens/s are assumed (--prefill-rate).")
    _check_recorded(shown, "--prefill-rate", options.prefill_rate, trace.prefill_rate, PREFILL_RATES)
    _check_recorded(shown, "--decode-rate", options.decode_rate, trace.decode_rate, DECODE_RATES)
    return _Load(
        f"{len(trace.arrivals):,} requests of {shown}.",
        len(trace.arrivals),
        lambda: iter(trace.arrivals),
        trace.prefill_rate,
        trace.decode_rate,
        tuple(notes),
        f"{', '.join(trace.models) or UNKNOWN} (as recorded)",
        ", ".join(f"{n:,} counts {source}" for source, n in trace.counted.items()),
    )


def _check_recorded(
    shown: str, name: str, given: float | None, recorded: float | None, bounds: tuple[float, float]
) -> None:
    least, most = bounds
    if given is None and recorded is not None and not least <= recorded <= most:
        raise UsageError(f"{shown}: it shows {recorded:g} tokens/s, which nothing can be played at: give {name}")


def _lines(name: str) -> list[bytes]:
    try:
        text = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
    except OSError as failure:
        raise UsageError(f"cannot read it: {failure.strerror or failure}") from None
    return text.split(b"\n")


def _made_up(options: SimulateOptions) -> _Load:
    kind = cast(Workload, options.synthetic)

    def arrivals() -> Iterator[Arrival]:
        return synthetic(kind, options.requests, options.rate, random.Random(options.seed))

    name = f"{options.requests:,} made-up requests ({kind}), {options.rate:g} a second, seed {options.seed}."
    return _Load(name, options.requests, arrivals)


def _fleet(options: SimulateOptions, load: _Load) -> Fleet:
    return Fleet(
        slots=1,
        servers=options.servers,
        prefill_rate=options.prefill_rate or load.prefill_rate or ASSUMED_PREFILL_RATE,
        decode_rate=options.decode_rate or load.decode_rate or ASSUMED_DECODE_RATE,
        queue_limit=options.queue_limit,
        queue_timeout_s=options.queue_timeout_s,
        side_slots=options.side_slots,
        kv_bytes=options.kv_bytes,
        fork=options.fork,
        root_threshold_s=options.root_threshold_s,
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, on a terminal only."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda _: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        yield lambda done: progress.update(task, completed=done)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as failure:
        raise UsageError(f"--plot: cannot write {path}: {failure.strerror or failure}") from None
