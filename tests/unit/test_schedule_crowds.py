"""Several upstreams: what is under way on one is waited for by no more tickets than it has slots, as long as another
one has room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from schedule_sim import FULL, Sim, SimServer, facts, request, words

from prefixproxy.schedule.fleet import Fleet
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import Effect, Grant, HoldReason, Policy, SlotSeen, Ticket, Warm
from prefixproxy.simulate.run import Request
from prefixproxy.types import TicketId

ROOT, OTHER = words("briefing", 2500), words("another one", 2500)
FLEETS = pytest.mark.parametrize("few_slots", [1 << 20, 0], ids=["looked at", "indexed"])


def ready(names: Sequence[str], n_slots: int, few_slots: int) -> Scheduler:
    s = Scheduler(Policy(park=False), Fleet(few_slots=few_slots))
    for name in names:
        s.upstream_up(facts(name, n_slots=n_slots, capabilities=FULL), -1.0)
        s.slots_seen(name, {i: SlotSeen(False, 0) for i in range(n_slots)}, -0.1, -0.1)
    return s


def lanes(n: int, root: object = ROOT, first: int = 0) -> list[Ticket]:
    made = [request(root, words(f"lane {i}", 40)).ticket for i in range(first, first + n)]  # type: ignore[arg-type]
    return [replace(ticket, id=TicketId(f"{i:02d}")) for i, ticket in enumerate(made, first)]


def warmed_on(effects: Sequence[Effect]) -> list[str]:
    return [effect.slot.upstream for effect in effects if isinstance(effect, Warm)]


@FLEETS
def test_a_fan_out_that_fits_into_one_upstream_evaluates_its_root_once(few_slots: int) -> None:
    s = ready("uvw", 4, few_slots)
    s.submit(lanes(4), 0.0)
    assert warmed_on(s.tick(0.03)) == ["u"]
    assert [waiting.hold for waiting in s.snapshot(0.03).waiting] == [HoldReason.WARMING] * 4


@FLEETS
def test_a_larger_one_evaluates_it_on_as_many_upstreams_as_it_fills(few_slots: int) -> None:
    s = ready("uvw", 4, few_slots)
    effects = s.submit(lanes(10), 0.0)
    for now in (0.03, 0.06, 0.09):
        effects += s.tick(now)
    assert warmed_on(effects) == ["u", "v", "w"]


@FLEETS
def test_where_no_other_upstream_has_room_they_wait_for_the_one(few_slots: int) -> None:
    s = ready("u", 4, few_slots)
    effects = s.submit(lanes(10), 0.0)
    for now in (0.03, 0.06, 0.09):
        effects += s.tick(now)
    assert warmed_on(effects) == ["u"]
    assert Counter(waiting.hold for waiting in s.snapshot(0.1).waiting) == {HoldReason.WARMING: 10}


@FLEETS
def test_another_root_is_warmed_on_an_upstream_that_warms_none(few_slots: int) -> None:
    s = ready("uvw", 4, few_slots)
    effects = s.submit(lanes(2), 0.0) + s.tick(0.03) + s.submit(lanes(2, OTHER, first=5), 0.04) + s.tick(0.07)
    assert warmed_on(effects) == ["u", "v"]


@FLEETS
def test_a_conversation_stays_where_it_is_cached_though_others_wait_for_slots_there(few_slots: int) -> None:
    """The slot that holds it is worth more than room elsewhere."""
    sim = Sim([SimServer(facts(name), rate=200.0) for name in "uv"], scheduler=ready("", 0, few_slots))
    talk = words("a conversation", 2000)
    first, turn = (request(talk, words(f"turn {i}", 20)) for i in range(2))
    crowd: list[Request] = [request(ROOT, words(f"lane {i}", 40)) for i in range(5)]
    sim.submit(0.0, first)
    sim.submit(60.0, *crowd)
    sim.submit(61.0, turn)
    sim.run()
    where = {effect.ticket_id: effect.upstream for effect in sim.effects if isinstance(effect, Grant)}
    assert where[first.ticket.id] == where[turn.ticket.id]
    assert turn.cached >= 2000
    assert {where[lane.ticket.id] for lane in crowd} == {"u", "v"}
