"""What was measured, and what it comes to: medians and spreads over the runs, ratios to the unique-prefix control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from prefixproxy.bench.prompts import ROOTED, Scenario, Sizes
from prefixproxy.facts.report import RunFacts, comparable
from prefixproxy.types import Usage

FOUND_SHARE = 0.9
"""Of the root's tokens: a prompt that found this many of them found the root."""
ASSUMED_ROOT_SHARE = 0.8
"""Of the shortest prompt, where the server cannot be asked for its tokens."""
FEW_RUNS = 3
SHORT_MS = 100.0
"""A control that took less is mostly what any request costs."""
RESTLESS = 1.5
"""The longest control over the shortest: above this the machine was busy with something else."""


class Arm(StrEnum):
    STRAIGHT = "straight"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Request:
    """One answer as its client saw it, with what the server said it cost."""

    wall_s: float
    ttft_s: float | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Spent:
    """Prompt tokens evaluated, and the milliseconds that took."""

    evaluated: int
    prompt_ms: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one scenario: its counted requests, and how long they took together. `spent`: what the server's own
    counters say it cost, warm-ups included, which are in no request."""

    wall_s: float
    requests: tuple[Request, ...]
    spent: Spent | None = None

    @property
    def prompt_ms(self) -> float | None:
        """For one request: its share of what was spent, else what the one in the middle says."""
        if self.spent is not None:
            return self.spent.prompt_ms / max(1, len(self.requests))
        return _median([one.usage.prompt_ms for one in self.requests])

    @property
    def evaluated(self) -> int | None:
        """Prompt tokens that were evaluated for all of them."""
        if self.spent is not None:
            return self.spent.evaluated
        told = [one.usage.evaluated_tokens for one in self.requests]
        return None if None in told else sum(tokens or 0 for tokens in told)

    @property
    def prompt_tokens(self) -> int | None:
        told = [one.usage.prompt_tokens for one in self.requests]
        return None if None in told else sum(tokens or 0 for tokens in told)


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of some runs."""

    middle: float
    least: float
    most: float


@dataclass(slots=True, eq=False)
class Measured:
    """One arm on one server: runs by scenario, in the order of the repeats. `root_tokens`: what the lanes share by the
    server's own count, None where it cannot be asked."""

    arm: Arm
    root_tokens: int | None = None
    runs: dict[Scenario, list[Run]] = field(default_factory=dict)

    def add(self, scenario: Scenario, run: Run) -> None:
        self.runs.setdefault(scenario, []).append(run)

    def wall_s(self, scenario: Scenario) -> Spread | None:
        return _spread([run.wall_s for run in self.runs.get(scenario, ())])

    def ttft_s(self, scenario: Scenario) -> Spread | None:
        runs = self.runs.get(scenario, ())
        return _spread([_median([one.ttft_s for one in run.requests]) for run in runs])

    def prompt_ms(self, scenario: Scenario) -> Spread | None:
        """Of one request."""
        return _spread([run.prompt_ms for run in self.runs.get(scenario, ())])

    def evaluated(self, scenario: Scenario) -> Spread | None:
        """Prompt tokens evaluated for all of it."""
        return _spread([run.evaluated for run in self.runs.get(scenario, ())])

    def cached_share(self, scenario: Scenario) -> float | None:
        """Share of all prompt tokens that were reused."""
        runs = self.runs.get(scenario, ())
        evaluated, prompt = [run.evaluated for run in runs], [run.prompt_tokens for run in runs]
        if not runs or None in evaluated or None in prompt:
            return None
        return 1 - sum(tokens or 0 for tokens in evaluated) / max(1, sum(tokens or 0 for tokens in prompt))

    def found_share(self, scenario: Scenario) -> float | None:
        """Share of the requests that found their root; None where there is none to find, or nobody tells."""
        requests = [one for run in self.runs.get(scenario, ()) for one in run.requests]
        cached = [one.usage.cached_tokens for one in requests]
        if scenario not in ROOTED or not requests or None in cached:
            return None
        prompts = [one.usage.prompt_tokens or 0 for one in requests]
        root = self.root_tokens or ASSUMED_ROOT_SHARE * min(prompts)
        return sum((tokens or 0) >= FOUND_SHARE * root for tokens in cached) / len(requests)


