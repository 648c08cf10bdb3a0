"""A scheduler that finds slots by an index and one that looks at every slot do the same, whatever happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp2, isclose
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from schedule_sim import FULL, SimServer, facts, words
from test_schedule_machine import Machine

from prefixproxy.prefix import blocks_within
from prefixproxy.schedule import cheapest as schedule_cheapest
from prefixproxy.schedule.cheapest import cheapest_places
from prefixproxy.schedule.fleet import Fleet
from prefixproxy.schedule.index import Index, Shelf
from prefixproxy.schedule.park import is_parked
from prefixproxy.schedule.place import Placement
from prefixproxy.schedule.plan import Decision, Group, Hold, Server, Standing
from prefixproxy.schedule.queue import Waiting
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slot import Held, Slot
from prefixproxy.schedule.slots import REUSE_CHANCE, REUSE_HALF_LIFE_S, Upstream
from prefixproxy.schedule.tree import Row
from prefixproxy.schedule.types import Effect, Policy, Ticket
from prefixproxy.schedule.waits import Waits
from prefixproxy.simulate.run import Request, Simulation
from prefixproxy.simulate.synthetic import Workload, synthetic
from prefixproxy.simulate.text import BYTES_PER_TOKEN, starts_of
from prefixproxy.types import TicketId, UpstreamFacts

CAN = replace(FULL, host_cache=False)
"""The server's own cache is counted on in small fleets alone (decision 0026)."""


@dataclass(frozen=True)
class Load:
    workload: Workload
    seed: int
    n_slots: int
    n_servers: int
    rate: float
    prefill_rate: float = 2000.0
    kv_bytes: int = 20_000
    rollback: bool = True
    side_slots: int = 0
    fork: bool = True
    policy: str = "cost"
    max_snapshots: int = 8


LOADS = st.builds(
    Load,
    st.sampled_from(["mixed", "mixed", "fanout", "conversations"]),
    st.integers(0, 1 << 16),
    st.integers(1, 7),
    st.integers(1, 4),
    st.sampled_from([0.2, 1.0, 4.0, 10.0]),
    st.sampled_from([300.0, 2000.0, 20_000.0]),
    st.sampled_from([500, 50_000]),
    st.sampled_from([True, True, False]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([True, True, True, False]),
    st.sampled_from(["cost", "cost", "fifo"]),
    st.sampled_from([2, 8, 64]),
)


class Watched(Simulation):
    """Remembers what it was told to do, and when."""

    def __init__(self, servers: Sequence[SimServer], scheduler: Scheduler) -> None:
        self.told: list[tuple[float, Effect]] = []
        super().__init__(servers, scheduler=scheduler)

    def apply(self, effects: Sequence[Effect]) -> None:
        self.told += [(self.now, effect) for effect in effects]
        super().apply(effects)
        if len(self.told) % 8 == 0:
            check_index(self.scheduler)


def check_index(scheduler: Scheduler) -> None:
    """What is known of each idle slot is what a fresh look finds."""
    fleet = scheduler._fleet
    index = fleet.index(scheduler._policy)
    if index is None:
        return
    for server in fleet.up():
        for slot in server.slots.slots:
            row = index._rows[slot.number]
            assert row.blocks == slot.held.chain.hashes
            assert row.idle == (slot.idle and slot.promised is None)
            if row.idle:
                assert row.deep == server.slots.counts.deepest(slot.held.chain, holders=2)
                assert row.parked == is_parked(server, slot)
                check_keys(server, slot, row)


def check_keys(server: Server, slot: Slot, row: Row) -> None:
    """At each node the key says what a prompt that shares so much with the slot destroys there."""
    now = slot.last_used
    for node in row.node.up():
        if node.parent is None and not slot.held.tokens:
            continue  # such slots are kept apart
        nothing = row.parked or node.end == len(row.blocks)  # or hardly anything: whatever ends there has all of it
        lost_s = 0.0 if nothing else server.slots.lost_s(slot, node.end, 1000.0, now)
        known_s = exp2(node.idle[slot.number] - now / REUSE_HALF_LIFE_S) * REUSE_CHANCE / 1000.0
        assert isclose(known_s, lost_s, rel_tol=1e-6, abs_tol=1e-9), (slot, node.end)


def play(load: Load, fleet: Fleet, n: int) -> list[tuple[float, Effect]]:
    """What a scheduler orders for `n` requests, some of whose clients leave."""
    dice = random.Random(load.seed)
    policy = Policy(
        fork=load.fork,
        side_slots=load.side_slots,
        queue_limit=24,
        max_snapshots=load.max_snapshots,
        policy=load.policy,  # type: ignore[arg-type]
    )
    servers = [
        SimServer(
            UpstreamFacts(f"u{i}", "llama-server", load.n_slots, capabilities=CAN),
            rate=load.prefill_rate * (1 + i % 2),
            rollback=load.rollback,
            ram_tokens=20_000,
            kv_bytes=load.kv_bytes,
        )
        for i in range(load.n_servers)
    ]
    sim = Watched(servers, Scheduler(policy, fleet))
    for arrival in synthetic(load.workload, n, load.rate, dice):
        ticket = Ticket(
            TicketId(str(arrival.key)),
            arrival.prompt.chain(),
            blocks_within(BYTES_PER_TOKEN * arrival.head),
            arrival.family,
            len(arrival.prompt),
            arrival.time,
            arrival.time + dice.choice([5.0, 600.0]),
            side=arrival.side,
            priority=arrival.priority,
            reuse=dice.random() > 0.03,
            wanted_slot=dice.choice([None] * 40 + [0]),
            starts=starts_of(arrival.prompt.chain(), arrival.head),
        )
        request = Request(arrival.prompt, arrival.answer, ticket, arrival.head)
        sim.submit(arrival.time, request)
        if dice.random() < 0.1:
            sim.cancel(arrival.time + dice.choice([0.1, 2.0, 8.0]), request)
    sim.run()
    return sim.told


def check(load: Load, n: int = 60) -> None:
    indexed, looked = play(load, Fleet(few_slots=0), n), play(load, Fleet(few_slots=1 << 30), n)
    for mine, its in zip(indexed, looked, strict=False):
        assert mine == its
    assert len(indexed) == len(looked)


def check_all(loads: Sequence[Load], n: int) -> None:
    for load in loads:
        check(load, n)
        check_holds(load, n)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(LOADS)
def test_a_load_is_served_the_same(load: Load) -> None:
    check(load)


def check_holds(load: Load, n: int) -> None:
    """Whoever is held without a look is held for the very reason a whole look finds."""
    stands, held_anyway = Waits.stands, Waits.held_anyway

    def compare(place: Waits, waiting: Waiting, hold: Hold) -> None:
        assert isinstance(place, Placement)
        bound_for = dict(place.bound_for)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Waits, "held_anyway", lambda waits, waiting, servers: None)
            found = place._decide(waiting)
        place.bound_for.clear()
        place.bound_for.update(bound_for)
        assert isinstance(found, Hold)
        assert (found.reason, found.until) == (hold.reason, hold.until)

    def compared_stands(place: Waits, waiting: Waiting) -> bool:
        if not stands(place, waiting):
            return False
        assert waiting.standing is not None
        compare(place, waiting, waiting.standing)
        return True

    def compared_anyway(place: Waits, waiting: Waiting, servers: Group) -> Hold | None:
        hold = held_anyway(place, waiting, servers)
        if hold is not None:
            compare(place, waiting, hold)
        return hold

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Waits, "stands", compared_stands)
        patch.setattr(Waits, "held_anyway", compared_anyway)
        play(load, Fleet(few_slots=0), n)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(LOADS)
