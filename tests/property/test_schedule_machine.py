"""The scheduler under every event in any order, against servers that keep their own idea of who is busy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from schedule_world import FACTS, Look, Sent, World

from prefixproxy.prefix import blocks_within, chain_of
from prefixproxy.schedule import look as schedule_look
from prefixproxy.schedule import park as schedule_park
from prefixproxy.schedule import scheduler as schedule
from prefixproxy.schedule import work as schedule_work
from prefixproxy.schedule.queue import Queue
from prefixproxy.schedule.roots import RootTable
from prefixproxy.schedule.run import Running
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slot import Slot
from prefixproxy.schedule.slots import Upstream
from prefixproxy.schedule.types import (
    Decode,
    Effect,
    Finish,
    HoldReason,
    Policy,
    Restore,
    Save,
    Share,
    SlotView,
    Ticket,
    WaitingView,
)
from prefixproxy.types import Priority, SlotId, SlotState, TicketId

ROOTS = [bytes([65 + i]) * n for i, n in enumerate((4000, 2500, 90))]
BRIEFINGS = [b"", b"x" * 1500]
UPSETS = ["tune", "rekey", "lose", "regain"]
Draw = Callable[[Any], Any]


class Machine(RuleBasedStateMachine):
    """Rules are events; the world checks every effect, the invariants check the state after each rule."""

    kinds: Sequence[str] = [""] * 5 + ["unpinnable", "several", "client slot", "side", "cold", "no reuse", "empty"]

    def __init__(self) -> None:
        super().__init__()
        self.w = World()
        self.numbers = count()

    # time

    @initialize(names=st.sampled_from([["full"], ["full"], ["pin"], ["counted"], ["full", "pin"], ["full", "counted"]]))
    def come_up(self, names: list[str]) -> None:
        for name in names:
            self.regain(name)
            if FACTS[name].capabilities.observe:
                self.w.look_now(name)

    def regain(self, name: str) -> None:
        self.w.up.add(name)
        self.w.known.add(name)
        self.w.do(self.w.s.upstream_up(FACTS[name], self.w.now))

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.02, 0.1, 0.3, 2.0, 40.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        """Never past a wake-up without ticking."""
        end = self.w.now + seconds
        for _ in range(200):
            wake = self.w.s.next_wake()
            if wake is None or wake > end:
                break
            assert wake > self.w.now
            self.w.move_to(wake)
        else:
            # looks that nobody delivers are asked for again and again; anything else must come to rest
            assert self.w.asked, "busy loop of wake-ups"
        self.w.move_to(max(self.w.now, end))

    # tickets

    @rule(data=st.data(), n=st.integers(1, 4))
    def arrive(self, data: st.DataObject, n: int) -> None:
        tickets = [self.ticket(data.draw) for _ in range(n)]
        for ticket in tickets:
            self.w.tickets[ticket.id], self.w.state[ticket.id] = ticket, "waiting"
        self.w.do(self.w.s.submit(tickets, self.w.now))

    def ticket(self, draw: Draw) -> Ticket:
        root = ROOTS[draw(st.sampled_from([0, 0, 0, 1, 1, 2]))]
        chain = chain_of([root, BRIEFINGS[draw(st.integers(0, 1))], b"lane %d" % draw(st.integers(0, 5)) * 12])
        odd = draw(st.sampled_from(self.kinds))
        if odd == "empty":
            root, chain = b"", chain_of([])
        return Ticket(
            TicketId(f"t{next(self.numbers)}"),
            chain,
            blocks_within(len(root)),
            family=root[:1].decode(),
            n_tokens=max(1, chain.n_bytes // 4),
            arrived=self.w.now,
            deadline=self.w.now + draw(st.sampled_from([600.0, 600.0, 600.0, 1.0])),
            model=draw(st.sampled_from(["", "", "", "pin-model", "counted-model", "unheard-of"])),
            tenant=draw(st.sampled_from(["", "", "a", "b"])),
            priority=draw(st.sampled_from([Priority.INTERACTIVE, Priority.INTERACTIVE, Priority.BATCH])),
            side=odd == "side",
            wanted_slot=draw(st.integers(-1, 7)) if odd == "client slot" else None,
            pinnable=odd != "unpinnable",
            warmable=odd not in ("cold", "no reuse"),
            reuse=odd != "no reuse",
            n_seqs=draw(st.integers(2, 4)) if odd == "several" else 1,
        )

    @precondition(lambda self: self.w.those("waiting"))
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.w.those("waiting")))
        self.w.state[ticket] = "gone"
        self.w.do(self.w.s.cancel(ticket, self.w.now))

    # requests at the servers

    def those(self, *, arrived: bool | None = None, abandoned: bool = False, work: bool | None = None) -> list[Sent]:
        return [
            sent
            for sent in self.w.sent
            if sent.abandoned is abandoned and arrived in (None, sent.arrived) and work in (None, sent.work is not None)
        ]

    @precondition(lambda self: self.w.sent)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """The usual next thing for one, or for all that are there now."""
        chosen = data.draw(st.sampled_from([None, *range(len(self.w.sent))]))
        for sent in list(self.w.sent) if chosen is None else [self.w.sent[chosen]]:
            self.w.step(sent)

    @precondition(lambda self: self.w.sent)
    @rule()
    def calm(self) -> None:
        """The usual next things, until warm-ups and copies are over."""
        for _ in range(12):
            if not any(sent.work for sent in self.w.sent) and not self.w.those("waiting"):
                return
            for sent in list(self.w.sent):
                self.w.step(sent)
            for name in sorted(self.w.asked):
                self.w.look_now(name)
            self.w.move_to(self.w.now + 0.03)

    @precondition(lambda self: any(not sent.arrived for sent in self.w.sent))
    @rule(data=st.data())
    def reach_server(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from([sent for sent in self.w.sent if not sent.arrived]))
        self.w.reach(sent, lambda idle: data.draw(st.permutations(idle)))

    @precondition(lambda self: self.those(arrived=True, work=False))
    @rule(data=st.data(), headers_only=st.booleans())
    def first_token(self, data: st.DataObject, headers_only: bool) -> None:
        sent = data.draw(st.sampled_from(self.those(arrived=True, work=False)))
        assert sent.ticket is not None
        sent.sampled += not headers_only
        event = self.w.s.started if headers_only else self.w.s.first_token
        self.w.do(event(sent.ticket, self.w.now))

    @precondition(lambda self: self.those(arrived=True, work=False))
    @rule(
        data=st.data(),
        ok=st.booleans(),
        cached=st.sampled_from([None, 0, 500, 1000]),
        predicted=st.sampled_from([1, 3, 10]),
    )
    def answer(self, data: st.DataObject, ok: bool, cached: int | None, predicted: int) -> None:
        self.w.end(data.draw(st.sampled_from(self.those(arrived=True, work=False))), ok, cached, predicted)

    @precondition(lambda self: self.those(arrived=True, work=False))
    @rule(data=st.data())
    def answer_on_its_way(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.those(arrived=True, work=False)))
        if not sent.over:
            self.w.answered(sent)

    @precondition(lambda self: self.those(work=False))
    @rule(data=st.data(), stopped=st.booleans())
    def disconnect(self, data: st.DataObject, stopped: bool) -> None:
        """Our side ends; the server's goes on for a while. A request on its way is stopped, or gets there yet; one that
        waits there for several slots is dropped (server_queue::cleanup_pending_task)."""
        sent = data.draw(st.sampled_from(self.those(work=False)))
        assert sent.ticket is not None
        self.w.state[sent.ticket], sent.abandoned = "done", True
        self.w.leave_copies(sent)
        if sent.pin is None:
            self.w.haunted_until = self.w.now + 0.25
        if not sent.arrived and (stopped or sent.need > 1):
            self.w.sent.remove(sent)
        self.w.do(self.w.s.finished(sent.ticket, Finish(ok=False, confirmed_idle=False), self.w.now))

    @precondition(lambda self: self.those(arrived=True, work=True))
    @rule(data=st.data(), answered=st.booleans())
    def work_fails(self, data: st.DataObject, answered: bool) -> None:
        """With an error, or without any answer, though the server may still be at it."""
        sent = data.draw(st.sampled_from(self.those(arrived=True, work=True)))
        if answered:
            self.w.answer(sent, ok=False)
        else:
            sent.abandoned = True
            if isinstance(sent.work, Decode):  # given up for good
                self.w.copied(sent)

    # looks and strangers

    @precondition(lambda self: self.w.observed())
    @rule(data=st.data(), late=st.booleans())
    def look(self, data: st.DataObject, late: bool) -> None:
        name = data.draw(st.sampled_from(self.w.observed()))
        if late:
            self.time_passes(0.001)
            self.w.looks.append(Look(name, self.w.now, self.w.read(name)))
        else:
            self.w.look_now(name)

    @precondition(lambda self: self.w.looks)
    @rule(data=st.data())
    def late_look_arrives(self, data: st.DataObject) -> None:
        self.w.deliver(self.w.looks.pop(data.draw(st.integers(0, len(self.w.looks) - 1))))

    @precondition(lambda self: self.w.observed())
    @rule(data=st.data())
    def stranger(self, data: st.DataObject) -> None:
        """Comes to a slot that nothing of ours is on its way to (that race no proxy can win), or leaves. What is new
        while it is open where one of ours is may be either."""
        name = data.draw(st.sampled_from(self.w.observed()))
        coming = [sent.pin for sent in self.w.sent if sent.upstream == name and not sent.arrived]
        slots = [SlotId(name, i) for i in range(FACTS[name].n_slots) if i not in coming]
        slots = [slot for slot in slots if not self.w.on(slot, over=True) and not self.w.unlocated(name)]
        if not slots:
            return
        slot = data.draw(st.sampled_from(slots))
        if slot in self.w.foreign:
            self.w.leave(slot)
        else:
            self.w.take(slot, foreign=False)
            self.w.look_now(name)

    @precondition(lambda self: "full" in self.w.up)
    @rule(data=st.data())
    def stranger_waits(self, data: st.DataObject) -> None:
        """Every slot runs something, others of ours wait, and somebody else's request waits in the server."""
        n_slots = FACTS["full"].n_slots
        tickets = [replace(self.ticket(data.draw), warmable=False, n_seqs=1) for _ in range(n_slots + 1)]
        for ticket in tickets:
            self.w.tickets[ticket.id], self.w.state[ticket.id] = ticket, "waiting"
        self.w.do(self.w.s.submit(tickets, self.w.now))
        for sent in [sent for sent in self.w.sent if not sent.arrived]:
            self.w.reach(sent)
        ours = not any(sent.pin is None or isinstance(sent.work, Save | Restore) for sent in self.w.sent)
        if ours and all(self.w.busy(SlotId("full", i)) for i in range(n_slots)):
            self.w.strangers["full"] = self.w.strangers.get("full", 0) + 1

    # what happens rarely

    @rule(data=st.data(), what=st.sampled_from(UPSETS))
    def upset(self, data: st.DataObject, what: str) -> None:
        down, waiting = sorted(set(FACTS) - self.w.up), self.w.those("waiting")
        if what == "tune":
            self.tune(data.draw)
        elif what == "rekey" and waiting:
            old, new = self.w.tickets[data.draw(st.sampled_from(waiting))], self.ticket(data.draw)
            ticket = replace(old, chain=new.chain, head_blocks=new.head_blocks, n_tokens=new.n_tokens)
            self.w.tickets[ticket.id] = ticket
            self.w.do(self.w.s.rekey(ticket, self.w.now))
        elif what == "lose" and self.w.up:
            self.w.lose(data.draw(st.sampled_from(sorted(self.w.up))))
        elif what == "regain" and len(self.w.up) < 2:
            self.regain(data.draw(st.sampled_from(down)))

    def tune(self, draw: Draw) -> None:
        self.w.policy = Policy(
            fork=draw(st.booleans()),
            root_threshold_s=draw(st.sampled_from([0.5, 0.5, 0.0])),
            max_concurrency=draw(st.sampled_from([0, 0, 1, 2])),
            side_slots=draw(st.sampled_from([0, 0, 1])),
            queue_limit=draw(st.sampled_from([256, 256, 4])),
            policy=draw(st.sampled_from(["cost", "cost", "fifo"])),
            max_snapshots=draw(st.integers(1, 2)),
            shares=draw(st.sampled_from([{}, {}, {"a": Share(2.0, 4)}, {"a": Share(1.0, 4), "b": Share(0.5, 5)}])),
        )
        self.w.do(self.w.s.set_policy(self.w.policy, self.w.now))

    # invariants

    @invariant()
    def slots_add_up(self) -> None:
        """S1, S3."""
        snapshot = self.w.s.snapshot(self.w.now)
        for name in FACTS:
            rows = [slot.id.slot for slot in snapshot.slots if slot.id.upstream == name]
            assert rows == (list(range(FACTS[name].n_slots)) if name in self.w.up else [])
        granted, waiting = set(self.w.those("granted")), self.w.those("waiting")
        assert snapshot.running == len(granted)
        assert {w.id for w in snapshot.waiting} == set(waiting)
        assert sum(snapshot.queue_depth.values()) == len(waiting)
        leased = [slot.ticket for slot in snapshot.slots if slot.state is SlotState.LEASED]
        assert set(leased) <= granted
        assert all(t and (leased.count(t) == 1 or self.w.tickets[t].n_seqs > 1) for t in leased)
        files = [(root.upstream, root.file) for root in snapshot.roots if root.file]
        assert len(files) == len(set(files))

    @invariant()
    def idle_is_known_idle(self) -> None:
        """S2 before anything goes wrong: what is called idle is idle at the server too."""
        for row in self.w.s.snapshot(self.w.now).slots:
            if row.state is SlotState.IDLE and FACTS[row.id.upstream].capabilities.observe:
                for sent in self.w.on(row.id):
                    assert sent.pin is None, f"{row} is busy with {sent}"
                    assert not sent.abandoned, f"{row} is still busy with {sent}"

    @invariant()
    def runs_where_it_is_said_to(self) -> None:
        """S8, where the server shows which task was in a slot last."""
        for sent in self.those(work=False):
            where = None if sent.ticket is None else self.w.s.slot_of(sent.ticket)
            if sent.upstream == "full" and sent.pin is None and where is not None:
                assert where.slot in sent.slots, f"{sent} is said to be in {where}"

    @invariant()
    def bounded(self) -> None:
        """S6."""
        waiting, wake = self.w.those("waiting"), self.w.s.next_wake()
        assert len(waiting) <= self.w.policy.queue_limit
        assert all(self.w.tickets[ticket].deadline > self.w.now - 0.01 for ticket in waiting)
        assert wake is not None or not waiting

    @invariant()
    def waits_for_a_reason(self) -> None:
        """S5."""
        snapshot = self.w.s.snapshot(self.w.now)
        for waiting in snapshot.waiting:
            assert waiting.until is None or waiting.until > self.w.now - 0.01
            self.check_hold(waiting, snapshot.slots)

    def check_hold(self, waiting: WaitingView, slots: tuple[SlotView, ...]) -> None:
        ticket, states = self.w.tickets[waiting.id], {slot.state for slot in slots}
        idle = [s for s in slots if s.state is SlotState.IDLE and s.ticket is None]
        served = self.w.serving(ticket)
        choosing = any(s.pin is None for s in self.w.sent) or self.w.now < self.w.haunted_until
        holds = {
            # slots were kept for one further back in line, which went without a slot in the same look
            HoldReason.NO_SLOT: self.w.policy.side_slots > 0
            or choosing
            or all(sum(s.id.upstream == name for s in idle) < self.needs(ticket, name) for name in served),
            HoldReason.OVERTAKEN: not idle,
            HoldReason.WARMING: SlotState.RESERVED in states and waiting.until,
            HoldReason.RESTORING: SlotState.RESERVED in states and waiting.until,
            HoldReason.LEADER: states & {SlotState.LEASED, SlotState.DRAINING} and waiting.until,
            HoldReason.SLOT_WAIT: SlotState.LEASED in states and waiting.until,
            HoldReason.GATHERING: waiting.until,
            HoldReason.TENANT_SLOTS: ticket.tenant in self.w.policy.shares and states - {SlotState.IDLE},
            HoldReason.CONCURRENCY: self.w.policy.max_concurrency,
            HoldReason.SETTLING: choosing or self.w.had_several,
            HoldReason.LOOKING: any(FACTS[name].shared for name in served),
            HoldReason.NO_UPSTREAM: not served,
            HoldReason.SEVERAL: any(self.w.tickets[other].n_seqs > 1 for other in self.w.those("waiting")),
            HoldReason.UNCONFIRMED_PINS: states - {SlotState.IDLE},
            HoldReason.CLIENT_SLOT: states - {SlotState.IDLE},
        }
        assert holds[waiting.hold], (waiting, slots)

    @staticmethod
    def needs(ticket: Ticket, name: str) -> int:
        return ticket.n_seqs if ticket.n_seqs <= FACTS[name].n_slots else 1

    def teardown(self) -> None:
        if not self.w.broken:
            self.w.policy = replace(self.w.policy, queue_limit=256, side_slots=0)
            self.w.do(self.w.s.set_policy(self.w.policy, self.w.now))
            self.w.play_out()


DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
QUICK = settings(
    max_examples=500 if DEEP else 30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
Machine.TestCase.settings = QUICK
TestMachine = pytest.mark.timeout(600)(Machine.TestCase)


class Several(Machine):
    """Half of all want several answers: they wait for the most, and more is done for them first."""

    kinds = ("", "", "several", "several", "several", "cold")


Several.TestCase.settings = QUICK
TestSeveral = pytest.mark.timeout(600)(Several.TestCase)


def grants_draining_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "idle", property(lambda slot: slot.state in (SlotState.IDLE, SlotState.DRAINING)))


def frees_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "drain", Upstream.free)


def pins_beside_unpinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "choosing", lambda slots, now: False)


def unpinned_beside_pins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "pins_confirmed", lambda slots, now: True)


def believes_old_looks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        schedule, "look", lambda server, seen, asked, now, *rest: schedule_look.look(server, seen, now, now, *rest)
    )


def trusts_the_first_idle_look(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slot, "settled_at", property(lambda slot: slot.since))


def ignores_foreign_requests(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "foreign", lambda slots, slot, now, quiet_s: None)


def frees_what_others_wait_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "release", lambda slots, slot, ok, now: slots.free(slot, now))


def leaves_copies_to_be_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "expect_copies", lambda slots, now, draining_first: None)


