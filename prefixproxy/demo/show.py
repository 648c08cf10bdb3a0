"""What the demo shows: a live table on a terminal, plain lines elsewhere, and the report at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from prefixproxy.demo.wave import LaneRun, Wave
from prefixproxy.facts.flags import shown_flags
from prefixproxy.facts.report import UNKNOWN, RunFacts, aligned, comparable, fact_lines, facts_json

REFRESHES_PER_S = 4
_HEAD = f"  {'lane':>4}  {'slot':>4}  {'cache_n':>7}  {'prompt_n':>8}  {'TTFT':>8}  {'wall':>8}"
_NOTES = (
    "Slot, cache_n, prompt_n and tokens evaluated are what the server reported;",
    "TTFT and wall are what the client saw.",
)


@dataclass(slots=True, eq=False)
class Report:
    """The whole demo. `root_tokens` is what the lanes' prompts share as the proxy sends them, in the server's own
    tokens; `total_s` spans everything, engines starting included."""

    model: str
    n_slots: int
    n_ctx_slot: int
    waves: list[Wave] = field(default_factory=list)
    root_tokens: int | None = None
    total_s: float | None = None
    failure: str = ""
    straight: RunFacts | None = None
    proxied: RunFacts | None = None
    """The servers that were asked, straight and behind the proxy."""

    @property
    def failed(self) -> bool:
        return bool(self.failure) or any(wave.failed for wave in self.waves)

    def speedup(self, wave: Wave) -> float | None:
        """Wall time of the first wave, which went straight to the server, over this one's."""
        first = self.waves[0]
        if wave is first or wave.failed or first.failed or not wave.wall_s or not first.wall_s:
            return None
        return first.wall_s / wave.wall_s


def report_lines(report: Report) -> list[str]:
    """The report as text."""
    n_lanes = len(report.waves[0].lanes) if report.waves else 0
    lanes = "1 lane" if n_lanes == 1 else f"{n_lanes} lanes at once"
    lines = [*_head(report), f"{report.model}, {report.n_slots} slots of {report.n_ctx_slot} tokens, {lanes}."]
    if report.root_tokens is not None:
        lines.append(
            f"The lanes share a root of {report.root_tokens} tokens, behind a first line with a clock and a lane id."
        )
    for wave in report.waves:
        lines += ["", wave.title, *table_lines(wave, time.monotonic()), *_total_lines(report, wave)]
    if report.failure:
        lines += ["", f"The demo stopped: {report.failure}"]
    if report.total_s is not None:
        lines += ["", _NOTES[0], f"{_NOTES[1]} All of it took {report.total_s:.0f} s."]
    return lines


def _head(report: Report) -> list[str]:
    """The facts of the straight server, what is other about the one behind the proxy, and whether the two may be
    compared."""
    straight, proxied = report.straight, report.proxied
    if straight is None:
        return []
    lines = fact_lines(straight)
    if proxied is not None:
        lines += aligned([("behind proxy", shown_flags(proxied.flags or ()) or UNKNOWN)])
        if not (found := comparable(straight, proxied)).ok:
            lines.append(f"The two cannot be compared: {found.reason}.")
    return [*lines, ""]


