"""Which slot the server gave to an unpinned request, read from the tasks that its slots show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_sim import facts, request, words

from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import Effect, Finish, Grant, Policy, SlotSeen, Ticket
from prefixproxy.types import SlotId, SlotState, TicketId

A, B = TicketId("a"), TicketId("b")
OK = Finish(True, 0, 100, 10, 0.5)


def lane(name: str, **more: object) -> Ticket:
    return replace(request(words("root", 30), words(name, 40)).ticket, id=TicketId(name), **more)  # type: ignore[arg-type]


def look(s: Scheduler, now: float, *rows: tuple[bool, int | None]) -> list[Effect]:
    """Each row: busy, and the newest task in that slot."""
    seen = {i: SlotSeen(busy, None if busy else 0, task) for i, (busy, task) in enumerate(rows)}
    return s.slots_seen("u", seen, now, now)


def ready(*tasks: int) -> Scheduler:
    s = Scheduler(Policy(park=False))
    s.upstream_up(facts(n_slots=len(tasks)), -1.0)
    look(s, -0.1, *((False, task) for task in tasks))
    return s


def test_a_slot_with_a_newer_task_took_it_though_the_answer_is_over_by_then() -> None:
    s = ready(7, -1, 3)
    s.submit([lane("a", pinnable=False)], 0.0)
    assert s.slot_of(A) is None
    look(s, 0.1, (False, 7), (False, 9), (False, 3))
    assert s.slot_of(A) == SlotId("u", 1)


def test_what_drains_is_not_taken_for_it_and_stays_unknown_until_its_own_slot_shows() -> None:
    """The one before still keeps slot 0 busy. Once that took ours to be there."""
    s = ready(-1, -1)
    s.submit([lane("a")], 0.0)
    s.started(A, 0.1)
    look(s, 0.2, (True, 5), (False, -1))
    s.finished(A, Finish(False, confirmed_idle=False), 0.3)
    look(s, 0.4, (True, 5), (False, -1))
    s.submit([lane("b", pinnable=False)], 0.5)
    look(s, 0.6, (True, 5), (False, -1))
    assert s.slot_of(B) is None
    s.started(B, 0.7)
    look(s, 0.8, (True, 5), (False, 6))
    assert s.slot_of(B) == SlotId("u", 1)


def test_the_slot_that_just_came_free_is_known_by_its_next_task() -> None:
    s = ready(-1, 2)
    s.submit([lane("a")], 0.0)
    s.started(A, 0.1)
    s.finished(A, Finish(False, confirmed_idle=False), 0.3)
    look(s, 0.4, (True, 5), (False, 2))
    s.submit([lane("b", pinnable=False)], 0.5)
    look(s, 0.6, (True, 8), (False, 2))
    assert s.slot_of(B) == SlotId("u", 0)


@pytest.mark.parametrize("started", [False, True])
def test_the_next_request_of_another_client_is_not_ours_before_ours_has_started(started: bool) -> None:
    s = ready(-1, 2)
    look(s, 0.1, (True, 3), (False, 2))
    s.submit([lane("a", pinnable=False)], 0.2)
    if started:
        s.started(A, 0.3)
    look(s, 0.4, (True, 4), (False, 2))
    assert s.slot_of(A) == (SlotId("u", 0) if started else None)


def test_two_slots_with_new_tasks_prove_nothing() -> None:
    s = ready(1, 2)
    s.submit([lane("a", pinnable=False)], 0.0)
    look(s, 0.1, (True, 3), (True, 4))
    assert s.slot_of(A) is None


def test_after_one_that_was_never_found_the_next_is_not_given_its_slot() -> None:
    """Slot 0 has a new task, but it may be the first one's."""
    s = ready(1, 2)
    s.submit([lane("a", pinnable=False)], 0.0)
    s.started(A, 0.1)
    s.finished(A, replace(OK, confirmed_idle=True), 0.2)
    effects = s.submit([lane("b", pinnable=False)], 0.3)
    assert [e.ticket_id for e in effects if isinstance(e, Grant)] == [B]
    look(s, 0.4, (False, 3), (False, 2))
    assert s.slot_of(B) is None


def test_where_tasks_are_not_shown_the_slot_that_became_busy_is_its() -> None:
    s = Scheduler(Policy(park=False))
    s.upstream_up(facts(n_slots=2), -1.0)
    look(s, -0.1, (False, None), (False, None))
    s.submit([lane("a", pinnable=False)], 0.0)
    look(s, 0.1, (False, None), (True, None))
    assert s.slot_of(A) == SlotId("u", 1)
    assert [row.state for row in s.snapshot(0.1).slots] == [SlotState.IDLE, SlotState.LEASED]


def test_a_look_from_before_does_not_free_the_slot_that_one_we_gave_up_may_be_in() -> None:
    """The stranger in slot 1 had left, the server gave that slot to ours, and its client left before anybody saw it."""
    s = Scheduler(Policy(park=False))
    s.upstream_up(facts(n_slots=2), -1.0)
    look(s, -0.1, (False, None), (False, None))
    look(s, 0.0, (False, None), (True, None))
    s.submit([lane("a")], 0.1)
    before = {0: SlotSeen(False, 0), 1: SlotSeen(False, 0)}
    s.finished(A, Finish(False, confirmed_idle=False), 0.3)
    for asked, now in ((0.2, 0.31), (0.35, 0.36)):  # sent before it came there, or while it may be on its way
        s.slots_seen("u", before, now, asked)
        assert SlotState.IDLE not in [row.state for row in s.snapshot(now).slots]
    look(s, 0.6, (False, None), (True, None))
    assert [row.state for row in s.snapshot(0.6).slots] == [SlotState.IDLE, SlotState.FOREIGN]
