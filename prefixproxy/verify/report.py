"""What `verify` found, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prefixproxy.facts.report import fact_lines, facts_json
from prefixproxy.verify.compare import Difference
from prefixproxy.verify.judge import Exchange, Found, Judged, Outcome, as_row

_HEAD = ("scenario", "requests", "reused", "largest difference", "verdict")
_SHOWN = 3
"""Differences told in full; more of them say the same."""


def report_lines(result: Judged) -> list[str]:
    """The report as text; the differences in full come last, before the verdict."""
    lines = [*fact_lines(result.told), "", _row(_HEAD), *(_row(_cells(one)) for one in result.found), ""]
    lines.append(
        f"Noise: two runs of one prompt without reuse differ by up to {result.noise:.4f} in a log-probability; "
        f"more than {result.limit:.4f} counts."
    )
    broken = [pair for one in result.found for pair in one.different]
    for exchange, apart in broken[:_SHOWN]:
        lines += ["", *_difference_lines(exchange, apart)]
    if len(broken) > _SHOWN:
        lines += ["", f"... and {len(broken) - _SHOWN} more."]
    if result.doubts:
        lines += ["", "What this run cannot say:", *(f"  {doubt}" for doubt in result.doubts)]
    return [*lines, "", f"{_VERDICT[result.outcome]}: {result.because}."]


_VERDICT = {Outcome.PASSED: "PASSED", Outcome.FAILED: "FAILED", Outcome.INCONCLUSIVE: "NOT CONCLUSIVE"}


def as_json(result: Judged, unix_time: float) -> dict[str, Any]:
    """The same as one JSON object, with both texts of every difference."""
    row = as_row(result, unix_time)
    row["facts"] = facts_json(result.told)
    row["ok"] = result.outcome is Outcome.PASSED
    row["doubts"] = list(result.doubts)
    row["scenarios"] = [_scenario_json(one) for one in result.found]
    return row


def _scenario_json(found: Found) -> dict[str, Any]:
    return {
        "name": found.name,
        "verdict": found.verdict,
        "requests": found.requests,
        "cached_tokens": found.cached,
        "prompt_tokens": found.prompt,
        "worst": found.worst,
        "skipped": found.skipped or None,
        "different": [
            {
                "talk": exchange.talk,
                "turn": exchange.turn,
                "nats": apart.nats,
                "at_token": apart.at,
                "cache_n": exchange.reuse.cached,
                "with_reuse": exchange.reuse.text,
                "without_reuse": exchange.control.text,
                "without_reuse_again": exchange.again.text,
            }
            for exchange, apart in found.different
        ],
    }


def _cells(found: Found) -> tuple[str, ...]:
    if found.skipped:
        return found.name, "-", "-", "-", found.verdict
    share = f"{100 * found.cached / max(1, found.prompt):.0f} %"
    return found.name, str(found.requests), share, f"{found.worst:.4f}", found.verdict


def _row(cells: tuple[str, ...]) -> str:
    name, *numbers, verdict = cells
    widths = (8, 6, 18)
    middle = "  ".join(f"{cell:>{width}}" for cell, width in zip(numbers, widths, strict=True))
    return f"  {name:<11}  {middle}  {verdict}"


def _difference_lines(exchange: Exchange, apart: Difference) -> Iterator[str]:
    yield (
        f"{exchange.scenario}, {exchange.name}: log-probabilities differ by {apart.nats:.3f} at token {apart.at + 1} "
        f"(cache_n {exchange.reuse.cached}, prompt_n {exchange.reuse.evaluated})"
    )
    yield f"  asked                {str(exchange.messages[-1]['content'])!r}"
    yield f"  with reuse           {exchange.reuse.text!r}"
    yield f"  without reuse        {exchange.control.text!r}"
    yield f"  without reuse, again {exchange.again.text!r}"