def table_lines(wave: Wave, now: float) -> list[str]:
    """One line for each lane, as it stands at `now` (monotonic seconds)."""
    return [_HEAD, *(_lane_line(lane, wave, now) for lane in wave.lanes)]


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object: seconds, tokens, and null for what was not reported."""
    return {
        "ok": not report.failed,
        "failure": report.failure or None,
        "facts": {
            "straight": None if report.straight is None else facts_json(report.straight),
            "proxied": None if report.proxied is None else facts_json(report.proxied),
        },
        "model": report.model,
        "n_slots": report.n_slots,
        "n_ctx_slot": report.n_ctx_slot,
        "root_tokens": report.root_tokens,
        "total_s": report.total_s,
        "waves": [_wave_json(report, wave) for wave in report.waves],
    }


class Board:
    """Progress on stderr while the demo runs."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._waves: list[Wave] = []
        self._doing = ""
        self._live = self._console.is_terminal

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Around everything: the live table is gone when it ends, so that the report can take its place."""
        if not self._live:
            yield
            return
        with Live(
            get_renderable=self._render, console=self._console, refresh_per_second=REFRESHES_PER_S, transient=True
        ):
            yield

    def doing(self, what: str) -> None:
        """Name the step that starts now."""
        self._doing = what
        self._say(what)

    def wave(self, wave: Wave) -> None:
        """A wave starts."""
        self._waves.append(wave)
        self.doing(wave.title)

    def lane(self, wave: Wave, lane: LaneRun) -> None:
        """A lane has got its first token, or has ended."""
        if lane.failure:
            self._say(f"  lane {lane.number} failed: {lane.failure}")
        elif lane.wall_s is None:
            self._say(f"  lane {lane.number}: first token after {_seconds(lane.ttft_s).strip()}")
        else:
            cached, evaluated = _count(lane.usage.cached_tokens), _count(lane.usage.evaluated_tokens)
            cost = f"slot {_count(lane.slot)}, cache_n {cached}, prompt_n {evaluated}"
            self._say(f"  lane {lane.number}: done after {_seconds(lane.wall_s).strip()}, {cost}")

    def _say(self, line: str) -> None:
        if not self._live:
            print(line, file=self._console.file, flush=True)

    def _render(self) -> Text:
        now = time.monotonic()
        lines: list[str] = []
        for wave in self._waves:
            lines += [wave.title, *table_lines(wave, now), ""]
        return Text("\n".join([*lines, f"{self._doing} ..."]))


def _lane_line(lane: LaneRun, wave: Wave, now: float) -> str:
    cached, evaluated = _count(lane.usage.cached_tokens), _count(lane.usage.evaluated_tokens)
    running = lane.wall_s is None and wave.started is not None
    wall_s = now - (wave.started or now) if running else lane.wall_s
    line = f"  {lane.number:>4}  {_count(lane.slot):>4}  {cached:>7}  {evaluated:>8}"
    line += f"  {_seconds(lane.ttft_s)}  {_seconds(wall_s)}"
    if lane.failure:
        return f"{line}  failed: {lane.failure}"
    return f"{line}  {lane.state}" if running else line


def _total_lines(report: Report, wave: Wave) -> list[str]:
    if wave.wall_s is None:
        return []
    speedup = report.speedup(wave)
    lines = [f"  wall {wave.wall_s:.2f} s" + (f", {speedup:.1f} times shorter than straight" if speedup else "")]
    if wave.evaluated_tokens is not None:
        tokens = f"{wave.evaluated_tokens:,} tokens evaluated"
        if beside := wave.beside_lanes_tokens:
            tokens += f", {beside:,} of them to warm the root"
        lines.append(f"  {tokens}")
    if report.root_tokens is not None and (roots := wave.roots_evaluated(report.root_tokens)) is not None:
        found = f"{wave.lanes_that_reused(report.root_tokens)} of {len(wave.lanes)} lanes"
        lines.append(f"  root evaluated {_times(roots)}, found by {found}")
    return lines


def _wave_json(report: Report, wave: Wave) -> dict[str, Any]:
    root = report.root_tokens
    return {
        "name": wave.name,
        "ok": not wave.failed and wave.wall_s is not None,
        "wall_s": wave.wall_s,
        "speedup": report.speedup(wave),
        "evaluated_tokens": wave.evaluated_tokens,
        "evaluated_beside_lanes_tokens": wave.beside_lanes_tokens,
        "roots_evaluated": None if root is None else wave.roots_evaluated(root),
        "lanes_that_reused": None if root is None else wave.lanes_that_reused(root),
        "lanes": [
            {
                "lane": lane.number,
                "state": lane.state,
                "failure": lane.failure or None,
                "slot": lane.slot,
                "cache_n": lane.usage.cached_tokens,
                "prompt_n": lane.usage.evaluated_tokens,
                "ttft_s": lane.ttft_s,
                "wall_s": lane.wall_s,
            }
            for lane in wave.lanes
        ],
    }


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:6.2f} s"
