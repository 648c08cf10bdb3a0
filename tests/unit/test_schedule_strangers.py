"""Slots with content that nobody told the scheduler of: prompts of which more may lie there than is known elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_sim import FULL, facts, request, words

from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slot import NOTHING, Slot
from prefixproxy.schedule.strangers import TRIES, Strangers
from prefixproxy.schedule.types import Effect, Finish, Grant, HoldReason, Policy, Poll, SlotSeen, Ticket, Warm
from prefixproxy.types import Form, SlotId, SlotState, TicketId

OK = Finish(True, 2000, 40, 10, 0.5)
KNOWS = replace(FULL, clears_idle=False)


def ticket(name: str, n: int = 2_000) -> Ticket:
    return replace(request(words(f"talk {name}", n), words(name, 40)).ticket, id=TicketId(name))


def look(s: Scheduler, now: float, *rows: tuple[int, int], busy: int | None = None) -> list[Effect]:
    """Each row: tokens in that slot, and its newest task."""
    seen = {i: SlotSeen(i == busy, None if i == busy else n, task) for i, (n, task) in enumerate(rows)}
    return s.slots_seen("u", seen, now, now)


def ready(*rows: tuple[int, int], shared: bool = False, fork: bool = True) -> Scheduler:
    s = Scheduler(Policy(fork=fork))
    s.upstream_up(replace(facts(n_slots=len(rows), capabilities=KNOWS), shared=shared), 0.0)
    look(s, 0.1, *rows)
    return s


def grants(effects: list[Effect]) -> list[tuple[str, SlotId | None]]:
    return [(effect.ticket_id, effect.slot) for effect in effects if isinstance(effect, Grant)]


def test_a_cold_prompt_goes_without_a_slot_where_one_of_unknown_content_may_have_it() -> None:
    s = ready((0, -1), (2_010, 5))
    effects = s.submit([ticket("a")], 1.0)
    assert grants(effects) == [("a", None)]
    assert not any(isinstance(effect, Warm) for effect in effects)
    look(s, 1.1, (0, -1), (0, 6), busy=1)
    assert s.slot_of(TicketId("a")) == SlotId("u", 1)
    s.finished(TicketId("a"), OK, 2.0)
    look(s, 2.1, (0, -1), (2_050, 6))
    effects = s.submit([ticket("b")], 3.0)
    assert grants(effects) == [], "all is known now: its root is gathered for"


@pytest.mark.parametrize("held", [0, 40])
def test_little_is_not_gone_to_see(held: int) -> None:
    """What a trial left, or nothing."""
    s = ready((0, -1), (held, 5))
    assert grants(s.submit([ticket("a")], 1.0)) == []
    assert {waiting.hold for waiting in s.snapshot(1.0).waiting} == {HoldReason.GATHERING}


def test_a_short_prompt_is_no_reason_either() -> None:
    s = ready((0, -1), (2_010, 5))
    [(_, slot)] = grants(s.submit([ticket("a", 4)], 1.0))
    assert slot is not None


def test_it_is_given_up_after_a_few_tries() -> None:
    slots = [Slot(SlotId("u", i), SlotState.IDLE, 0.0) for i in range(3)]
    strangers = Strangers()
    for slot, n_tokens in zip(slots, (0, 500, 900), strict=True):
        strangers.note(slots, slot, n_tokens, ours=False)
    assert strangers.tries == 2 * TRIES
    assert [strangers.may_have(slots, cached, Form.CHAT) for cached in (0, 800, 880)] == [True, True, False]
    strangers.tries = 0
    strangers.note(slots, slots[2], 900, ours=False)
    assert not strangers.may_have(slots, 0, Form.CHAT), "the same content is no news"
    strangers.note(slots, slots[2], 950, ours=True)
    assert not strangers.may_have(slots, 0, Form.CHAT), "what we left ourselves is not gone to see"
    strangers.note(slots, slots[2], 990, ours=False)
    assert strangers.may_have(slots, 0, Form.CHAT)
    strangers.forms = {Form.TOKENS}
    assert strangers.may_have(slots, 0, Form.CHAT), "whatever came in other forms too"
    slots[1].held, slots[2].state = replace(NOTHING, tokens=500), SlotState.LEASED
    strangers.note(slots, slots[1], 500, ours=False)
    assert [strangers.may_have(slots, 0, form) for form in (Form.TOKENS, Form.CHAT)] == [False, True]


def test_where_others_come_too_a_cold_prompt_waits_for_a_look() -> None:
    s = ready((0, -1), (0, -1), shared=True)
    effects = s.submit([ticket("a")], 5.0)
    assert effects == [Poll("u")]
    assert {waiting.hold for waiting in s.snapshot(5.0).waiting} == {HoldReason.LOOKING}
    assert grants(look(s, 5.01, (0, -1), (2_010, 5))) == [("a", None)]


def test_but_not_for_long() -> None:
    s = ready((0, -1), (0, -1), shared=True)
    s.submit([ticket("a")], 5.0)
    wake = s.next_wake()
    assert wake is not None
    now = 5.0
    while {waiting.hold for waiting in s.snapshot(now).waiting} == {HoldReason.LOOKING}:
        wake = s.next_wake()
        assert wake is not None
        now = wake
        s.tick(now)
    assert now == pytest.approx(5.25)


def came(s: Scheduler, name: str, form: Form, now: float, cached: int) -> SlotId | None:
    """A prompt of its own in this form that was answered; where it was sent."""
    [(_, slot)] = grants(s.submit([replace(ticket(name, 300), form=form)], now))
    busy = 1 if slot is None else slot.slot
    look(s, now + 1.0, *[(each.tokens, 0) for each in s.snapshot(now).slots], busy=busy)
    s.finished(TicketId(name), Finish(True, cached, 900 - cached, 10, 0.5), now + 1.5)
    look(s, now + 2.0, *[(each.tokens, 0) for each in s.snapshot(now).slots])
    return slot


@pytest.mark.parametrize(("first", "second"), [(Form.CHAT, Form.RENDERED), (Form.TEXT, Form.TOKENS)])
def test_what_came_in_another_form_is_gone_to_see_as_long_as_that_finds_some(first: Form, second: Form) -> None:
    s = ready((0, -1), (0, -1), fork=False)
    assert came(s, "a", first, 10.0, 0) is not None
    for n in range(20):
        assert came(s, f"found {n}", (second, first)[n % 2], 20.0 + 10 * n, 600) is None, n
    lost = [came(s, f"lost {n}", (second, first)[n % 2], 300.0 + 10 * n, 0) for n in range(2 * TRIES + 1)]
    assert [slot is None for slot in lost] == [True] * 2 * TRIES + [False]


def test_text_of_another_kind_than_a_chat_is_not() -> None:
    s = ready((0, -1), (0, -1), fork=False)
    for n in range(6):
        assert came(s, f"{n}", (Form.CHAT, Form.TEXT)[n % 2], 10.0 + 10 * n, 0) is not None
