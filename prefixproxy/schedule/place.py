"""Where one waiting ticket should go now, or what it waits for: reads all state, changes none but to ask for a look.

Every way to run it has a price in seconds: evaluating what is not cached, copying a snapshot, and the value of what
is overwritten. Waiting for a busy slot and warming a root alone are weighed against the cheapest of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from prefixproxy.schedule.cheapest import cheapest_places
from prefixproxy.schedule.cold import ColdRoots
from prefixproxy.schedule.look import LOOK_WAIT_S, unseen
from prefixproxy.schedule.park import can_save, cleared_first, lent_first, park_first, turn_first, worthwhile_tokens
from prefixproxy.schedule.plan import (
    Decision,
    Group,
    Hold,
    Place,
    SaveFirst,
    Server,
    Spread,
    WarmFirst,
)
from prefixproxy.schedule.queue import Waiting
from prefixproxy.schedule.ram import MIN_FOUND_TOKENS
from prefixproxy.schedule.slot import Slot, Work
from prefixproxy.schedule.turns import is_over
from prefixproxy.schedule.types import HoldReason, Reason, Ticket
from prefixproxy.types import SlotState

LOOK_TOKENS = 128
"""What is not cached has to be more than that, or a look first takes as long."""
_GOES_NOWHERE = (HoldReason.CLIENT_SLOT, HoldReason.TENANT_SLOTS)
"""Who is held for one of these takes no other slot that comes free."""
_STUCK = (HoldReason.NO_SLOT, HoldReason.SEVERAL)
"""Who is held for one of these has not enough with what was prepared for it."""


@dataclass(slots=True)
class Placement(ColdRoots):
    """Decides for one ticket after the other; effects in between are told by `changed`."""

    def decide(self, waiting: Waiting) -> Decision:
        """Where this ticket goes now."""
        self.catch_up()
        decision = self._decide(waiting)
        self.stale = not isinstance(decision, Hold)
        return decision

    def _decide(self, waiting: Waiting) -> Decision:
        """The first of these that applies:
        1. no upstream serves it, as many run as may, or its tenant has all the slots it may have: hold;
        2. it needs several slots, or a slot its client named: those, or hold;
        3. no slot it may use is idle: hold;
        4. somebody is already evaluating what it needs: hold;
        5. waiting for a busy slot is cheaper than the cheapest place: hold;
        6. a slot of unknown content may have more of it: without a slot;
        7. its root is cold: gather, then warm it alone, or save the idle slot that several want a copy of;
        8. the cheapest place (`_with_room`), unless a later ticket has much more use for it.
        """
        ticket = waiting.ticket
        serving = self.fleet.serving(ticket)
        if not serving:
            return Hold(HoldReason.NO_UPSTREAM)
        if self.policy.max_concurrency and self.running >= self.policy.max_concurrency:
            return Hold(HoldReason.CONCURRENCY)
        if is_over(ticket, self.fleet.up(), self.policy):
            return Hold(HoldReason.TENANT_SLOTS)
        if ticket.n_seqs > 1:
            return self._several(waiting, serving)
        home = self._client_slot(ticket, serving)
        if home is not None:
            return self._at_client_slot(waiting, *home)
        open_servers = self.open_of(serving)
        anyway = self.held_anyway(waiting, open_servers)
        if anyway is not None:
            return anyway
        places = self._cheapest(waiting, open_servers)
        if not places:
            return self._without_slot(ticket, serving)
        places = self._with_room(waiting, open_servers, places)
        best = _best(places)
        if waiting.plain is not Reason.HOLD_EXPIRED:
            held = (
                self.held(waiting, open_servers, best) or self._to_see(ticket, best) or self.root_first(waiting, best)
            )
            if held is not None:
                return self._kept_first(waiting, best, held) if isinstance(held, WarmFirst) else held
        found = self._unless_needed(waiting, best, places, open_servers)
        return found if isinstance(found, Hold) else self._kept_first(waiting, found, found)

    def _cheapest(self, waiting: Waiting, servers: Group) -> list[Place]:
        """All that can be the cheapest."""
        index = self.index
        return self._all(waiting, servers) if index is None else cheapest_places(self, index, waiting, servers)

    def _all(self, waiting: Waiting, servers: Group) -> list[Place]:
        return [place for server in servers for place in self.places(waiting, server)]

    def _with_room(self, waiting: Waiting, servers: Group, places: list[Place]) -> list[Place]:
        """Where nothing worth while of it is cached: away from upstreams whose slots others wait for already, and from
        those that warm another root, if any are left."""
        best = _best(places)
        if len(servers) < 2 or self.worth(best.server, best.cached) or self.fleet.census.promised_to(waiting.ticket.id):
            return places
        warming = {s.slots.number for s in self.fleet.restless() if _warms(s)}
        for avoided in (self.full | warming, self.full):
            if best.server.slots.number in avoided:
                there = self._cheapest(waiting, self.apart_from(servers, frozenset(avoided & servers.numbers)))
                if there:
                    return there
        return places

    def _to_see(self, ticket: Ticket, best: Place) -> Hold | Spread | None:
        """Without a slot, where one of unknown content may have more of it; a look first, where others may have used
        it since the last one."""
        slots = best.server.slots
        if self.policy.side_slots or not (slots.observed and ticket.reuse and ticket.pinnable):
            return None  # the server knows nothing of slots that are kept
        if slots.unpinned_because(self.now):
            return None
        if ticket.n_tokens > best.cached + LOOK_TOKENS and unseen(slots, self.now):
            if slots.polled_at <= slots.seen_at:
                slots.poll_soon = True
                slots.stir()
            return Hold(HoldReason.LOOKING, max(self.now, slots.polled_at) + LOOK_WAIT_S)
        if ticket.n_tokens <= best.cached + MIN_FOUND_TOKENS:
            return None
        if not slots.strangers.may_have(slots.slots, best.cached, ticket.form):
            return None
        return self._without_pin(best.server, 1, best.slot if best.root is None else None)

    # 2. several slots, or the client's own

    def leave_behind(self, waiting: Waiting) -> None:
        """It goes on waiting. Idle slots are kept where most are for one that needs several, and is prepared for or was
        overtaken often enough."""
        self.go_past(waiting)
        if waiting.ticket.n_seqs == 1 or waiting.gone:
            return
        serving = self.fleet.serving(waiting.ticket)
        slot = self.fleet.prepared_slot(waiting.ticket, serving)
        if not waiting.keeps(self.policy, self.now, copying=slot is not None and slot.work is not Work.WARM):
            return
        able = [server for server in serving if _can_spread(server, waiting.ticket.n_seqs)]
        if able:
            most = max(able, key=lambda server: len(server.slots.in_state(SlotState.IDLE)))
            most.slots.stir()
            self.closed[most.slots.name], self.stale = HoldReason.SEVERAL, True

    def another_round(self) -> bool:
        """Whether somebody was held for the sake of others, or a slot was prepared for one that cannot go: it is given
        up, or two of them could wait for each other's."""
        held = [waiting for waiting in self.line if not waiting.gone]
        stuck = [waiting for waiting in held if waiting.hold in _STUCK] if self.fleet.census.promised else []
        freed = [waiting for waiting in stuck if self.fleet.release_idle(waiting.ticket.id)]
        return bool(freed) or any(waiting.hold is HoldReason.OVERTAKEN for waiting in held)

    def start_over(self) -> None:
        """Nothing is kept for those that have not been left behind yet."""
        ColdRoots.start_over(self)
        if HoldReason.SEVERAL in self.closed.values():
            self.closed = {name: why for name, why in self.closed.items() if why is not HoldReason.SEVERAL}
            self.stale = True

    def _several(self, waiting: Waiting, serving: Group) -> Decision:
        ticket = waiting.ticket
        ready = self.fleet.prepared(ticket, serving) or self._spread(ticket, serving)
        if not isinstance(ready, Spread) or ready.need == 1:
            return ready
        return self._before_several(waiting, ready)

    def _before_several(self, waiting: Waiting, ready: Spread) -> Decision:
        """Its prompt is brought into a slot first, where that is cheaper, and what is of value in the others is saved:
        the server takes the slot that shares most with the prompt, and for the other answers those with the lowest
        numbers, which it clears."""
        ticket, server = waiting.ticket, ready.server
        if not (ticket.reuse and ticket.pinnable) or waiting.plain or server.slots.unpinned_because(self.now):
            return ready
        if waiting.saves >= ready.need:
            return ready  # there may be fewer files than slots: one save could undo the other for ever
        places = self.places(waiting, server)
        if not places:
            return ready
        if not can_save(server, self.policy, self.now):
            places = [place for place in places if place.slot.id.slot >= ready.need - 1] or places
        best = _best(places)
        first = self.root_first(waiting, best) or best
        if isinstance(first, Place | WarmFirst):
            first = self._kept_first(waiting, best, first)
        if first is not best or best.root is not None:
            return first
        others = [slot for slot in server.slots.in_state(SlotState.IDLE) if slot is not best.slot]
        cleared = (cleared_first(ticket, server, slot, self.policy, self.running, self.now) for slot in others)
        saves = (save for save in islice(cleared, ready.need - 1) if save is not None)
        return next(saves, Spread(server, ready.need, best.slot))

    def _spread(self, ticket: Ticket, serving: Group) -> Decision:
        ready = [server for server in serving if self._has_idle(server, ticket)]
        if not ready:
            return self._without_slot(ticket, serving)
        server = max(ready, key=lambda server: server.slots.counts.deepest(ticket.chain) if ticket.reuse else 0)
        return self._without_pin(server, _need(ticket, server))

    def _without_pin(self, server: Server, need: int, likely: Slot | None = None) -> Hold | Spread:
        """The server chooses the slots, once no pin can be on its way to one of them."""
        if server.slots.observed and not server.slots.pins_confirmed(self.now):
            return Hold(HoldReason.UNCONFIRMED_PINS)
        return Spread(server, need, likely)

    def _has_idle(self, server: Server, ticket: Ticket) -> bool:
        idle = sum(slot.idle and slot.promised in (None, ticket.id) for slot in server.slots.slots)
        return self.closed_because(server) is None and idle >= _need(ticket, server)

    def _client_slot(self, ticket: Ticket, serving: Group) -> tuple[Server, Slot] | None:
        if ticket.wanted_slot is None or ticket.wanted_slot < 0 or not ticket.pinnable:
            return None
        for server in serving:
            if not server.slots.unpinned_because(self.now):
                return server, server.slots.slots[ticket.wanted_slot % len(server.slots.slots)]
        return None

    def _at_client_slot(self, waiting: Waiting, server: Server, slot: Slot) -> Decision:
        """What that slot holds is saved first, and what a file or another slot has of the prompt is brought there."""
        ticket = waiting.ticket
        closed = self.closed_because(server)
        if closed is not None:
            return Hold(closed)
        if not slot.idle or slot.promised not in (None, ticket.id):
            return Hold(HoldReason.CLIENT_SLOT)
        place = self.direct(ticket, server, slot, server.rate(self.policy))
        place = replace(place, reason=Reason.CLIENT_SLOT)
        if waiting.plain is not None:
            return place
        place = _best([place, *self.forks(ticket, server, [slot])])
        return self._lent_first(waiting, place) or self._park_first(waiting, place) or place

    def _lent_first(self, waiting: Waiting, place: Place) -> SaveFirst | None:
        ticket, server, slot = waiting.ticket, place.server, place.slot
        if not _may_save(waiting, server):
            return None
        idle = [
            other for other in server.slots.in_state(SlotState.IDLE) if other.promised is None and other is not slot
        ]
        more = {other.number: self.reuse(ticket, server, other.held)[0] - place.cached for other in idle}
        most = max(idle, key=lambda other: more[other.number], default=slot)
        return lent_first(ticket, server, most, more.get(most.number, 0), self.policy, self.now)

    def _without_slot(self, ticket: Ticket, serving: Group) -> Hold | Spread:
        """3. Why nothing is free for it. Where others take the slots it queues up behind them, in the server."""
        hold = self.fleet.prepared(ticket, serving)
        if hold is not None:
            return hold
        for server in self.restless_of(serving):
            closed = self.closed_because(server)
            if closed is not None and any(self.usable(ticket, server)):
                return Hold(closed)
            if closed is None and server.slots.has(SlotState.FOREIGN) and server.slots.pins_confirmed(self.now):
                return Spread(server, _need(ticket, server))
        return Hold(HoldReason.NO_SLOT)

    # 8. leave a slot to a later ticket, and save what is overwritten

    def _kept_first(self, waiting: Waiting, place: Place, found: Place | WarmFirst) -> Decision:
        ticket = waiting.ticket
        if waiting.plain is not None:
            return found
        parked = self._park_first(waiting, place)
        if parked is not None or place.root is not None or isinstance(found, WarmFirst):
            return parked or found
        return turn_first(ticket, place, self.policy, len(self.line), self.now) or found

    def _park_first(self, waiting: Waiting, place: Place) -> SaveFirst | None:
        if not _may_save(waiting, place.server):
            return None
        return park_first(waiting.ticket, place, self.policy, self.running, self.now)

    def _unless_needed(self, waiting: Waiting, best: Place, places: Sequence[Place], servers: Group) -> Place | Hold:
        if not self.yielding or self.policy.policy == "fifo" or waiting.overtaken >= self.policy.max_overtaken:
            return best
        if not self._needed_by_later(waiting, best):
            return best
        for place in sorted(self._all(waiting, servers), key=_cost_s):
            if not self._needed_by_later(waiting, place):
                return place
        return Hold(HoldReason.OVERTAKEN)

    def _needed_by_later(self, waiting: Waiting, place: Place) -> bool:
        """Whether a later ticket of the same priority would lose a root with this slot, and this ticket gains none."""
        slot, gains = place.slot, place.root is None and self.worth(place.server, place.cached)
        if gains or slot.promised == waiting.ticket.id or not slot.held.tokens:
            return False
        if not self.worth(place.server, slot.held.tokens_at(self.counts.deepest(slot.held.chain)) / 2):
            return False  # whoever waits, none shares enough with it, even where the estimates differ by half
        for later in self.line[self.line.index(waiting) + 1 :]:
            ticket = later.ticket
            if ticket.priority is not waiting.ticket.priority or later.hold in _GOES_NOWHERE:
                continue
            if place.server not in self.fleet.serving(ticket):
                continue
            here, _ = self.reuse(ticket, place.server, slot.held)
            saved = self.best_saved(ticket, place.server)
            here -= saved[1] if saved else 0
            if self.worth(place.server, here) and not self._elsewhere(ticket, place.server, slot):
                return True
        return False

    def _elsewhere(self, ticket: Ticket, server: Server, slot: Slot) -> bool:
        """Whether another slot has nearly as much of it as this one."""
        here, _ = self.reuse(ticket, server, slot.held)
        enough = here - worthwhile_tokens(server, self.policy)
        others = (other for other in self.candidates(ticket, server, enough - 1) if other is not slot)
        return any(not self.worth(server, here - self.reuse(ticket, server, other.held)[0]) for other in others)


def _best(places: Sequence[Place]) -> Place:
    return min(places, key=lambda place: place.rank)


def _may_save(waiting: Waiting, server: Server) -> bool:
    """No more saves for one ticket than there are slots: whatever comes in between, it goes on."""
    return waiting.saves <= len(server.slots.slots)


def _need(ticket: Ticket, server: Server) -> int:
    """More answers than there are slots are the server's to refuse."""
    return ticket.n_seqs if ticket.n_seqs <= len(server.slots.slots) else 1


def _can_spread(server: Server, need: int) -> bool:
    return server.slots.up and need <= len(server.slots.slots) and not server.slots.has(SlotState.FOREIGN)


def _warms(server: Server) -> bool:
    return any(slot.work is Work.WARM for slot in server.slots.in_state(SlotState.RESERVED))


def _cost_s(place: Place) -> float:
    return place.cost_s
