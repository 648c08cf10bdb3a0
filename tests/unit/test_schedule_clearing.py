"""Servers that clear their idle slots whenever a request starts: how that is found out, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_sim import FULL, facts, request, words

from prefixproxy.schedule.clearing import Clearing
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import Effect, Finish, Grant, Poll, SlotSeen, Ticket, Warm
from prefixproxy.types import SlotId, TicketId

OK = Finish(True, 0, 100, 10, 0.5)
CLEARS = replace(FULL, clears_idle=True)
A, B, C = (TicketId(name) for name in "abc")


def lane(name: str, root: int = 100) -> Ticket:
    return replace(request(words("root", root), words(name, 40)).ticket, id=TicketId(name))


def look(s: Scheduler, now: float, *rows: tuple[int, int], busy: int | None = None) -> list[Effect]:
    """Each row: tokens in that slot, and its newest task."""
    seen = {i: SlotSeen(i == busy, None if i == busy else n, task) for i, (n, task) in enumerate(rows)}
    return s.slots_seen("u", seen, now, now)


def other(name: str) -> Ticket:
    """On a root of its own."""
    return replace(request(words(f"root of {name}", 100), words(name, 40)).ticket, id=TicketId(name))


def ready(clears: bool | None = None) -> Scheduler:
    s = Scheduler()
    s.upstream_up(facts(n_slots=2, capabilities=replace(FULL, clears_idle=clears)), -1.0)
    look(s, -0.1, (0, -1), (0, -1))
    return s


def seen_to_clear() -> Scheduler:
    """Two looks told that it does: slots are looked at still. Both are empty."""
    s = ready()
    s.submit([other("x")], 0.0)
    first = s.slot_of(TicketId("x"))
    assert first is not None
    rows = [(110, 5), (0, -1)] if first.slot == 0 else [(0, -1), (110, 5)]
    s.finished(TicketId("x"), OK, 1.0)
    look(s, 1.1, *rows)
    s.submit([other("y")], 2.0)
    s.finished(TicketId("y"), OK, 3.0)
    rows = [(0, 5), (110, 6)] if first.slot == 0 else [(110, 6), (0, 5)]
    look(s, 3.1, *rows)
    assert "clears the idle slots" in why(s)
    look(s, 3.2, (0, 6), (0, 7))
    return s


def why(s: Scheduler) -> str:
    return s.snapshot(99.0).upstreams[0].unpinned_because


@pytest.mark.parametrize(
    ("left", "asked", "known"),
    [
        ((7, 0), 4.0, True),
        ((7, 300), 4.0, False),
        ((7, 0), 2.5, None),  # the start of the other request was not known yet
        ((8, 0), 4.0, None),  # something ran in it
        ((8, 300), 4.0, None),
        ((None, 0), 4.0, None),
        ((7, None), 4.0, None),
    ],
)
def test_what_a_slot_keeps_while_another_request_starts_tells(
    left: tuple[int | None, int | None], asked: float, known: bool | None
) -> None:
    clearing = Clearing()
    clearing.see(0, 7, 300, 1.0)
    clearing.started(2.0, 3.0)
    clearing.see(0, *left, asked)
    assert clearing.known is known


def test_a_slot_that_was_empty_before_tells_nothing_nor_does_one_without_a_start() -> None:
    clearing = Clearing()
    for asked in (1.0, 4.0):
        clearing.see(0, 7, 300, asked)
        clearing.see(1, 6, 0, asked)
    assert clearing.known is None
    clearing.started(2.0, 3.0)
    clearing.see(1, 6, 0, 4.0)
    assert clearing.known is None


def test_the_newest_look_counts() -> None:
    clearing = Clearing()
    assert (clearing.seen_or(None), clearing.seen_or(True)) == (None, True)
    clearing.see(0, 7, 300, 1.0)
    clearing.started(2.0, 3.0)
    clearing.see(0, 7, 300, 4.0)
    assert clearing.seen_or(True) is False
    clearing.started(5.0, 6.0)
    clearing.see(0, 7, 0, 7.0)
    assert clearing.seen_or(False) is True


def test_nothing_is_pinned_or_warmed_where_it_is_known() -> None:
    s = Scheduler()
    s.upstream_up(facts(n_slots=2, capabilities=CLEARS), -1.0)
    look(s, -0.1, (0, -1), (0, -1))
    effects = s.submit([lane("a", 5_000), lane("b", 5_000), lane("c", 5_000)], 0.0)
    assert not any(isinstance(effect, Warm | Poll) for effect in effects)
    grants = [effect for effect in effects if isinstance(effect, Grant)]
    assert [(grant.ticket_id, grant.slot) for grant in grants] == [(A, None), (B, None)], "as many as there are slots"
    assert "clears the idle slots" in why(s)
    assert not s.snapshot(0.0).upstreams[0].snapshots


def test_nobody_waits_there_for_what_another_request_evaluates() -> None:
    """Its slot would be cleared, or go to whoever is next."""
    s = seen_to_clear()
    s.submit([lane("a", 5_000)], 10.0)
    look(s, 10.1, (0, 8), (0, 7), busy=0)
    assert s.slot_of(A) == SlotId("u", 0)
    [grant] = [effect for effect in s.submit([lane("b", 5_000)], 10.2) if isinstance(effect, Grant)]
    assert (grant.ticket_id, grant.slot) == (B, None)


def test_what_it_cleared_is_not_expected() -> None:
    s = seen_to_clear()
    s.submit([lane("a")], 10.0)
    look(s, 10.1, (0, 8), (0, 7), busy=0)
    s.finished(A, OK, 11.0)
    look(s, 11.1, (110, 8), (0, 7))
    s.submit([other("b")], 12.0)
    look(s, 12.1, (0, 8), (0, 9), busy=1)
    s.finished(B, OK, 13.0)
    look(s, 13.1, (0, 8), (110, 9))
    [grant] = [effect for effect in s.submit([lane("c")], 14.0) if isinstance(effect, Grant)]
    assert (grant.slot, grant.expected_cached) == (None, 0)


@pytest.mark.parametrize("left", [0, 110])
def test_it_shows_between_the_first_two_requests_whether_a_server_does_it(left: int) -> None:
    s = ready()
    s.submit([lane("a")], 0.0)
    first = s.slot_of(A)
    assert first is not None
    asked = s.finished(A, OK, 1.0)
    assert any(isinstance(effect, Poll) for effect in asked)

    def rows(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
        return [a, b] if first is not None and first.slot == 0 else [b, a]

    look(s, 1.1, *rows((110, 5), (0, -1)))
    s.submit([other("b")], 2.0)
    assert s.slot_of(B) == SlotId("u", 1 - first.slot)
    assert any(isinstance(effect, Poll) for effect in s.finished(B, OK, 3.0))
    assert not why(s)
    look(s, 3.1, *rows((left, 5), (110, 6)))
    assert bool(why(s)) is (left == 0)
    if left:
        s.submit([other("c")], 4.0)
        assert not any(isinstance(effect, Poll) for effect in s.finished(C, OK, 5.0)), "it is known by now"


def test_a_later_probe_may_tell() -> None:
    s = ready()
    assert not why(s)
    s.upstream_up(facts(n_slots=2, capabilities=CLEARS), 1.0)
    assert "clears the idle slots" in why(s)
