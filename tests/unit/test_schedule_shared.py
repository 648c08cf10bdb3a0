"""Others may use the same server: a slot that came free may be theirs already, and stays so until it was looked at."""

from __future__ import annotations

from collections.abc import Sequence

from prefixproxy.prefix import chain_of
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import Effect, Finish, Grant, HoldReason, Poll, Reason, SlotSeen, Ticket
from prefixproxy.types import Capabilities, SlotId, TicketId, UpstreamFacts

PIN = Capabilities(pin=True, observe=True, reports_cached=True)
SHARED = UpstreamFacts("u", "llama-server", 2, capabilities=PIN, shared=True)
DONE = Finish(ok=True, cached_tokens=0, evaluated_tokens=100, predicted_tokens=1, prompt_s=1.0)
IDLE, BUSY = SlotSeen(busy=False, n_tokens=100), SlotSeen(busy=True)


def ticket(name: str, now: float) -> Ticket:
    chain = chain_of([name.encode() * 400])
    return Ticket(TicketId(name), chain, 0, name, 100, arrived=now, deadline=now + 600, warmable=False)


def up(facts: UpstreamFacts = SHARED) -> Scheduler:
    s = Scheduler()
    s.upstream_up(facts, 0.0)
    s.slots_seen("u", {0: SlotSeen(False, 0), 1: SlotSeen(False, 0)}, 0.1, 0.05)
    return s


def grants(effects: Sequence[Effect]) -> list[tuple[str, SlotId | None]]:
    return [(effect.ticket_id, effect.slot) for effect in effects if isinstance(effect, Grant)]


def full_with_one_waiting(s: Scheduler) -> SlotId:
    """Two run, one waits; then the first of them ends. Its slot."""
    effects = s.submit([ticket("a", 1.0), ticket("b", 1.0), ticket("c", 1.0)], 1.0)
    (_, slot), _ = grants(effects)
    assert slot is not None
    for name in ("a", "b"):
        s.first_token(TicketId(name), 1.5)
    return slot


def test_a_slot_freed_while_all_were_busy_is_looked_at_first() -> None:
    s = up()
    slot = full_with_one_waiting(s)
    effects = s.finished(TicketId("a"), DONE, 2.0)
    assert grants(effects) == []
    assert Poll("u") in effects
    seen = {slot.slot: IDLE, 1 - slot.slot: BUSY}
    assert grants(s.slots_seen("u", seen, 2.01, 2.005)) == [("c", slot)]


def test_nobody_else_knows_the_address_of_our_own_engine() -> None:
    s = up(UpstreamFacts("u", "llama-server", 2, capabilities=PIN))
    slot = full_with_one_waiting(s)
    assert grants(s.finished(TicketId("a"), DONE, 2.0)) == [("c", slot)]


def test_a_freed_slot_that_others_got_is_theirs_and_we_queue_up_behind_them() -> None:
    s = up()
    slot = full_with_one_waiting(s)
    s.finished(TicketId("a"), DONE, 2.0)
    effects = s.slots_seen("u", {0: BUSY, 1: BUSY}, 2.01, 2.005)
    assert grants(effects) == [("c", None)]
    (grant,) = [effect for effect in effects if isinstance(effect, Grant)]
    assert grant.reason is Reason.FOREIGN
    view = s.snapshot(2.01).upstreams[0]
    assert view.unpinned_because == "another client uses this upstream"
    assert slot is not None


def test_what_the_freed_slot_holds_is_known_again_after_the_look() -> None:
    s = up()
    slot = full_with_one_waiting(s)
    s.cancel(TicketId("c"), 1.9)
    s.finished(TicketId("a"), DONE, 2.0)
    s.slots_seen("u", {slot.slot: IDLE, 1 - slot.slot: BUSY}, 2.01, 2.005)
    assert {row.id: row.tokens for row in s.snapshot(2.01).slots}[slot] == 100


def test_after_others_were_seen_every_pin_waits_for_a_look() -> None:
    s = up()
    s.slots_seen("u", {0: BUSY, 1: IDLE}, 1.0, 0.95)
    s.slots_seen("u", {0: IDLE, 1: IDLE}, 2.0, 1.95)
    effects = s.submit([ticket("a", 60.0)], 60.0)
    assert grants(effects) == []
    assert Poll("u") in effects
    assert s.snapshot(60.0).waiting[0].hold is HoldReason.LOOKING
    granted = grants(s.slots_seen("u", {0: BUSY, 1: IDLE}, 60.01, 60.005))
    assert granted == [("a", None)], "seen again: not pinned at all"
    quiet = s.submit([ticket("b", 200.0)], 200.0)
    assert grants(quiet) == []


def test_a_look_that_never_comes_is_asked_for_again() -> None:
    s = up()
    s.slots_seen("u", {0: BUSY, 1: IDLE}, 1.0, 0.95)
    s.slots_seen("u", {0: IDLE, 1: IDLE}, 2.0, 1.95)
    s.submit([ticket("a", 60.0)], 60.0)
    wake = s.next_wake()
    assert wake is not None
    assert wake < 60.5
    assert Poll("u") in s.tick(wake)
