"""What the answers of a whole suite mean together: the noise, each scenario's verdict, and the sentence at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prefixproxy.facts.report import RunFacts
from prefixproxy.types import UpstreamFacts
from prefixproxy.verify.compare import MOST_NOISE, Answer, Difference, difference, limit_of, noise_of

REUSED_SHARE = 0.5
"""A scenario has tested something if one of its prompts was reused by more than this."""


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One prompt and its three answers: with reuse, without, and without once more, cut elsewhere."""

    scenario: str
    talk: int
    turn: int
    messages: tuple[Mapping[str, str], ...]
    reuse: Answer
    control: Answer
    again: Answer

    @property
    def name(self) -> str:
        return f"conversation {self.talk + 1}, turn {self.turn + 1}"

    @property
    def share(self) -> float:
        """How much of the prompt was reused."""
        return self.reuse.cached / max(1, self.reuse.cached + self.reuse.evaluated)


@dataclass(frozen=True, slots=True)
class Found:
    """A scenario judged. `different`: the exchanges beyond noise; `worst` nats."""

    name: str
    requests: int = 0
    cached: int = 0
    prompt: int = 0
    worst: float = 0.0
    different: tuple[tuple[Exchange, Difference], ...] = ()
    exercised: bool = False
    skipped: str = ""

    @property
    def verdict(self) -> str:
        if self.skipped:
            return "not run"
        if self.different:
            return "DIFFERENT"
        return "same" if self.exercised else "nothing reused"


@dataclass(frozen=True, slots=True)
class Judged:
    """All of it. `facts` of the server that was asked, `told` of them in full; `noise` and `limit` in nats."""

    facts: UpstreamFacts
    told: RunFacts
    outcome: Outcome
    because: str
    noise: float
    limit: float
    found: tuple[Found, ...]
    doubts: tuple[str, ...] = field(default=())


def judged(facts: UpstreamFacts, told: RunFacts, exchanges: Sequence[Exchange], skipped: Mapping[str, str]) -> Judged:
    """`skipped`: scenarios that were not run, and why."""
    noise = noise_of([(one.control, one.again) for one in exchanges])
    limit = limit_of(noise)
    names = dict.fromkeys([*(one.scenario for one in exchanges), *skipped])
    found = tuple(
        Found(name, skipped=skipped[name])
        if name in skipped
        else _found(name, [one for one in exchanges if one.scenario == name], limit)
        for name in names
    )
    outcome, because = _outcome(exchanges, found, noise)
    return Judged(facts, told, outcome, because, noise, limit, found, tuple(_doubts(found)))


def _found(name: str, exchanges: Sequence[Exchange], limit: float) -> Found:
    apart = [(one, difference(one.reuse, one.control)) for one in exchanges]
    return Found(
        name,
        requests=len(exchanges),
        cached=sum(one.reuse.cached for one in exchanges),
        prompt=sum(one.reuse.cached + one.reuse.evaluated for one in exchanges),
        worst=max((found.nats for _, found in apart), default=0.0),
        different=tuple((one, found) for one, found in apart if found.nats > limit),
        exercised=any(one.share > REUSED_SHARE for one in exchanges),
    )


def _outcome(exchanges: Sequence[Exchange], found: Sequence[Found], noise: float) -> tuple[Outcome, str]:
    if any(one.control.cached or one.again.cached for one in exchanges):
        return (
            Outcome.INCONCLUSIVE,
            "the server reuses prefixes even when told not to: there is nothing to compare with",
        )
    if noise > MOST_NOISE:
        why = f"without reuse the server's own answers to one prompt differ by {noise:.2f}: too much to judge by"
        return Outcome.INCONCLUSIVE, why
    broken = [one for one in found if one.different]
    if broken:
        n = sum(len(one.different) for one in broken)
        where = ", ".join(one.name for one in broken)
        return Outcome.FAILED, f"{n} of {len(exchanges)} answers are others with reuse than without ({where})"
    if not any(one.exercised for one in found):
        return Outcome.INCONCLUSIVE, "nothing was reused, so nothing was tested"
    n_same = sum(one.requests for one in found if one.exercised)
    return Outcome.PASSED, f"{n_same} answers are the same with reuse as without"


def _doubts(found: Sequence[Found]) -> list[str]:
    """What this run cannot say."""
    doubts = [f"{one.name} was not run: {one.skipped}" for one in found if one.skipped]
    doubts += [
        f"{one.name}: no prompt was reused by more than half, so it tested nothing"
        for one in found
        if not one.skipped and not one.exercised
    ]
    return doubts


def as_row(result: Judged, unix_time: float) -> dict[str, Any]:
    """What the state file keeps of it; no text."""
    facts = result.facts
    return {
        "outcome": result.outcome.value,
        "because": result.because,
        "time": unix_time,
        "kind": facts.kind,
        "model": facts.model,
        "build": facts.build,
        "n_slots": facts.n_slots,
        "n_ctx_slot": facts.n_ctx_slot,
        "kv_types": None if facts.kv_types is None else list(facts.kv_types),
        "noise": result.noise,
        "limit": result.limit,
        "scenarios": {one.name: {"verdict": one.verdict, "worst": one.worst} for one in result.found},
    }
