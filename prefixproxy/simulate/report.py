"""What a simulation found, as a table, as JSON and as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from math import ceil, log10
from typing import Any

from prefixproxy import __version__
from prefixproxy.facts.report import UNKNOWN, aligned
from prefixproxy.simulate.play import Outcome

_HEAD = ("slots", "policy", "answered", "rejected", "wait p50", "p99", "TTFT p50", "p99", "evaluated", "least", "ratio")
_WIDTHS = (7, 6, 9, 8, 9, 9, 9, 9, 12, 12, 7)
_NOTES = (
    "Seconds from the arrival of each request that was answered. Evaluated: prompt tokens, warm-ups included; least:",
    "each distinct prefix of these prompts once, less the answers; ratio: the one over the other.",
)
WIDTH, HEIGHT, MARGIN = 640, 360, 56
_COLOURS = {"cost": "#0b6e99", "fifo": "#b35900"}


@dataclass(frozen=True, slots=True)
class Report:
    """`load`: what was replayed, in words. `notes`: what the reader should know of it. `model` and `tokens`: of what
    was recorded, and who counted there."""

    load: str
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()
    model: str = UNKNOWN
    tokens: str = UNKNOWN


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of all reach; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def report_lines(report: Report) -> list[str]:
    """The report as text, one row for each fleet and policy."""
    fleet = report.outcomes[0].fleet
    lines = [
        *aligned(_facts(report)),
        "",
        report.load,
        f"{_servers(fleet.servers)} with a prefill of {fleet.prefill_rate:,.0f} tokens/s, "
        f"answers at {fleet.decode_rate:,.0f} tokens/s in each slot.",
        *report.notes,
        "",
        _row(_HEAD),
    ]
    for outcome in report.outcomes:
        found = _figures(outcome)
        lines.append(
            _row(
                (
                    str(outcome.fleet.slots),
                    outcome.fleet.policy,
                    f"{found['answered']:,}",
                    f"{sum(outcome.rejected.values()):,}",
                    *(_seconds(found[name]) for name in ("wait_p50_s", "wait_p99_s", "ttft_p50_s", "ttft_p99_s")),
                    f"{outcome.evaluated:,}",
                    f"{outcome.least:,}",
                    f"{outcome.ratio:.3f}",
                )
            )
        )
    return [*lines, "", *_NOTES]


def as_json(report: Report) -> dict[str, Any]:
    """The same as one JSON object; seconds, tokens, null for what nobody was there to show."""
    return {
        "facts": dict(_facts(report)),
        "load": report.load,
        "notes": list(report.notes),
        "outcomes": [{**asdict(outcome.fleet), **_figures(outcome)} for outcome in report.outcomes],
    }


def _facts(report: Report) -> list[tuple[str, str]]:
    """What every report begins with, as far as it applies to a server that is not there."""
    fleet = report.outcomes[0].fleet
    slots = ", ".join(str(n) for n in dict.fromkeys(outcome.fleet.slots for outcome in report.outcomes))
    return [
        ("server", "none: the scheduler on a virtual clock"),
        ("build", f"prefixproxy {__version__}"),
        ("model", report.model),
        ("slots", f"{slots} (simulated)"),
        ("n_ctx_slot", "not simulated: every prompt fits"),
        ("KV cache", f"types not simulated; {fleet.kv_bytes:,} bytes for each token"),
        ("flash attention", "not simulated"),
        ("flags", "snapshots" if fleet.fork else "no snapshots"),
        ("tokens", report.tokens),
    ]


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "answered": len(outcome.waits),
        "rejected": {str(reason): n for reason, n in outcome.rejected.items()},
        "wait_p50_s": quantile(outcome.waits, 0.5),
        "wait_p99_s": quantile(outcome.waits, 0.99),
        "ttft_p50_s": quantile(outcome.ttfts, 0.5),
        "ttft_p99_s": quantile(outcome.ttfts, 0.99),
        "evaluated_tokens": outcome.evaluated,
        "least_tokens": outcome.least,
        "ratio": round(outcome.ratio, 4),
        "span_s": outcome.span_s,
    }


def _servers(n: int) -> str:
    return "One server" if n == 1 else f"{n:,} servers, slots for each,"


def _row(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def as_svg(report: Report) -> str:
    """Time to first token over slots, p50 dashed and p99 solid, both axes logarithmic."""
    slots = sorted({outcome.fleet.slots for outcome in report.outcomes})
    shown = [o for o in report.outcomes if len(o.ttfts)]
    times = [max(1e-3, quantile(o.ttfts, share) or 0.0) for o in shown for share in (0.5, 0.99)] or [1.0]
    low, high = 10.0 ** int(log10(min(times)) - 1), 10.0 ** ceil(log10(max(times)) + 1e-9)
    axis = _Axes(slots, low, high)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{MARGIN}" y="20" font-size="14">Time to first token: {escape(report.load)}</text>',
        *axis.lines(),
    ]
    for number, policy in enumerate(dict.fromkeys(o.fleet.policy for o in shown)):
        mine = sorted((o for o in shown if o.fleet.policy == policy), key=lambda o: o.fleet.slots)
        for share, dash in ((0.5, ' stroke-dasharray="4 4"'), (0.99, "")):
            points = [axis.at(o.fleet.slots, quantile(o.ttfts, share) or 0.0) for o in mine]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            style = f'fill="none" stroke="{_COLOURS[policy]}" stroke-width="2"{dash}'
            parts.append(f'<polyline points="{line}" {style}/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[policy]}"/>' for x, y in points]
        x, y = WIDTH - MARGIN - 130, MARGIN + 16 * number
        parts.append(f'<text x="{x}" y="{y}" fill="{_COLOURS[policy]}">{policy}: p99 solid, p50 dashed</text>')
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Axes:
    slots: Sequence[int]
    low: float
    high: float

    def at(self, slots: int, seconds: float) -> tuple[float, float]:
        """Where a point lies."""
        last = len(self.slots) - 1
        x = MARGIN + (WIDTH - 2 * MARGIN) * (self.slots.index(slots) / last if last else 0.5)
        share = log10(max(seconds, self.low) / self.low) / log10(self.high / self.low)
        return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share

    def lines(self) -> list[str]:
        out, seconds = [], self.low
        while seconds <= self.high * 1.001:
            _, y = self.at(self.slots[0], seconds)
            out.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{seconds:g} s</text>')
            seconds *= 10
        for slots in self.slots:
            x, _ = self.at(slots, self.low)
            out.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 20}" text-anchor="middle">{slots}</text>')
        out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">slots</text>')
        return out
