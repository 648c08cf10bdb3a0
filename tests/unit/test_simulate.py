"""Traces read, arrivals made up, loads played, and what is told of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree

import orjson
import pytest
from records import RECORD

from prefixproxy.errors import UsageError
from prefixproxy.journal import record_json
from prefixproxy.schedule.types import RejectReason
from prefixproxy.simulate.play import Arrival, Fleet, play
from prefixproxy.simulate.report import Report, as_json, as_svg, quantile, report_lines
from prefixproxy.simulate.synthetic import WORKLOADS, Workload, synthetic
from prefixproxy.simulate.text import span
from prefixproxy.simulate.trace import Trace, read_trace
from prefixproxy.types import FirstDifference, Kind, Outcome, RequestRecord

FIRST = replace(RECORD, id="r0", time=100.0, kind=Kind.ROOT, lane="a", prompt_tokens=1000, cache_n=0, prompt_n=1000)
FIRST = replace(FIRST, fork=False, predicted_n=20, prompt_ms=2000.0, ttft_ms=2500.0, total_ms=3500.0, relocations=())


def trace_of(records: Sequence[RequestRecord]) -> Trace:
    return read_trace([orjson.dumps(record_json(record)) for record in records])


def lane(i: int, time: float, after: int, **more: object) -> RequestRecord:
    """A fork of r0 whose prompt parts from it `after` tokens before its end."""
    made = replace(FIRST, id=f"r{i}", time=time, kind=Kind.FORK, lane=f"l{i}", reference="r0", **more)  # type: ignore[arg-type]
    return replace(made, first_difference=FirstDifference("user[1]", 0, after))


def turn(i: int, time: float, n: int, **more: object) -> RequestRecord:
    made = replace(FIRST, id=f"r{i}", time=time, kind=Kind.CONTINUATION, reference=f"r{i - 1}", prompt_tokens=n)
    return replace(made, **more)  # type: ignore[arg-type]


def test_lanes_share_what_they_were_seen_to_share() -> None:
    first, *lanes = trace_of([FIRST, lane(1, 101.0, 60), lane(2, 102.0, 40)]).arrivals
    assert [len(each.prompt) for each in (first, *lanes)] == [1000] * 3
    assert [each.prompt.common(first.prompt) for each in lanes] == [940, 960]
    assert {each.head for each in (first, *lanes)} == {940}
    assert [each.time for each in (first, *lanes)] == [0.0, 1.0, 2.0]


def test_the_servers_own_count_is_taken_where_it_found_the_root() -> None:
    trace = trace_of([FIRST, lane(1, 101.0, 60, cache_n=931, fork=True), lane(2, 102.0, 65, cache_n=12)])
    assert [each.prompt.common(trace.arrivals[0].prompt) for each in trace.arrivals[1:]] == [931, 931]


def test_a_turn_carries_the_prompt_and_the_answer_before_and_waits_for_it() -> None:
    first, second, third = trace_of([FIRST, turn(1, 110.0, 1060), turn(2, 120.0, 1130, cache_n=1075)]).arrivals
    assert second.prompt.common(first.prompt + first.answer) == 1020
    assert third.prompt.common(second.prompt + second.answer) == 1075
    assert second.after == first.key
    assert second.think_s == pytest.approx(6.5)
    assert [each.awaited for each in (first, second, third)] == [True, True, False]


def test_without_references_the_last_of_the_lane_or_the_family_is_taken() -> None:
    records = [FIRST, lane(1, 101.0, 60), turn(2, 120.0, 1060, lane="a")]
    first, other, second = trace_of([replace(record, reference="") for record in records]).arrivals
    assert other.prompt.common(first.prompt) == 940
    assert second.prompt.common(first.prompt + first.answer) == 1020


def test_records_that_name_each_other_are_read_all_the_same() -> None:
    arrivals = trace_of(
        [
            lane(
                1,
                101.0,
                60,
            ),
            replace(lane(0, 100.0, 60), reference="r1"),
        ]
    ).arrivals
    assert [len(each.prompt) for each in arrivals] == [1000, 1000]


def test_rates_are_those_of_the_trace_and_what_was_never_evaluated_is_counted() -> None:
    rejected = replace(FIRST, id="r9", prompt_tokens=None, cache_n=None, prompt_n=None, predicted_n=None)
    trace = trace_of([FIRST, rejected])
    assert (trace.skipped, trace.prefill_rate, trace.decode_rate) == (1, 500.0, 19.0)
    too_long = replace(rejected, prompt_tokens=90_000, outcome=Outcome.REJECTED, status=400, context_exceeded=True)
    assert trace_of([FIRST, too_long]).skipped == 1
    assert trace_of([replace(FIRST, prompt_n=31)]).prefill_rate is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{", "line 2: not a journal record: "),
        (b"[]", "line 2: not a journal record: "),
        (b"{}", "line 2: not a journal record: id is missing"),
        (b'{"requests":[]}', "line 2: not a journal record: id is missing; export the journal with ?format=jsonl"),
        ({"prompt_tokens": -1}, "line 2: prompt_tokens: a whole number from 0 to 10,000,000 is expected, got -1"),
        ({"prompt_tokens": "9"}, "line 2: prompt_tokens: a whole number from 0 to 10,000,000 is expected, got '9'"),
        ({"cache_n": 10**15}, "line 2: cache_n: a whole number from 0 to 10,000,000 is expected, got 1000000000000000"),
        ({"time": None}, "line 2: time: a number from 0 to 1e+10 is expected, got None"),
        ({"time": 1764500000000.0}, "line 2: time: a number from 0 to 1e+10 is expected, got 1764500000000.0"),
        ({"total_ms": True}, "line 2: total_ms: a number from 0 to 1e+09 is expected, got True"),
        ({"kind": "mad"}, "line 2: not a journal record: 'mad' is not a valid Kind"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line: bytes | dict[str, object], told: str) -> None:
    good = record_json(FIRST)
    bad = line if isinstance(line, bytes) else orjson.dumps({**good, **line})
    with pytest.raises(UsageError) as failure:
        read_trace([orjson.dumps(good), bad])
    assert str(failure.value).startswith(told)


@pytest.mark.parametrize("lines", [[], [b"", b" "], [orjson.dumps(record_json(replace(FIRST, prompt_tokens=None)))]])
def test_a_trace_with_nothing_to_replay_is_an_error(lines: list[bytes]) -> None:
    with pytest.raises(UsageError, match="no request to replay"):
        read_trace(lines)


def made(workload: Workload, n: int = 300, seed: int = 1) -> list[Arrival]:
    return list(synthetic(workload, n, 2.0, random.Random(seed)))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_made_up_arrivals_come_in_order_and_the_same_for_the_same_seed(workload: Workload) -> None:
    arrivals = made(workload)
    assert len(arrivals) == 300
    assert [each.time for each in arrivals] == sorted(each.time for each in arrivals)
    assert arrivals == made(workload) != made(workload, seed=2)
    assert len({each.key for each in arrivals}) == 300
    assert 300 / arrivals[-1].time == pytest.approx(2.0, rel=0.4)


@pytest.mark.parametrize("policy", ["cost", "fifo"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_everybody_is_answered_or_rejected_and_nothing_is_less_than_the_least(workload: Workload, policy: str) -> None:
    fleet = Fleet(3, servers=2, policy=policy, prefill_rate=2000.0, queue_limit=20)  # type: ignore[arg-type]
    outcome = play(made(workload, 120), fleet)
    assert len(outcome.waits) + outcome.rejected.total() == 120
    assert outcome.evaluated >= outcome.least > 0
    assert all(ttft >= wait >= 0 for wait, ttft in zip(outcome.waits, outcome.ttfts, strict=True))


def test_a_fan_out_that_fits_evaluates_no_more_than_the_least() -> None:
    assert play(made("fanout", 60), Fleet(8, kv_bytes=2000)).ratio == 1.0


def test_a_turn_waits_for_the_answer_it_carries_and_for_its_user() -> None:
    first = Arrival(0.0, 1, span(1, 100), span(-1, 50), awaited=True)
    second = Arrival(0.1, 2, first.prompt + first.answer + span(2, 20), span(-2, 1), after=1, think_s=7.0)
    outcome = play([first, second], Fleet(2, prefill_rate=100.0, decode_rate=10.0))
    assert outcome.span_s == pytest.approx(1.0 + 5.0 + 7.0 + 0.2, abs=0.5)
    assert outcome.evaluated == outcome.least + 1  # the last token of an answer was never evaluated


def test_a_full_queue_rejects_and_an_impatient_client_is_told_so() -> None:
    crowd = [Arrival(1.0, key, span(key, 100), span(-key, 50)) for key in range(1, 9)]
    outcome = play(crowd, Fleet(1, queue_limit=5, queue_timeout_s=6.0, prefill_rate=100.0))
    assert outcome.rejected["queue_full"] == 2
    assert outcome.rejected["queue_timeout"] > 0
    assert len(outcome.waits) + outcome.rejected.total() == 8


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_quantiles_are_values_that_occurred(share: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == value
    assert quantile([], share) is None


def report() -> Report:
    outcomes = [play(made("fanout", 40), Fleet(n, policy=policy)) for n in (1, 4) for policy in ("cost", "fifo")]
    return Report("Forty <requests>.", tuple(outcomes))


def test_the_report_begins_with_what_was_simulated_and_what_was_not() -> None:
    lines = report_lines(report())
    assert lines[3] == "slots            1, 4 (simulated)"
    assert [line.split()[0] for line in lines[:9]] == [
        *("server", "build", "model", "slots", "n_ctx_slot", "KV", "flash", "flags", "tokens")
    ]
    assert as_json(report())["facts"]["model"] == "unknown"


def test_what_was_rejected_is_told_in_json() -> None:
    told = report()
    full = replace(told.outcomes[0], rejected=Counter({RejectReason.QUEUE_FULL: 3}))
    found = orjson.loads(orjson.dumps(as_json(replace(told, outcomes=(full,)))))["outcomes"]
    assert found[0]["rejected"] == {"queue_full": 3}


def test_the_report_has_a_row_for_each_fleet_and_policy_in_text_and_json() -> None:
    told = report()
    rows = [line.split()[:2] for line in report_lines(told) if line[:7].strip().isdigit()]
    assert rows == [["1", "cost"], ["1", "fifo"], ["4", "cost"], ["4", "fifo"]]
    found = orjson.loads(orjson.dumps(as_json(told)))["outcomes"]
    assert [(each["slots"], each["policy"]) for each in found] == [(1, "cost"), (1, "fifo"), (4, "cost"), (4, "fifo")]
    assert all(each["evaluated_tokens"] >= each["least_tokens"] for each in found)


def test_the_drawing_is_well_formed_and_has_a_line_for_each_policy_and_share() -> None:
    drawing = ElementTree.fromstring(as_svg(report()))
    lines = [each for each in drawing if each.tag.endswith("polyline")]
    assert len(lines) == 4
    assert all(len(line.attrib["points"].split()) == 2 for line in lines)


def test_a_drawing_of_nothing_answered_is_a_drawing() -> None:
    nobody = replace_waits(report())
    assert ElementTree.fromstring(as_svg(nobody)).tag.endswith("svg")


def replace_waits(told: Report) -> Report:
    return replace(told, outcomes=tuple(type(each)(each.fleet) for each in told.outcomes))