def sends_unpinned_beside_several_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "several", property(lambda slots: set(), lambda slots, tickets: None))


def reserves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Upstream, "reserve", lambda slots, slot, kind, root, until, now: None)


def waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule_work, "overdue", lambda server, now: ())


def stops_at_the_first_held(patch: pytest.MonkeyPatch) -> None:
    ordered = Queue.ordered
    patch.setattr(Queue, "ordered", lambda queue, fifo: ordered(queue, fifo)[:1])


def forgets_to_place_after_a_finish(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.finished

    def finished(self: Scheduler, ticket: TicketId, finish: Finish, now: float) -> list[Effect]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_place", lambda now: [])
            return original(self, ticket, finish, now)

    patch.setattr(Scheduler, "finished", finished)


def keeps_the_cancelled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "cancel", lambda self, ticket, now: self.tick(now))


def never_expires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_expire", lambda self, now: [])


def saves_over_a_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RootTable, "room_for", lambda table, root, n_bytes, policy, now: ("one.bin", []))


def parks_again_and_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(schedule_park, "is_parked", lambda server, slot: False)


def takes_what_drains_for_ours(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Running, "started_before", lambda running, asked: True)


Plant = Callable[[pytest.MonkeyPatch], None]
SOON_CAUGHT: list[Plant] = [
    grants_draining_slots,
    frees_at_once,
    pins_beside_unpinned,
    unpinned_beside_pins,
    ignores_foreign_requests,
    stops_at_the_first_held,
    forgets_to_place_after_a_finish,
    keeps_the_cancelled,
    never_expires,
]
LATER_CAUGHT: list[Plant] = [
    believes_old_looks,
    trusts_the_first_idle_look,
    frees_what_others_wait_for,
    leaves_copies_to_be_made,
    sends_unpinned_beside_several_answers,
    reserves_nothing,
    waits_for_ever,
    saves_over_a_snapshot,
    parks_again_and_again,
    takes_what_drains_for_ours,
]
"""Some need half a minute of search: HYPOTHESIS_PROFILE=deep, once per release."""
PLANTED = SOON_CAUGHT + (LATER_CAUGHT if DEEP else [])


@pytest.mark.timeout(900 if DEEP else 120)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    n_examples = 5000 if plant in LATER_CAUGHT else 1000
    search = settings(QUICK, max_examples=n_examples, phases=[Phase.generate], database=None, derandomize=True)
    with pytest.raises((AssertionError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(Machine, settings=search)
