"""What `bench` found, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from prefixproxy.bench.measure import Arm, Measured, Report, Run, Spread, Target, doubts
from prefixproxy.bench.prompts import Scenario
from prefixproxy.facts.report import facts_json

_ARM = {Arm.STRAIGHT: "straight", Arm.PROXY: "proxy"}
NOTES = (
    "Medians over the runs; in brackets the least and the most. Wall: all requests of the scenario. Evaluated, prompt:",
    "tokens of all requests, and time for one, as the server counts them, warm-ups included. Ratio: prompt time over",
    "that of the unique prefixes, straight. Found: requests that had 90 % of the root in their slot. TTFT and wall are",
    "what the client saw.",
)


def tables(report: Report) -> list[Table]:
    """One for each server, and one that puts two beside each other."""
    found = [_table(target) for target in report.targets]
    return [*found, _beside(report)] if len(report.targets) > 1 else found


def _table(target: Target) -> Table:
    table = Table(title=target.name, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 0))
    table.add_column("scenario", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in ("wall s", "TTFT s", "prompt ms", "ratio", "reused", "found", "evaluated"):
        table.add_column(name, justify="right", no_wrap=True)
    for scenario in Scenario:
        for number, measured in enumerate(target.arms):
            if scenario in measured.runs:
                table.add_row("" if number else scenario.value, _ARM[measured.arm], *_cells(target, measured, scenario))
    return table


def _cells(target: Target, measured: Measured, scenario: Scenario) -> tuple[str, ...]:
    return (
        _spread(measured.wall_s(scenario), "{:.2f}"),
        _middle(measured.ttft_s(scenario), "{:.2f}"),
        _middle(measured.prompt_ms(scenario), "{:,.0f}"),
        _spread(target.ratio(measured, scenario), "{:.2f}"),
        _percent(measured.cached_share(scenario)),
        _percent(measured.found_share(scenario)),
        _middle(measured.evaluated(scenario), "{:,.0f}"),
    )


def _beside(report: Report) -> Table:
    """Ratios alone: absolute times of two servers say little about either."""
    table = Table(title="side by side: ratio, root found", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 0))
    table.add_column("scenario", no_wrap=True)
    columns = [(target, measured) for target in report.targets for measured in target.arms]
    for target, measured in columns:
        table.add_column(f"{target.name}\n{_ARM[measured.arm]}", justify="right", overflow="fold")
    for scenario in Scenario:
        cells = [
            f"{_middle(target.ratio(measured, scenario), '{:.2f}')}, {_percent(measured.found_share(scenario))}"
            for target, measured in columns
        ]
        table.add_row(scenario.value, *cells)
    return table


def _spread(spread: Spread | None, spelled: str) -> str:
    if spread is None:
        return "-"
    middle, least, most = (spelled.format(value) for value in (spread.middle, spread.least, spread.most))
    return middle if least == most else f"{middle} ({least}-{most})"


def _middle(spread: Spread | None, spelled: str) -> str:
    return "-" if spread is None else spelled.format(spread.middle)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def as_json(report: Report) -> dict[str, Any]:
    """Everything, each run too; seconds, milliseconds, tokens, and null for what nobody told."""
    return {
        "ok": not report.failure,
        "failure": report.failure or None,
        "lanes": report.sizes.lanes,
        "root_tokens": report.sizes.root,
        "repeat": report.repeat,
        "doubts": doubts(report),
        "targets": [
            {
                "name": target.name,
                "facts": facts_json(target.facts),
                "arms": [_arm_json(target, measured) for measured in target.arms],
            }
            for target in report.targets
        ],
    }


def _arm_json(target: Target, measured: Measured) -> dict[str, Any]:
    return {
        "arm": measured.arm.value,
        "root_tokens": measured.root_tokens,
        "scenarios": [
            {
                "name": scenario.value,
                **{name: _spread_json(figure(scenario)) for name, figure in _figures(target, measured).items()},
                "cached_share": measured.cached_share(scenario),
                "found_share": measured.found_share(scenario),
                "runs": [_run_json(run) for run in runs],
            }
            for scenario, runs in measured.runs.items()
        ],
    }


def _figures(target: Target, measured: Measured) -> dict[str, Callable[[Scenario], Spread | None]]:
    return {
        "wall_s": measured.wall_s,
        "ttft_s": measured.ttft_s,
        "prompt_ms": measured.prompt_ms,
        "ratio": lambda scenario: target.ratio(measured, scenario),
        "token_ratio": lambda scenario: target.token_ratio(measured, scenario),
        "evaluated_tokens": measured.evaluated,
    }


def _spread_json(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {"median": spread.middle, "min": spread.least, "max": spread.most}


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "wall_s": run.wall_s,
        "spent": None if run.spent is None else asdict(run.spent),
        "requests": [
            {
                "wall_s": one.wall_s,
                "ttft_s": one.ttft_s,
                "prompt_tokens": one.usage.prompt_tokens,
                "cache_n": one.usage.cached_tokens,
                "prompt_n": one.usage.evaluated_tokens,
                "prompt_ms": one.usage.prompt_ms,
            }
            for one in run.requests
        ],
    }
