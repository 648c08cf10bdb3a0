"""The words in which scripts/dashboard_panels.py describes panels: charts, units, and PromQL over our metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TOKENS, TOKEN_RATE, SECONDS_RATE = "suffix: tok", "suffix: tok/s", "suffix: s/s"
SECONDS, SHARE, REQUESTS, COUNT, SWITCH, BYTES_RATE = "s", "percentunit", "reqps", "none", "bool_on_off", "Bps"
PER_SECOND = "cps"

Shape = Literal["lines", "stack", "number", "bars", "table", "heatmap"]


@dataclass(frozen=True)
class Chart:
    """One panel. `queries`: expression and legend. `width` is in Grafana's 24 columns."""

    title: str
    unit: str
    description: str
    queries: Sequence[tuple[str, str]]
    shape: Shape = "lines"
    width: int = 12


M, U = 'model=~"$model"', 'upstream=~"$upstream"'


def rate(metric: str, labels: str = "", by: str = "") -> str:
    """`metric` per second, summed `by` labels."""
    return f"{_sum(by)}(rate(prefixproxy_{metric}{{{labels}}}[$__rate_interval]))"


def over_range(metric: str, labels: str = "", by: str = "") -> str:
    """How much `metric` grew over the time range shown."""
    return f"{_sum(by)}(increase(prefixproxy_{metric}{{{labels}}}[$__range]))"


def quantile(q: float, metric: str, labels: str = "", by: str = "") -> str:
    buckets = rate(f"{metric}_bucket", labels, f"{by}, le" if by else "le")
    return f"histogram_quantile({q}, {buckets})"


def share(metric: str, part: str, labels: str = "", by: str = "") -> str:
    """Of `metric`, the share whose labels are `part`."""
    return f"{rate(metric, both(labels, part), by)} / {rate(metric, labels, by)}"


def quantiles(metric: str, labels: str) -> list[tuple[str, str]]:
    return [(quantile(q, metric, labels), f"p{round(q * 100)}") for q in (0.5, 0.95, 0.99)]


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"


def both(*labels: str) -> str:
    """Label matchers joined."""
    return ", ".join(label for label in labels if label)