def test_a_hold_stands_as_long_as_a_look_finds_it(load: Load) -> None:
    check_holds(load, 80)


def test_most_holds_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the looks at those who wait on many servers, few are whole ones, but for those who want a certain slot."""
    whole, stood = [], []
    decide, stands = Placement.decide, Waits.stands

    def counting(place: Placement, waiting: Waiting) -> Decision:
        whole.append(waiting.decided is not None and waiting.ticket.wanted_slot is None)
        return decide(place, waiting)

    def standing(place: Waits, waiting: Waiting) -> bool:
        stood.append(stands(place, waiting))
        return stood[-1]

    monkeypatch.setattr(Placement, "decide", counting)
    monkeypatch.setattr(Waits, "stands", standing)
    play(Load("mixed", 3, 4, 12, 6.0, 800.0, 50_000), Fleet(few_slots=0), 600)
    assert sum(stood) > 2 * sum(whole) > 0


class Twin:
    """Two schedulers that are told the same; what one orders the other has to order too."""

    def __init__(self) -> None:
        self.indexed, self.looking = Scheduler(fleet=Fleet(few_slots=0)), Scheduler(fleet=Fleet(few_slots=1 << 30))

    def __repr__(self) -> str:
        return repr(self.indexed)

    def upstream_up(self, facts: UpstreamFacts, *more: object) -> object:
        """A large fleet does not count on a server's RAM cache, whatever is seen of one."""
        without = replace(facts.capabilities, host_cache=False)
        return self.__getattr__("upstream_up")(replace(facts, capabilities=without), *more)

    def __getattr__(self, name: str) -> Callable[..., object]:
        def both(*arguments: object) -> object:
            mine, its = (getattr(each, name)(*arguments) for each in (self.indexed, self.looking))
            assert mine == its
            return mine

        return both


