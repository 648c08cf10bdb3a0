"""What going on costs, and what compacting now: the field report's own example, and what is no conversation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import RECORD

from prefixproxy.compaction import price, spike, turns_of
from prefixproxy.types import Kind, RequestRecord

ROOT, GROWTH = 2700, 350


def turn(n: int, kind: Kind = Kind.CONTINUATION, prompt: int | None = None) -> RequestRecord:
    tokens = ROOT + GROWTH * n if prompt is None else prompt
    return replace(RECORD, id=f"t{n}", kind=kind, prompt_tokens=tokens, prompt_n=GROWTH, reference=f"t{n - 1}")


def conversation(n_turns: int, first: Kind = Kind.ROOT) -> list[RequestRecord]:
    """The newest first."""
    return [turn(n, first if n == 1 else Kind.CONTINUATION) for n in range(n_turns, 0, -1)]


def test_the_turns_are_found_back_to_where_the_conversation_began() -> None:
    known = {one.id: one for one in conversation(9)}
    assert [one.id for one in turns_of(known["t9"], known.get)] == [f"t{n}" for n in range(9, 0, -1)]
    del known["t4"]
    assert [one.id for one in turns_of(known["t9"], known.get)][-1] == "t5"
    rewritten = {one.id: one for one in conversation(5, Kind.COMPACTION)}
    assert len(turns_of(rewritten["t5"], rewritten.get)) == 5


def test_a_record_that_refers_to_itself_ends_the_search() -> None:
    one = replace(turn(3), reference="t3")
    assert turns_of(one, {"t3": one}.get) == [one]


def test_the_two_ways_of_the_field_reports_conversation() -> None:
    found = price(conversation(9), ROOT, 8192, 128)
    assert found is not None
    assert (found["growth_tokens"], found["history_tokens"], found["summary_tokens"]) == (350, 3150, 630)
    assert found["turns_left"] == (8192 - 128 - ROOT - 9 * GROWTH) // GROWTH == 6
    assert found["carry_on"] == {"next_turn": 350, "ten_turns": 3500, "anew": 6200}
    assert found["compact_now"] == {"next_turn": 980, "ten_turns": 4130, "anew": 3680}
    assert found["advice"].startswith("Carry on while it keeps its slot: compacting costs 630 tokens more now")


def test_near_the_end_of_the_slot_it_is_time() -> None:
    found = price(conversation(13), ROOT, 8192, 128)
    assert found is not None
    assert found["advice"] == "Compact now: about 2 more turns fit into the slot."


def test_a_compaction_that_was_seen_is_the_measure_of_the_next() -> None:
    turns = [*conversation(5)[:-1], turn(1, Kind.COMPACTION, ROOT + 1100)]
    found = price(turns, ROOT, None, 128)
    assert found is not None
    assert (found["summary_tokens"], found["summary_is"], found["turns_left"]) == (1100, "measured", None)
    assert found["advice"].startswith("Carry on while") or "as long as" in found["advice"]


@pytest.mark.parametrize(
    "turns",
    [
        conversation(9)[:1],
        [turn(2, prompt=900), turn(1, prompt=600)],
        [turn(2, prompt=3000), turn(1, prompt=3000)],
        [replace(turn(2), prompt_tokens=None), turn(1)],
    ],
)
def test_what_is_no_long_conversation_has_no_price(turns: list[RequestRecord]) -> None:
    assert price(turns, 500, 8192, 128) is None


def test_without_a_known_root_there_is_no_price() -> None:
    assert price(conversation(9), None, 8192, 128) is None


def test_only_a_rewritten_history_has_a_spike() -> None:
    assert spike([replace(turn(1), kind=Kind.COMPACTION, prompt_n=1800)]) == 1800
    assert spike(conversation(3)) is None


@settings(deadline=None)
@given(st.integers(1024, 100_000), st.integers(1, 5000), st.integers(2, 15), st.integers(0, 50_000))
def test_compacting_costs_its_summary_now_and_spares_the_rest_of_the_history(
    start: int, growth: int, n_turns: int, root: int
) -> None:
    turns = [turn(n, prompt=start + growth * n) for n in range(n_turns, 0, -1)]
    root = min(root, start)
    found = price(turns, root, None, 128)
    assert found is not None
    now, on = found["compact_now"], found["carry_on"]
    assert now["next_turn"] - on["next_turn"] == now["ten_turns"] - on["ten_turns"] == found["summary_tokens"]
    assert on["anew"] - now["anew"] == found["history_tokens"] - found["summary_tokens"]
    assert found["summary_tokens"] <= found["history_tokens"] + 128
