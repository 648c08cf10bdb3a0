"""The last hour in numbers: what was reused and evaluated, in steps of some seconds, and which roots were warmed
and copied.

Counted as the metrics count: only what the server reported, warm-ups included. Bounded, and gone with the process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from prefixproxy.types import CacheSource, MissReason, RequestRecord, Usage

STEP_S = 10
STEPS = 360
MAX_WARMUPS = 64
MAX_COPIES = 512


@dataclass(slots=True)
class Step:
    """What ended between `time` (Unix seconds, a multiple of STEP_S) and the next step. `saved_s`: seconds of prefill
    that the reused tokens would have taken at the measured rate."""

    time: int
    requests: int = 0
    cached: int = 0
    evaluated: int = 0
    saved_s: float = 0.0
    misses: int = 0


@dataclass(frozen=True, slots=True)
class Warmup:
    """One root evaluated ahead of its lanes; `end` in Unix seconds."""

    upstream: str
    slot: int | None
    outcome: str
    end: float
    seconds: float | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Copy:
    """One root read from its file into `slot`; `source`: the slot it was saved from, if that still held it. `end` in
    Unix seconds."""

    upstream: str
    slot: int
    source: int | None
    outcome: str
    end: float
    seconds: float


class Trend:
    """Counts since `since`, the start of the process in Unix seconds."""

    def __init__(self, since: float) -> None:
        self.since = since
        self._steps: deque[Step] = deque(maxlen=STEPS)
        self._total = Step(int(since))
        self._warmups: deque[Warmup] = deque(maxlen=MAX_WARMUPS)
        self._copies: deque[Copy] = deque(maxlen=MAX_COPIES)

    def request(self, record: RequestRecord, seconds_per_token: float | None, now: float) -> None:
        """A request ended. `now` in Unix seconds."""
        reported = record.cache_source is CacheSource.REPORTED
        cached = (record.cache_n or 0) if reported else 0
        evaluated = (record.prompt_n or 0) if reported else 0
        missed = record.miss_reason not in (MissReason.NONE, MissReason.UNKNOWN)
        for step in (self._step(now), self._total):
            step.requests += 1
            step.cached += cached
            step.evaluated += evaluated
            step.misses += missed
            step.saved_s += cached * (seconds_per_token or 0.0)

    def warmup(self, upstream: str, slot: int | None, outcome: str, usage: Usage | None, now: float) -> None:
        """A root was evaluated, or could not be."""
        evaluated, ms = (usage.evaluated_tokens, usage.prompt_ms) if usage else (None, None)
        seconds = None if ms is None else ms / 1e3
        self._warmups.append(Warmup(upstream, slot, outcome, now, seconds, evaluated))
        if usage is not None and usage.source is CacheSource.REPORTED:
            self.tokens(usage.cached_tokens or 0, evaluated or 0, now)

    def copy(self, copy: Copy) -> None:
        """A root was copied, or could not be."""
        self._copies.append(copy)

    def tokens(self, cached: int, evaluated: int, now: float) -> None:
        """Prompt tokens that no finished request stands for."""
        for step in (self._step(now), self._total):
            step.cached += cached
            step.evaluated += evaluated

    def shown(self, since: float, now: float) -> dict[str, Any]:
        """As JSON values: the steps that begin at `since` or later, oldest first; a step in which nothing ended is
        left out, and so are copies that ended before `since`. `start` tells one process from the next."""
        return {
            "start": self.since,
            "now": now,
            "step_s": STEP_S,
            "steps": [asdict(step) for step in self._steps if step.time >= since and step.time > now - STEP_S * STEPS],
            "total": asdict(self._total),
            "warmups": [asdict(warmup) for warmup in self._warmups],
            "copies": [asdict(copy) for copy in self._copies if copy.end >= since],
        }

    def _step(self, now: float) -> Step:
        """The step of this moment; a clock that was set back counts into the newest one."""
        time = int(now) // STEP_S * STEP_S
        if not self._steps or self._steps[-1].time < time:
            self._steps.append(Step(time))
        return self._steps[-1]