class TwinMachine(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.w.s = Twin()  # type: ignore[assignment]


def test_any_events_are_answered_the_same() -> None:
    search = settings(max_examples=6, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(TwinMachine, settings=search)


def forgets_who_is_alone_now(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "_note_sole", lambda slots, chain, start=0: None)


def takes_the_first_that_is_cheap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule_cheapest._Search, "look_at_all", lambda search, keys, cost_s: None)


def copies_nowhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule_cheapest._Search, "forks", lambda search: None)


def overlooks_blank_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule_cheapest._Search, "blanks", lambda search: None)


def ignores_what_is_shared(patch: pytest.MonkeyPatch) -> None:
    key = Row.key
    patch.setattr(Row, "key", lambda row, end: key(row, 0) if end < len(row.blocks) else key(row, end))


def ignores_what_others_hold(patch: pytest.MonkeyPatch) -> None:
    key = Row.key
    patch.setattr(Row, "key", lambda row, end: key(replace(row, deep=0), end))


def holds_whatever_changes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Waits, "_is_harmless", lambda waits, change, why, ticket: True)


def takes_any_lease_for_that_one(patch: pytest.MonkeyPatch) -> None:
    why = Waits._why

    def of_now(waits: Waits, *arguments: Any) -> Standing:
        found = why(waits, *arguments)
        found.turn = ANY
        return found

    patch.setattr(Waits, "_why", of_now)


def forgets_what_it_waits_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Waits, "_still", lambda waits, why, ticket: True)


def overlooks_copies_elsewhere(patch: pytest.MonkeyPatch) -> None:
    at_most = Waits._at_most
    patch.setattr(Waits, "_at_most", lambda waits, ticket: (at_most(waits, ticket)[0], frozenset()))


def takes_no_place_for_cheaper(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Waits, "_at_most", lambda waits, ticket: (0, frozenset()))


def does_not_follow_slots(patch: pytest.MonkeyPatch) -> None:
    put = Shelf.put
    patch.setattr(Shelf, "put", lambda shelf, row: put(shelf, row) if row.slot.number not in shelf.keys else None)


def measures_once(patch: pytest.MonkeyPatch) -> None:
    measure = Index._measure

    def once(index: Index, number: int) -> None:
        if number not in index._measures:
            measure(index, number)

    patch.setattr(Index, "_measure", once)


FIXED = [
    Load("mixed", seed, slots, servers, rate, prefill, kv_bytes)
    for seed, slots, servers, rate, prefill, kv_bytes in [
        (1, 3, 2, 1.0, 2000.0, 50_000),
        (2, 6, 1, 2.0, 2000.0, 500),
        (3, 2, 4, 4.0, 300.0, 50_000),
        (4, 7, 1, 10.0, 20_000.0, 50_000),
        (5, 5, 3, 1.0, 300.0, 500),
        (6, 7, 2, 0.2, 300.0, 50_000),
    ]
] + [Load("fanout", 94, 4, 1, 4.0, 300.0, 500)]
PLANTED = [
    forgets_who_is_alone_now,
    takes_the_first_that_is_cheap,
    copies_nowhere,
    overlooks_blank_slots,
    ignores_what_is_shared,
    ignores_what_others_hold,
    holds_whatever_changes,
    takes_any_lease_for_that_one,
    forgets_what_it_waits_for,
    overlooks_copies_elsewhere,
    takes_no_place_for_cheaper,
    does_not_follow_slots,
    measures_once,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError, StopIteration)):
        check_all(FIXED, 80)


def test_few_of_many_slots_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand slots: what is looked at does not grow with them."""
    priced: list[int] = []

    def counting(*arguments: object) -> object:
        places = cheapest_places(*arguments)  # type: ignore[arg-type]
        priced.append(len(places))
        return places

    monkeypatch.setattr("prefixproxy.schedule.place.cheapest_places", counting)
    play(Load("mixed", 1, 1000, 1, 100.0, 200_000.0), Fleet(), 600)
    assert len(priced) > 500
    assert sorted(priced)[int(0.95 * len(priced))] < 80


def test_slots_that_change_at_once_are_priced_by_what_they_hold_now() -> None:
    """One leaves a node that another one splits."""
    fleet, policy = Fleet(few_slots=0), Policy()
    upstream = fleet.obtain(facts(n_slots=3)).slots
    upstream.open(0.0, {})
    for slot in upstream.slots:
        upstream.drained(slot, 0, 0.0)
    fleet.changed()
    one, other = (words("root", 640) + words(name, 640) for name in "ab")
    for slot in upstream.slots[1:]:
        upstream.hold(slot, Held(one.chain(), 1280, 1300))
    assert fleet.index(policy) is not None
    upstream.hold(upstream.slots[0], Held(other.chain(), 1280, 1300))
    upstream.forget(upstream.slots[1])
    index = fleet.index(policy)
    assert index is not None
    assert [slot.id.slot for slot in index.tree.path(one.chain().hashes)[-1][1].slots()] == [2]
