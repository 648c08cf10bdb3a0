"""Counters and histograms are shown as the client library would show its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

from prefixproxy.tallies import Tallies

BOUNDS = (0.1, 1, 2.5, 256)
NUMBERS = st.one_of(st.sampled_from(BOUNDS), st.floats(0, 1000, allow_nan=False))
EVENTS = st.lists(st.tuples(st.sampled_from(["a", 'b"\n', ""]), st.sampled_from(["x", "y"]), NUMBERS), max_size=30)


@given(EVENTS)
def test_what_is_shown_is_what_the_library_shows(events: list[tuple[str, str, float]]) -> None:
    theirs, ours, tallies = CollectorRegistry(), CollectorRegistry(), Tallies()
    counter, tally = (
        Counter("c_total", "Some help.", ["p", "q"], registry=theirs),
        tallies.counter("c_total", "Some help.", ["p", "q"]),
    )
    histogram, spread = (
        Histogram("h_seconds", "More help.", ["p", "q"], registry=theirs, buckets=BOUNDS),
        tallies.histogram("h_seconds", "More help.", ["p", "q"], BOUNDS),
    )
    ours.register(tallies)
    for first, second, number in events:
        counter.labels(first, second).inc(number)
        tally.add(number, first, second)
        histogram.labels(first, second).observe(number)
        spread.add(number, first, second)
    for shown in (generate_latest, openmetrics):
        assert without_created(shown(ours)) == without_created(shown(theirs))


def without_created(text: bytes) -> list[bytes]:
    """All lines but those of the series that the library adds for when a counter began."""
    return [line for line in text.splitlines() if b"_created" not in line]


def test_names_are_known_before_anything_was_counted() -> None:
    tallies = Tallies()
    tallies.counter("c_total", "Some help.", ["p"])
    registry = CollectorRegistry()
    registry.register(tallies)
    assert [(family.name, family.samples) for family in registry.collect()] == [("c", [])]
