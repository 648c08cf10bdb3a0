"""The last hour in steps: what is counted, and that it stays an hour."""

from __future__ import annotations

import dataclasses
from typing import Any

from test_microscope import RECORD

from prefixproxy.trend import MAX_COPIES, MAX_WARMUPS, STEP_S, STEPS, Copy, Trend
from prefixproxy.types import CacheSource, MissReason, Usage

NOW = 1_700_000_003.0
STEP = 1_700_000_000


def steps(trend: Trend, now: float = NOW) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = trend.shown(0, now)["steps"]
    return shown


def test_a_request_counts_in_its_step_and_in_the_total() -> None:
    trend = Trend(NOW)
    missed = dataclasses.replace(RECORD, miss_reason=MissReason.SLOT_EVICTED)
    trend.request(RECORD, 0.001, NOW)
    trend.request(missed, None, NOW + 1)
    trend.request(RECORD, 0.001, NOW + STEP_S)
    first = {"time": STEP, "requests": 2, "cached": 1200, "evaluated": 800, "saved_s": 0.6, "misses": 1}
    second = {"time": STEP + STEP_S, "requests": 1, "cached": 600, "evaluated": 400, "saved_s": 0.6, "misses": 0}
    assert steps(trend) == [first, second]
    total = trend.shown(0, NOW)["total"]
    assert (total["requests"], total["cached"], total["evaluated"], total["misses"]) == (3, 1800, 1200, 1)
    assert trend.shown(STEP + 1, NOW)["steps"] == [second]


def test_what_was_not_reported_is_not_counted() -> None:
    trend = Trend(NOW)
    trend.request(dataclasses.replace(RECORD, cache_source=CacheSource.INFERRED), 0.001, NOW)
    assert (steps(trend)[0]["requests"], steps(trend)[0]["cached"], steps(trend)[0]["evaluated"]) == (1, 0, 0)


def test_warm_ups_are_paid_for_like_requests() -> None:
    trend = Trend(NOW)
    usage = Usage(cached_tokens=0, evaluated_tokens=2540, prompt_ms=1500.0, source=CacheSource.REPORTED)
    trend.warmup("local", 2, "ok", usage, NOW)
    trend.warmup("local", 3, "failed", None, NOW)
    shown = trend.shown(0, NOW)
    assert (shown["total"]["evaluated"], shown["total"]["requests"]) == (2540, 0)
    assert [(w["slot"], w["outcome"], w["seconds"], w["tokens"]) for w in shown["warmups"]] == [
        (2, "ok", 1.5, 2540),
        (3, "failed", None, None),
    ]


def test_it_remembers_an_hour_and_no_more() -> None:
    trend = Trend(NOW)
    for i in range(STEPS + 20):
        trend.request(RECORD, None, NOW + i * STEP_S)
        trend.warmup("local", 0, "ok", None, NOW)
    end = NOW + (STEPS + 19) * STEP_S
    assert len(steps(trend, end)) == STEPS
    assert steps(trend, end + STEPS * STEP_S) == [], "old steps are not the last hour"
    assert len(trend.shown(0, end)["warmups"]) == MAX_WARMUPS


def test_a_clock_set_back_makes_no_second_step() -> None:
    trend = Trend(NOW)
    trend.request(RECORD, None, NOW)
    trend.request(RECORD, None, NOW - 500)
    assert [step["requests"] for step in steps(trend)] == [2]


def test_copies_are_told_from_a_moment_on_and_bounded() -> None:
    trend = Trend(NOW)
    for number in range(MAX_COPIES + 10):
        trend.copy(Copy("u", 1, 0 if number % 2 else None, "ok", NOW + number, 0.03))
    shown = trend.shown(0, NOW)["copies"]
    assert (len(shown), shown[0]["end"]) == (MAX_COPIES, NOW + 10)
    assert trend.shown(NOW + MAX_COPIES + 8, NOW)["copies"] == [
        {"upstream": "u", "slot": 1, "source": None, "outcome": "ok", "end": NOW + MAX_COPIES + 8, "seconds": 0.03},
        {"upstream": "u", "slot": 1, "source": 0, "outcome": "ok", "end": NOW + MAX_COPIES + 9, "seconds": 0.03},
    ]
