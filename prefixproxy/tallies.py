"""Counters and histograms as plain dictionaries, shown to a Prometheus registry only when it asks.

The client library's own take a lock and two look-ups for each count, which is safe in threads and was a third of what
observing a request cost. Here one event loop counts and shows; exposition stays the library's. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

INFINITY = float("inf")


class Tally:
    """A counter: one sum for each combination of label values."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str]) -> None:
        self._about = name, help_text
        self._labels = tuple(labels)
        self._sums: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *labels: str) -> None:
        """Count `amount`, which is never negative, for these label values."""
        self._sums[labels] = self._sums.get(labels, 0.0) + amount

    def family(self) -> Metric:
        out = CounterMetricFamily(*self._about, labels=self._labels)
        for labels, total in self._sums.items():
            out.add_metric(labels, total)
        return out


class Spread:
    """A histogram: how many values were at most each bound, and their sum."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._about = name, help_text
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._names = [*map(floatToGoString, self._bounds), "+Inf"]
        self._rows: dict[tuple[str, ...], list[float]] = {}
        """The counts of each bucket alone, then the sum of all values."""

    def add(self, value: float, *labels: str) -> None:
        """Count one value for these label values."""
        row = self._rows.get(labels)
        if row is None:
            row = self._rows[labels] = [0.0] * (len(self._bounds) + 2)
        row[bisect_left(self._bounds, value)] += 1.0
        row[-1] += value

    def family(self) -> Metric:
        out = HistogramMetricFamily(*self._about, labels=self._labels)
        for labels, row in self._rows.items():
            below, buckets = 0.0, list[tuple[str, float]]()
            for name, count in zip(self._names, row[:-1], strict=True):
                below += count
                buckets.append((name, below))
            out.add_metric(labels, buckets, row[-1])
        return out


class Tallies(Collector):
    """All of them, for a registry."""

    def __init__(self) -> None:
        self._all: list[Tally | Spread] = []

    def counter(self, name: str, help_text: str, labels: Sequence[str]) -> Tally:
        tally = Tally(name, help_text, labels)
        self._all.append(tally)
        return tally

    def histogram(self, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float]) -> Spread:
        spread = Spread(name, help_text, labels, bounds)
        self._all.append(spread)
        return spread

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        return [each.family() for each in self._all]
