"""The journal ring: order, bounds, what slow readers miss, and the JSON form of a record."""

from __future__ import annotations

import dataclasses

import orjson
import pytest
import records
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.errors import UsageError
from prefixproxy.journal import RECORD_FIELDS, Journal, read_jsonl, record_from_json, record_json
from prefixproxy.types import FirstDifference, MissReason, Relocation, RequestRecord

RECORD = dataclasses.replace(
    records.RECORD,
    time=1700000000.5,
    family="f00d",
    prompt_tokens=2700,
    cache_n=2540,
    prompt_n=160,
    expected_cached=2540,
    miss_reason=MissReason.NONE,
    queue_ms=1.5,
    overhead_ms=0.7,
    ttft_ms=120.0,
    total_ms=900.0,
    prompt_ms=110.0,
    relocations=(Relocation("clock", "system[0]", 31),),
    first_difference=FirstDifference("messages[1]", 12, 160),
)

CONTRACT = (
    "id, time, tenant, path, model, upstream, stream, kind, family, lane, slot, outcome, status, prompt_tokens, "
    "cache_n, prompt_n, cache_source, expected_cached, miss_reason, queue_ms, overhead_ms, ttft_ms, total_ms, "
    "predicted_n, prompt_ms, fork, relocations, first_difference, context_exceeded, "
    "truncated, arm, reference"
).split(", ")


def record(name: str) -> RequestRecord:
    return dataclasses.replace(RECORD, id=name)


def filled(keep: int, count: int) -> Journal:
    journal = Journal(keep)
    for i in range(1, count + 1):
        journal.add(record(f"r{i}"))
    return journal


def test_newest_come_first_and_old_ones_are_forgotten() -> None:
    journal = filled(keep=3, count=5)
    assert [r.id for r in journal.newest(10)] == ["r5", "r4", "r3"]
    assert [r.id for r in journal.newest(1)] == ["r5"]
    assert journal.newest(0) == journal.newest(-1) == []
    assert (len(journal), journal.last) == (3, 5)


def test_get_finds_what_is_kept_and_nothing_else() -> None:
    journal = filled(keep=2, count=3)
    assert journal.get("r3") == record("r3")
    assert journal.get("r1") is None
    assert journal.get("never") is None


def test_an_id_that_came_twice_stays_found_when_the_first_falls_out() -> None:
    journal = Journal(2)
    for name in ("same", "same", "other"):
        journal.add(record(name))
    assert journal.get("same") == record("same")
    journal.add(record("more"))
    assert journal.get("same") is None


def test_keep_zero_keeps_nothing_but_still_wakes() -> None:
    journal, woken = Journal(0), []
    journal.listen(lambda: woken.append(1))
    journal.add(RECORD)
    assert (len(journal), journal.get("r1"), journal.newest(5), woken) == (0, None, [], [1])
    assert journal.since(0).missed == 1


def test_since_returns_what_followed_in_order() -> None:
    journal = filled(keep=10, count=4)
    batch = journal.since(2)
    assert [(e.number, e.record.id) for e in batch.entries] == [(3, "r3"), (4, "r4")]
    assert (batch.last, batch.missed) == (4, 0)
    assert journal.since(4).entries == ()
    assert journal.since(4).last == 4


def test_a_slow_reader_is_told_what_it_missed() -> None:
    batch = filled(keep=3, count=10).since(2, limit=2)
    assert ([e.number for e in batch.entries], batch.last, batch.missed) == ([8, 9], 9, 5)


def test_a_number_from_another_life_starts_over() -> None:
    journal = filled(keep=10, count=2)
    assert [e.number for e in journal.since(99).entries] == [1, 2]
    assert [e.number for e in journal.since(-1).entries] == [1, 2]


@given(keep=st.integers(0, 6), steps=st.lists(st.sampled_from(["add", "read"]), max_size=40), limit=st.integers(1, 4))
def test_every_record_is_read_once_or_counted_as_missed(keep: int, steps: list[str], limit: int) -> None:
    journal, cursor, seen, missed = Journal(keep), 0, [], 0
    for step in [*steps, *["read"] * (keep + 1)]:
        if step == "add":
            journal.add(record(str(journal.last + 1)))
            continue
        batch = journal.since(cursor, limit)
        seen += [entry.number for entry in batch.entries]
        missed += batch.missed
        cursor = batch.last
    assert seen == sorted(set(seen))
    assert len(seen) + missed == journal.last == cursor


def test_listeners_are_woken_until_they_stop() -> None:
    journal, woken = Journal(3), []
    stop = journal.listen(lambda: woken.append("a"))
    journal.listen(lambda: woken.append("b"))
    journal.add(RECORD)
    stop()
    stop()
    journal.add(RECORD)
    assert woken == ["a", "b", "b"]


def test_a_listener_may_stop_itself_while_woken() -> None:
    journal, woken = Journal(3), []

    def once() -> None:
        woken.append(1)
        stop()

    stop = journal.listen(once)
    journal.add(RECORD)
    journal.add(RECORD)
    assert woken == [1]


def test_a_record_has_the_contracts_fields_in_the_contracts_order() -> None:
    assert list(record_json(RECORD)) == CONTRACT
    assert list(RECORD_FIELDS) == CONTRACT
    as_json = orjson.loads(orjson.dumps(record_json(RECORD)))
    assert as_json["relocations"] == [{"rule": "clock", "segment": "system[0]", "bytes": 31}]
    assert as_json["first_difference"] == {"segment": "messages[1]", "offset": 12, "tokens_after": 160}
    assert (as_json["kind"], as_json["cache_source"]) == ("fork", "reported")


def test_unknown_numbers_are_null() -> None:
    unknown = dataclasses.replace(RECORD, slot=None, cache_n=None, first_difference=None)
    as_json = record_json(unknown)
    assert (as_json["slot"], as_json["cache_n"], as_json["first_difference"]) == (None, None, None)


def test_jsonl_round_trips_oldest_first() -> None:
    journal = filled(keep=3, count=4)
    lines = list(journal.jsonl())
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    assert [each for _, each in read_jsonl(lines)] == [record("r2"), record("r3"), record("r4")]
    assert list(read_jsonl([*lines, b"", b"  \n"])) == list(read_jsonl(lines))


def test_fields_added_by_a_later_version_are_skipped() -> None:
    assert record_from_json({**record_json(RECORD), "new_field": 1}) == RECORD


def test_a_journal_from_before_truncation_was_told_is_still_read() -> None:
    older = record_json(RECORD)
    del older["truncated"]
    assert record_from_json(older) == RECORD


@pytest.mark.parametrize("line", [b"{", b"{}", b"[]", b'{"id": 1}', orjson.dumps({**record_json(RECORD), "kind": "?"})])
def test_a_broken_line_is_named_by_its_number(line: bytes) -> None:
    good = orjson.dumps(record_json(RECORD))
    with pytest.raises(UsageError, match=r"^line 2: not a journal record: "):
        list(read_jsonl([good, line]))
