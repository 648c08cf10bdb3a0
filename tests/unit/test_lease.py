"""What broken-off requests had cost: told once, from the first reading that shows their slot idle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixproxy.backends import NOT_YET, SlotReading
from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.errors import BadRequest
from prefixproxy.lease import CutShort, Lease
from prefixproxy.prefix import chain_of
from prefixproxy.schedule.types import Reason, Ticket
from prefixproxy.types import Api, TicketId, Usage


def lease(slot: int | None = 2, reused: int | None = 900, upstream: str = "u") -> Lease:
    ticket = Ticket(TicketId("t"), chain_of([b"x"]), 0, "f", 1, 0.0, 9.0)
    backend = LlamaServer(upstream, "http://127.0.0.1:1")
    return Lease(ticket, backend, slot, 0, fork=False, reason=Reason.RESIDENT, queued_s=0.0, reused=reused)


def told(
    cut_short: CutShort, slot: int = 2, asked_at: float = 11.0, *, busy: bool = False, n: int | None = 1412
) -> list[tuple[int, int, int]]:
    return [entry[1:] for entry in cut_short.read("u", {slot: SlotReading(busy, n)}, asked_at)]


def test_the_length_of_the_idle_slot_less_what_was_reused_is_what_was_evaluated() -> None:
    cut_short = CutShort()
    cut_short.released(lease(), 10.0)
    assert told(cut_short, busy=True) == []
    assert told(cut_short, slot=1) == []
    assert told(cut_short, asked_at=9.0) == [], "older than the end of the request"
    assert told(cut_short) == [(2, 900, 512)]
    assert told(cut_short) == [], "once"


def test_a_path_that_cannot_ask_for_no_reuse_is_refused_where_nothing_may_be_reused() -> None:
    one = lease()
    one.native, one.reuse_off = True, "verify failed"
    with pytest.raises(BadRequest, match=r"nothing may be reused on upstream u \(verify failed\)") as caught:
        one.require_obedience(Api.MESSAGES)
    assert (caught.value.code, one.idle) == ("reuse_off", True)
    one.require_obedience(Api.CHAT)
    one.reuses_unasked = False
    one.require_obedience(Api.MESSAGES)


@pytest.mark.parametrize("n", [None, 899])
def test_a_length_that_cannot_be_it_tells_nothing(n: int | None) -> None:
    cut_short = CutShort()
    cut_short.released(lease(), 10.0)
    assert told(cut_short, n=n) == []
    assert told(cut_short) == [], "the slot has changed since"


def test_the_next_request_in_the_slot_ends_the_waiting() -> None:
    cut_short = CutShort()
    cut_short.released(lease(), 10.0)
    cut_short.released(lease(reused=None), 12.0)
    assert told(cut_short, asked_at=13.0) == []


@pytest.mark.parametrize("other", [lease(slot=None), lease(reused=None)])
def test_other_endings_open_nothing(other: Lease) -> None:
    cut_short = CutShort()
    cut_short.released(other, 10.0)
    assert told(cut_short) == []


def test_a_lost_server_takes_its_counts_along() -> None:
    cut_short = CutShort()
    cut_short.released(lease(), 10.0)
    cut_short.released(lease(upstream="other"), 10.0)
    cut_short.lost("u")
    assert told(cut_short) == []
    assert [entry[1:] for entry in cut_short.read("other", {2: SlotReading(False, 950)}, 11.0)] == [(2, 900, 50)]


@pytest.mark.parametrize(
    ("reason", "expected", "cached", "ok", "without"),
    [
        (Reason.FORKED, 2000, 10, True, True),
        (Reason.WARMED, 2000, 0, True, True),
        (Reason.FORKED, 2000, 1500, True, False),
        (Reason.FORKED, 2000, None, True, False),
        (Reason.FORKED, 2000, 10, False, False),
        (Reason.FORKED, 20, 0, True, False),
        (Reason.RESIDENT, 2000, 10, True, False),
    ],
)
def test_a_root_that_was_prepared_and_hardly_reused_had_no_effect(
    reason: Reason, expected: int, cached: int | None, ok: bool, without: bool
) -> None:
    one = lease()
    one.reason, one.expected_cached, one.ok, one.usage = reason, expected, ok, Usage(cached_tokens=cached)
    assert one.had_no_effect is without


def messages(slot: int | None) -> Lease:
    one = lease(slot)
    one.ticket = replace(one.ticket, pinnable=False)
    return one


@pytest.mark.parametrize(
    ("seen", "found", "reused"),
    [
        (SlotReading(True, 9, 4, 640), True, 640),
        (SlotReading(True, 9, 4, 0), True, 0),
        (SlotReading(True, 9, 4, NOT_YET), False, None),
        (SlotReading(True, 9, 4), True, None),
        (SlotReading(False, 9, 4), True, None),
    ],
    ids=["told", "nothing reused", "not looked at", "never told", "over"],
)
def test_what_a_slot_tells_of_a_request_is_looked_for_until_it_is_told(
    seen: SlotReading, found: bool, reused: int | None
) -> None:
    one = messages(2)
    assert (one.look({2: seen, 1: SlotReading(True, 1, 1, 7)}), one.seen_reused) == (found, reused)


def test_only_what_its_answer_may_not_tell_is_looked_for() -> None:
    row = {2: SlotReading(True, 9, 4, 640)}
    assert [one.look(row) for one in (messages(None), messages(1), lease(2))] == [False, True, True]
    pinnable = lease(2)
    pinnable.look(row)
    assert pinnable.seen_reused is None
