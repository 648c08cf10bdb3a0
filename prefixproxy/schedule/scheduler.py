"""Which request runs in which slot, and when: events in, effects out, no I/O and no clock.

Every public event changes what is known and ends in one look at all who wait (`_place`). Times are monotonic seconds.
What holds after every event (tests/property/test_schedule_machine.py):

S1  a slot has at most one owner: a granted ticket, or one warm-up, save or restore;
S2  nothing is granted, warmed, saved or restored on a slot that is not known to be idle; while the server chooses a
    slot for an unpinned request nothing is pinned to that upstream, and the other way round;
S3  each ticket ends in exactly one of Grant, Reject, or its own cancel;
S4  each Grant is answered by exactly one `finished`; later ones are ignored;
S5  an idle slot and a waiting ticket that may use it stand side by side only for a stated HoldReason;
S6  queue length and waits are bounded;
S7  within a priority tenants and their families take turns (`turns`), first come first served within a
    family, with bounded overtaking; no tenant has more slots than it may; who is held blocks nobody, but who needs
    several slots those it will need, for a while;
S8  what a slot holds is a belief: corrected by what the server reports, dropped when it is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prefixproxy.schedule import copies, memory, work
from prefixproxy.schedule.fleet import Fleet
from prefixproxy.schedule.look import ASSUMED_LOOK_S, look, polls
from prefixproxy.schedule.memory import Recalled
from prefixproxy.schedule.place import Placement
from prefixproxy.schedule.plan import (
    Gather,
    Hold,
    Place,
    SaveFirst,
    Server,
    Spread,
    WarmFirst,
)
from prefixproxy.schedule.queue import Queue, Waiting
from prefixproxy.schedule.roots import Root, fingerprint
from prefixproxy.schedule.run import Running, end, judge, learn, lease, settle
from prefixproxy.schedule.slot import Slot, Work
from prefixproxy.schedule.types import (
    Effect,
    Finish,
    Grant,
    HoldReason,
    Policy,
    Reason,
    Reject,
    RejectReason,
    Save,
    SchedulerSnapshot,
    SlotSeen,
    Ticket,
    WarmResult,
)
from prefixproxy.schedule.view import retry_after_s, snapshot_of, state_line, wakes
from prefixproxy.types import RootId, SlotId, TicketId, UpstreamFacts


class Scheduler:
    """One table of slots over all upstreams, one queue in front of it."""

    def __init__(self, policy: Policy | None = None, fleet: Fleet | None = None) -> None:
        self._policy = policy or Policy()
        self._fleet = Fleet() if fleet is None else fleet
        self._queue = Queue()
        self._running: dict[TicketId, Running] = {}
        self._rejected: Counter[RejectReason] = Counter()
        self._recalled: dict[tuple[str, str], Recalled] = {}
        self._now = 0.0

    def __repr__(self) -> str:
        return state_line(self._fleet, len(self._queue), len(self._running))

    # upstreams

    def recall(self, upstream: str, recalled: Recalled) -> None:
        """What an earlier process last wrote down of an upstream. Believed when it comes up
        first, if it is the same server by its mark, and each slot once it is seen to hold as much."""
        self._recalled[upstream, recalled.mark] = recalled

    @property
    def servers(self) -> Mapping[str, Server]:
        """All that is known, by upstream; only to be read (`memory.residency`, `memory.snapshots`)."""
        return self._fleet.by_name

    def upstream_up(self, facts: UpstreamFacts, now: float) -> list[Effect]:
        """A probe succeeded. Its slots count as idle once seen so (`slots_seen`); where they cannot be seen they are
        only counted. Facts that changed nothing but abilities leave residency as it is."""
        server = self._fleet.obtain(facts)
        server.slots.stir()
        self._fleet.changed()
        known, server.slots.facts = server.slots.facts, facts
        same = fingerprint(known) == fingerprint(facts)
        if server.slots.up and same and len(server.slots.slots) == facts.n_slots and known.kind == facts.kind:
            return self._place(now)
        self._lose(server)
        recalled = self._recalled.pop((facts.name, fingerprint(facts)), memory.NOTHING_RECALLED)
        return memory.come_up(server, facts, same, recalled, now) + self._place(now)

    def upstream_lost(self, name: str, now: float) -> list[Effect]:
        """It is gone, with all that ran there (the caller ends those requests) and all its slots held. Who waits goes
        elsewhere, or waits for it to come back; told again, as it is about to, they go on waiting."""
        server = self._fleet.get(name)
        if server is not None:
            if server.slots.up:
                self._lose(server)
            server.lost_at = now
        return self._place(now)

    def slots_seen(
        self, upstream: str, seen: Mapping[int, SlotSeen], now: float, asked_at: float | None = None
    ) -> list[Effect]:
        """What `GET /slots` showed; `asked_at`: when the question was sent. A slot that changed hands after that is
        skipped: the answer may be older than the change."""
        server = self._fleet.get(upstream)
        if server is not None and server.slots.up and server.slots.observed:
            asked = now - ASSUMED_LOOK_S if asked_at is None else asked_at
            look(server, seen, asked, now, self._running, self._policy)
            self._fleet.note_rewarm(server)
            server.slots.stir()
        return self._place(now)

    # tickets

    def submit(self, tickets: Sequence[Ticket], now: float) -> list[Effect]:
        """Queue these together, so that they count as evidence for each other's roots."""
        for ticket in tickets:
            if self._queue.get(ticket.id) is None and ticket.id not in self._running:
                self._queue.add(ticket, self._fleet.uncached_tokens(ticket, self._policy))
        return self._place(now)

    def rekey(self, ticket: Ticket, now: float) -> list[Effect]:
        """A waiting ticket's prompt was stabilised anew. Granted ones are past that."""
        self._queue.replace(ticket, self._fleet.uncached_tokens(ticket, self._policy))
        return self._place(now)

    def cancel(self, ticket: TicketId, now: float) -> list[Effect]:
        """The client of a waiting ticket is gone. What is being warmed for it goes on: many come back at once."""
        self._queue.pop(ticket)
        self._fleet.release_promise(ticket)
        return self._place(now)

    def slot_of(self, ticket: TicketId) -> SlotId | None:
        """Where a granted ticket runs, as far as that is known; None if it has several slots."""
        running = self._running.get(ticket)
        return running.slots[0].id if running is not None and len(running.slots) == 1 else None

    def started(self, ticket: TicketId, now: float) -> list[Effect]:
        """The server works on it (its response headers came, or prompt progress)."""
        running = self._running.get(ticket)
        if running is not None:
            running.start(now, first_token=False)
        return self._place(now)

    def first_token(self, ticket: TicketId, now: float) -> list[Effect]:
        """Its prefill is over."""
        running = self._running.get(ticket)
        if running is not None:
            running.start(now, first_token=True)
        return self._place(now)

    def finished(self, ticket: TicketId, finish: Finish, now: float) -> list[Effect]:
        """A granted ticket ended, however it did. Unknown ones are ignored: their upstream was lost before."""
        running = self._running.pop(ticket, None)
        if running is None:
            return self._place(now)
        effects = judge(running, finish)
        learn(running, finish, now)
        self._queue.settle(running.ticket, running.charged, finish.evaluated_tokens, self._policy)
        end(running, finish, now)
        return effects + self._place(now)

    # warm-ups and copies

    def warmed(self, root: RootId, result: WarmResult, now: float, slot: SlotId | None = None) -> list[Effect]:
        """Answer to Warm; without its slot, to the one there is of this root."""
        done = partial(work.warmed, result=result, policy=self._policy, now=now)
        return self._answer(root, Work.WARM, slot, result.ok, now, done)

    def saved(self, root: RootId, ok: bool, n_bytes: int, seconds: float, now: float) -> list[Effect]:
        """Answer to Save."""
        done = partial(work.saved, n_bytes=n_bytes, seconds=seconds, now=now)
        return self._answer(root, Work.SAVE, None, ok, now, done)

    def restored(self, slot: SlotId, root: RootId, ok: bool, seconds: float, now: float) -> list[Effect]:
        """Answer to Restore."""
        return self._answer(root, Work.RESTORE, slot, ok, now, partial(work.restored, seconds=seconds, now=now))

    def decoded(self, slot: SlotId, ok: bool, now: float) -> list[Effect]:
        """Answer to Decode."""
        server = self._fleet.get(slot.upstream)
        if server is not None:
            copies.decoded(server.slots, slot, ok, now)
        return self._place(now)

    def _answer(
        self,
        root: RootId,
        kind: Work,
        slot: SlotId | None,
        ok: bool,
        now: float,
        done: Callable[[Server, Root, Slot], list[Effect]],
    ) -> list[Effect]:
        effects: list[Effect] = []
        for server in self._fleet.restless():
            found = work.at_work(server, root, kind, slot)
            if found is not None:
                effects += done(server, *found) if ok else self._fail(server, *found, now)
        return effects + self._place(now)

    def _fail(self, server: Server, root: Root, slot: Slot, now: float) -> list[Effect]:
        """Whoever was held for a root that cannot be had is released to plain placement."""
        expired = slot.until <= now
        if slot.work is Work.WARM:
            self._queue.give_up(root.chain, Reason.HOLD_EXPIRED if expired else Reason.WARM_FAILED)
        return work.failed(server, root, slot, now)

    # policy, time, views

    def set_policy(self, policy: Policy, now: float) -> list[Effect]:
        """Effective at once, for those that wait too."""
        self._policy = policy
        self._fleet.stir()
        return self._place(now)

    def tick(self, now: float) -> list[Effect]:
        """Time passed; due at `next_wake`, harmless at any time."""
        return self._place(now)

    def next_wake(self) -> float | None:
        """When `tick` has something to do, if nothing else happens before."""
        times = wakes(self._fleet.restless(), self._queue, self._policy, self._now)
        return min((time for time in times if time > self._now), default=None)

    def snapshot(self, now: float) -> SchedulerSnapshot:
        return snapshot_of(self._fleet, self._queue, len(self._running), self._rejected, self._policy, now)

    # the one look at all who wait

    def _place(self, now: float) -> list[Effect]:
        """1. what took too long has failed; 2. who waited too long is told so; 3. who may go goes; 4. who does not fit
        into the queue is turned away; 5. an upstream that came back gets its hot roots; 6. who is unsure asks."""
        self._now = now
        effects: list[Effect] = []
        for server in self._fleet.restless():
            for root, slot in work.overdue(server, now):
                effects += self._fail(server, root, slot, now)
            effects += copies.settle(server.slots, self._policy, now)
            server.roots.forget_stale(now, self._policy.max_roots)
        effects += self._expire(now)
        effects += self._assign(now)
        while len(self._queue) > self._policy.queue_limit:
            effects.append(self._reject(self._queue.surplus(self._policy).ticket.id, RejectReason.QUEUE_FULL))
        if not len(self._queue):
            for server in self._fleet.rewarming():
                effects += work.rewarm(server, self._policy, now)
        effects += polls(self._fleet.restless(), self._policy, now, len(self._queue))
        self._fleet.calm_down(self._policy, now)
        return effects

    def _expire(self, now: float) -> list[Effect]:
        queue, gone = self._queue, self._fleet.lost_at() + self._policy.reconnect_s
        queue.serve(self._fleet.epoch)
        late = queue.late(now)
        rejects: list[Effect] = [self._reject(waiting.ticket.id, RejectReason.QUEUE_TIMEOUT) for waiting in late]
        for id_, waiting in list(queue.unserved.items()):
            if self._fleet.serving(waiting.ticket):
                del queue.unserved[id_]
            elif now >= gone:
                rejects.append(self._reject(id_, RejectReason.UPSTREAM_UNAVAILABLE))
        return rejects

    def _reject(self, ticket: TicketId, reason: RejectReason) -> Reject:
        self._queue.pop(ticket)
        self._fleet.release_promise(ticket)
        self._rejected[reason] += 1
        return Reject(ticket, reason, retry_after_s(self._fleet, len(self._queue)))

    def _assign(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if not len(self._queue):
            return effects
        fleet, servers = self._fleet, self._fleet.up()
        line = self._queue.ordered(self._policy)
        place = Placement(fleet, line, self._queue.counts, self._policy, now, fleet.busy(len(self._running)))
        for place.yielding in (True, *[False] * (1 + len(line))):
            place.start_over()
            state, idle = place.see(), fleet.any_open()
            for waiting in line:
                if waiting.gone or waiting.stands(state, now):
                    pass
                elif servers and not idle:
                    waiting.hold, waiting.until, waiting.bound_for = HoldReason.NO_SLOT, None, None
                elif place.stands(waiting):
                    waiting.again(state)
                else:
                    found = self._carry_out(place, waiting, now)
                    effects += found
                    if found:
                        place.changed()
                        state, idle = place.see(), fleet.any_open()
                    waiting.decided = state
                place.leave_behind(waiting)
            if not place.another_round():
                break
        return effects

    def _carry_out(self, place: Placement, waiting: Waiting, now: float) -> list[Effect]:
        decision = place.decide(waiting)
        waiting.until = waiting.standing = waiting.bound_for = None
        match decision:
            case Hold():
                waiting.take(decision)
                return []
            case Gather():
                waiting.hold, waiting.until = HoldReason.GATHERING, now + self._policy.gather_s
                waiting.gathered = True
                work.gather(decision.server, decision.chain, waiting.until)
                return []
            case WarmFirst():
                waiting.hold, waiting.until = HoldReason.WARMING, now + self._policy.max_warm_s
                place.running += 1
                self._queue.charge(decision.leader, decision.uncached, self._policy)
                return work.start_warm(decision.server, decision, self._policy, now)
            case SaveFirst():
                effects = work.start_save(decision.server, decision, self._policy, now)
                if any(isinstance(effect, Save) for effect in effects):
                    waiting.wait_for_save(now + self._policy.max_copy_s)
                else:  # there is no room for it: look again shortly, without it
                    waiting.hold, waiting.until = HoldReason.GATHERING, now + self._policy.gather_s
                return effects
            case Spread():
                return self._spread(place, waiting, decision, now)
            case Place() if decision.root is not None:
                waiting.hold, waiting.until = HoldReason.RESTORING, now + self._policy.max_copy_s
                server, slot = decision.server, decision.slot
                return work.start_restore(server, decision.root, slot, waiting.ticket, self._policy, now)
            case Place():
                return self._grant(place, waiting, decision, now)

    def _grant(self, place: Placement, waiting: Waiting, where: Place, now: float) -> list[Effect]:
        """Pin it to its slot, or let the server choose: one at a time where others are pinned, or a pin could hit the
        slot that the server just took."""
        ticket, slots = waiting.ticket, where.server.slots
        foreign = slots.unpinned_because(now)
        pinned = ticket.pinnable and not foreign
        if slots.observed and not pinned:
            if slots.several:
                waiting.hold = HoldReason.SETTLING
                return []
            if not slots.pins_confirmed(now):
                slots.confirm = True
                slots.stir()
                place.closed[slots.name] = waiting.hold = HoldReason.UNCONFIRMED_PINS
                return []
            reason = Reason.FOREIGN if foreign else Reason.UNPINNED
            return self._go(place, settle(where.server, ticket, 1, now, where.slot), reason)
        running = lease(where.server, ticket, [where.slot], pinned, now, where.loads)
        if running.root is not None:
            reason = Reason.FORKED
        elif running.warmed:
            reason = Reason.WARMED
        elif not pinned:
            reason = Reason.UNPINNED
        else:
            reason = where.reason if waiting.plain is None or where.cached else waiting.plain
        return self._go(place, running, reason, where.slot.id if pinned else None)

    def _spread(self, place: Placement, waiting: Waiting, where: Spread, now: float) -> list[Effect]:
        """Several sequences at once: the server takes the idle slots with the lowest numbers, clearing them."""
        server, ticket = where.server, waiting.ticket
        if server.slots.several:
            waiting.hold = HoldReason.SETTLING
            return []
        if server.slots.observed:
            running = settle(server, ticket, where.need, now, where.likely)
        else:
            idle = [slot for slot in server.slots.slots if slot.idle]
            running = lease(server, ticket, idle[: where.need], False, now)
        return self._go(place, running, Reason.SEVERAL_SEQUENCES if ticket.n_seqs > 1 else Reason.FOREIGN)

    def _go(self, place: Placement, running: Running, reason: Reason, slot: SlotId | None = None) -> list[Effect]:
        ticket = running.ticket
        running.charged = self._queue.granted(ticket, ticket.n_tokens - running.expected, self._policy)
        self._fleet.release_promise(ticket.id)
        self._running[ticket.id] = running
        place.running += 1
        upstream, cached = running.server.slots.name, running.expected_cached
        return [Grant(ticket.id, slot, upstream, cached, running.root is not None, reason)]

    def _lose(self, server: Server) -> None:
        self._running = {id_: run for id_, run in self._running.items() if run.server is not server}
        server.slots.close()
        server.rewarm = False
        work.reset(server)
        self._fleet.changed()
