"""The prompt ratios as a drawing: a dot for each run, by scenario, like the field report's."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from prefixproxy.bench.measure import Arm, Measured, Report, Spread, Target
from prefixproxy.bench.prompts import Scenario

WIDTH, ROW, LEFT, RIGHT, TOP = 760, 40, 210, 30, 84
LEAST_MOST = 1.25
"""The axis ends here, or further right where a ratio does."""
_COLOURS = ("#0b6e99", "#b35900")
"""By server; of a single one, by arm."""
MOST_FINE = 2.0
"""Up to here there is a line for every quarter, beyond for every half."""


def as_svg(report: Report) -> str:
    """Circles are through the proxy, squares straight; filled the median, hollow the ends of its spread."""
    scenarios = [scenario for scenario in Scenario if any(scenario in m.runs for t in report.targets for m in t.arms)]
    ratios = [s.most for t in report.targets for m in t.arms for sc in scenarios if (s := t.ratio(m, sc)) is not None]
    most = max([LEAST_MOST, *ratios])
    height = TOP + ROW * len(scenarios) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="16" y="22" font-size="14">Prompt time over the unique-prefix control (left is better)</text>',
        *_legend(report),
        *_axis(most, height),
    ]
    for number, scenario in enumerate(scenarios):
        y = TOP + ROW * number + ROW / 2
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(scenario.value)}</text>')
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        arms = [(i, target, measured) for i, target in enumerate(report.targets) for measured in target.arms]
        for place, (i, target, measured) in enumerate(arms):
            shift = (place - (len(arms) - 1) / 2) * ROW / (len(arms) + 1.5)
            parts += _dots(target, measured, scenario, y + shift, most, _colour(report, i, measured))
    return "\n".join([*parts, "</svg>", ""])


def _colour(report: Report, server: int, measured: Measured) -> str:
    number = server if len(report.targets) > 1 else int(measured.arm is Arm.STRAIGHT)
    return _COLOURS[number % len(_COLOURS)]


def _x(ratio: float, most: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * ratio / most


def _dots(target: Target, measured: Measured, scenario: Scenario, y: float, most: float, colour: str) -> Iterator[str]:
    spread: Spread | None = target.ratio(measured, scenario)
    if spread is None:
        return
    ends = f'x1="{_x(spread.least, most):.1f}" x2="{_x(spread.most, most):.1f}"'
    yield f'<line {ends} y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" stroke-width="2" opacity="0.5"/>'
    for value in dict.fromkeys((spread.least, spread.most)):
        if value != spread.middle:
            yield _mark(measured.arm, _x(value, most), y, f'fill="#fff" stroke="{colour}"')
    yield _mark(measured.arm, _x(spread.middle, most), y, f'fill="{colour}" stroke="{colour}"')


def _mark(arm: Arm, x: float, y: float, style: str) -> str:
    if arm is Arm.PROXY:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {style}/>'
    return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" {style}/>'


def _legend(report: Report) -> Iterator[str]:
    x = 16.0
    for number, target in enumerate(report.targets):
        for measured in target.arms:
            colour = _colour(report, number, measured)
            yield _mark(measured.arm, x + 5, 44, f'fill="{colour}" stroke="{colour}"')
            words = ("through the proxy" if measured.arm is Arm.PROXY else "straight") + f", {target.name}"
            yield f'<text x="{x + 16}" y="48">{escape(words)}</text>'
            x += 40 + 6.4 * len(words)


def _axis(most: float, height: int) -> Iterator[str]:
    ratio = 0.0
    while ratio <= most + 1e-9:
        x = _x(ratio, most)
        stroke = "#999" if ratio == 1.0 else "#ddd"
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 36}" stroke="{stroke}"/>'
        yield f'<text x="{x:.1f}" y="{height - 18}" text-anchor="middle">{ratio:g}×</text>'
        ratio += 0.25 if most <= MOST_FINE else 0.5