@dataclass(slots=True, eq=False)
class Target:
    """One server, straight and through a proxy, or one of them."""

    name: str
    facts: RunFacts
    arms: list[Measured] = field(default_factory=list)

    @property
    def control(self) -> Measured:
        """The arm whose unique prefixes all ratios are to: straight, where there is that."""
        return min(self.arms, key=lambda measured: measured.arm is not Arm.STRAIGHT)

    def ratio(self, measured: Measured, scenario: Scenario) -> Spread | None:
        """Prompt milliseconds of a request over those of the control of the same repeat; of the tokens evaluated where
        the server tells no times."""
        controls = self.control.runs.get(Scenario.UNIQUE, ())
        pairs = list(zip(measured.runs.get(scenario, ()), controls, strict=False))
        in_time = [_over(run.prompt_ms, control.prompt_ms) for run, control in pairs]
        return _spread(in_time if None not in in_time else [_token_ratio(*pair) for pair in pairs])

    def token_ratio(self, measured: Measured, scenario: Scenario) -> Spread | None:
        """Prompt tokens that a request had evaluated over those of the control; nothing of it is a matter of time."""
        controls = self.control.runs.get(Scenario.UNIQUE, ())
        return _spread([_token_ratio(*pair) for pair in zip(measured.runs.get(scenario, ()), controls, strict=False)])


@dataclass(frozen=True, slots=True)
class Report:
    sizes: Sizes
    repeat: int
    targets: tuple[Target, ...]
    failure: str = ""


def doubts(report: Report) -> list[str]:
    """What these numbers cannot say."""
    out = []
    if report.repeat < FEW_RUNS:
        runs = "one run" if report.repeat == 1 else f"{report.repeat} runs"
        out.append(f"{runs} of each scenario: a spread needs {FEW_RUNS} (--repeat), two medians may differ by chance")
    for target in report.targets:
        out += [f"{target.name}: {doubt}" for doubt in _target_doubts(target, report.sizes)]
    if len(report.targets) > 1:
        may = comparable(report.targets[0].facts, report.targets[1].facts)
        if not may.ok:
            out.append(f"the servers are not compared with each other, only each with its own control: {may.reason}")
    return out


def _target_doubts(target: Target, sizes: Sizes) -> list[str]:
    out = []
    control = target.control.runs.get(Scenario.UNIQUE, [])
    times = [one.usage.prompt_ms for run in control for one in run.requests]
    known = [ms for ms in times if ms is not None]
    if len(known) < len(times):
        out.append("it reports no prompt times; ratios are of evaluated tokens")
    elif known and max(known) > RESTLESS * min(known):
        out.append(
            f"the controls took {min(known):,.0f} to {max(known):,.0f} ms: the machine was not at rest, and times say "
            "little; tokens do"
        )
    if known and median(known) < SHORT_MS:
        out.append(
            f"a control took {median(known):,.0f} ms: much of that is the cost of any request, and ratios say little; "
            "tokens do (--root makes prompts longer)"
        )
    if any(run.evaluated is None for run in control):
        out.append("it reports no cached tokens: whether the root was found shows in the prompt ratio only")
    if any(one.usage.cached_tokens for run in control for one in run.requests if _mostly_cached(one)):
        out.append("unique prompts were reused: this is no control")
    if target.facts.n_slots and sizes.lanes > target.facts.n_slots:
        slots = "one slot" if target.facts.n_slots == 1 else f"{target.facts.n_slots} slots"
        out.append(f"{sizes.lanes} lanes on {slots}: some of those sent at once wait for a slot")
    if len(target.arms) == 1:
        out.append(f"only {target.arms[0].arm} was measured")
    return out


def _mostly_cached(one: Request) -> bool:
    return 2 * (one.usage.cached_tokens or 0) > (one.usage.prompt_tokens or 0)


def _token_ratio(run: Run, control: Run) -> float | None:
    return _over(_each(run.evaluated, run), _each(control.evaluated, control))


def _each(tokens: int | None, run: Run) -> float | None:
    return None if tokens is None else tokens / max(1, len(run.requests))


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(median(known), min(known), max(known)) if known and len(known) == len(values) else None
