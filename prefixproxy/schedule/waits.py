"""What a ticket had better wait for than start at the cheapest place: what others evaluate already, and a busy slot.

In a large fleet it is known of most of these holds what would have to change for another decision (`Standing`): until
then nobody looks at them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixproxy.schedule.changes import Change, Changes
from prefixproxy.schedule.fleet import by_server, in_state, prepared
from prefixproxy.schedule.index import ALIKE, Index
from prefixproxy.schedule.plan import WAIT_SLACK, Group, Hold, Place, Server, Standing, blocks_for, tokens_of
from prefixproxy.schedule.price import Prices
from prefixproxy.schedule.queue import Waiting
from prefixproxy.schedule.roots import Gathering, Root
from prefixproxy.schedule.slot import Slot
from prefixproxy.schedule.slots import MOST_SLOTS
from prefixproxy.schedule.turns import share_of
from prefixproxy.schedule.types import HoldReason, Reason, Ticket
from prefixproxy.schedule.underway import UnderWay, alike, under_way
from prefixproxy.types import SlotState

ROUNDING_S = 0.002
"""Prices are rounded to be compared."""


@dataclass(slots=True)
class Waits(Prices):
    """`terms`: see `Fleet.terms`, as they are now."""

    terms: tuple[object, ...] = ()
    stale: bool = True
    _opened: dict[frozenset[int], Group] = field(default_factory=dict)
    _under_way: dict[int, list[UnderWay]] = field(default_factory=dict)

    def see(self) -> tuple[object, ...]:
        """Before the first look and after each effect: the state that what is found is found in."""
        self.terms = self.fleet.terms(self.policy, self.now)
        return self.fleet.state(self.policy, self.now)

    def catch_up(self) -> None:
        """See what the last effects changed."""
        if self.stale:
            self._opened, self._under_way, self.stale = {}, {}, False
            self.index = self.fleet.index(self.policy)

    # which upstreams take any now

    def open_of(self, serving: Group) -> Group:
        known = self._opened.get(serving.numbers)
        if known is None:
            known = self._opened[serving.numbers] = self._find_open(serving)
        return known

    def _find_open(self, serving: Group) -> Group:
        shut = [server for server in self.restless_of(serving) if self.closed_because(server) is not None]
        if not shut and not self.closed:
            return serving
        return Group([server for server in serving if self.closed_because(server) is None])

    def apart_from(self, servers: Group, numbers: frozenset[int]) -> Group:
        key = servers.numbers - numbers
        known = self._opened.get(key)
        if known is None:
            known = self._opened[key] = Group([server for server in servers if server.slots.number not in numbers])
        return known

    def restless_of(self, group: Group) -> list[Server]:
        return [server for server in self.fleet.restless() if server in group]

    def closed_because(self, server: Server) -> HoldReason | None:
        if server.slots.choosing(self.now):
            return HoldReason.SETTLING
        if server.slots.stale(self.now) and not server.slots.unpinned_because(self.now):
            return HoldReason.LOOKING
        return self.closed.get(server.slots.name)

    # 4. what others evaluate already

    def held(self, waiting: Waiting, servers: Group, best: Place) -> Hold | None:
        """4. Somebody evaluates already what it needs; 5. waiting for a busy slot is cheaper than `best`."""
        ticket = waiting.ticket
        if self.index is not None and not self.index.odd:
            one = self._next(ticket, servers, best.cached) or self._busy(waiting, servers, best)
            return None if one is None else self._hold(ticket, servers, one, best)
        hold = self.fleet.prepared(ticket, servers)
        if hold is not None:
            return hold
        for server in servers if ticket.reuse else ():
            if self.is_passed(server, servers):
                continue
            for one in under_way(server, self.policy):
                if one.has_more(self, ticket, best.cached):
                    return one.hold
        busy = self._busy(waiting, servers, best)
        return None if busy is None else busy.hold

    def held_anyway(self, waiting: Waiting, servers: Group) -> Hold | None:
        """4. and 5. in a large fleet, for a ticket that is held whatever the cheapest place is."""
        ticket, index = waiting.ticket, self.index
        if index is None or index.odd or not ticket.reuse or waiting.plain is Reason.HOLD_EXPIRED:
            return None
        if self.policy.side_slots or index.open.isdisjoint(servers.numbers) or not self._all_reserved(ticket):
            return None
        best = self._known_place(waiting, servers)
        one = self._next(ticket, servers, self._at_least(ticket, best)) or self._busy_before(waiting, servers)
        if one is None:
            return None
        why = self._why(ticket, servers, one, best)
        if not self._still(why, ticket):
            return None
        return one.hold if self._limited(ticket) or _unsteady(one) else one.hold_standing(why)

    def _next(self, ticket: Ticket, servers: Group, cached: int) -> UnderWay | None:
        """What it is held for in a large fleet, if the cheapest place has so many tokens of it: a slot that is prepared
        for it, or what is under way."""
        slot = self.fleet.prepared_slot(ticket, servers)
        if slot is None:
            return self._first_under_way(ticket, servers, cached)
        return UnderWay(self.fleet.numbered(slot.number // MOST_SLOTS), slot, prepared(slot).reason, slot.until)

    def _first_under_way(self, ticket: Ticket, servers: Group, cached: int) -> UnderWay | None:
        hashes = ticket.chain.hashes
        if not hashes or not ticket.reuse:
            return None
        need = blocks_for(ticket, cached + self.least_worth())
        last = hashes[need - 1] if need <= len(hashes) else None
        for one in self._alike(ticket):
            if self.is_passed(one.server, servers):
                continue
            if (one.is_root or one.block(need) == last is not None) and one.server in servers:
                if one.has_more(self, ticket, cached):
                    return one
        return None

    def _alike(self, ticket: Ticket) -> list[UnderWay]:
        if not ticket.chain.hashes:
            return []
        first = ticket.chain.hashes[0]
        known = self._under_way.get(first)
        if known is None:
            known = self._under_way[first] = alike(self.fleet, self.path(ticket), first, self.policy)
        return known

    def is_passed(self, server: Server, servers: Group) -> bool:
        """Whether what is under way on it is not waited for: enough others do, and another upstream has room; or no
        slot that is idle then would be the prompt's."""
        return bool(server.slots.clears_idle) or (self.is_taken(server) and self.has_room(servers))

    def has_room(self, servers: Group) -> bool:
        """Whether any upstream has a slot for a ticket that nobody ahead waits for. Else it waits where it can."""
        if len(servers) < 2:
            return False
        if self.index is not None:
            return not self.full >= (self.index.open & servers.numbers)
        idle = (slot for server in servers for slot in server.slots.in_state(SlotState.IDLE))
        return any(slot.promised is None and slot.number // MOST_SLOTS not in self.full for slot in idle)

    # 5. a busy slot

    def _busy(self, waiting: Waiting, servers: Group, best: Place) -> UnderWay | None:
        """A busy slot holds so much of it that waiting is cheaper; not for longer than the first estimate said. Where
        one cache serves all, nothing has to be waited for once it is evaluated."""
        if waiting.patience is not None and self.now >= waiting.patience:
            return None
        ticket, deep = waiting.ticket, self.sharing(waiting.ticket, best.cached + self.least_worth())
        cheapest: tuple[float, Server, Slot, float] | None = None
        for server in servers if deep is None else by_server(self.fleet, deep, servers):
            if server.slots.facts.capabilities.shared_cache or server.slots.clears_idle:
                continue
            rate, can_fork = server.rate(self.policy), self.can_fork(server)
            for slot in in_state(server, SlotState.LEASED, deep):
                reused, _ = self.reuse(ticket, server, slot.held)
                if not self.worth(server, reused - best.cached):
                    continue
                wait_s = server.slots.remaining_s(slot, rate, self.now)
                if not can_fork:
                    # it cannot be copied: those ahead who wait for the same slot go first
                    wait_s += self.bound_for.get(slot.id, 0) * server.slots.rates.expected_answer_s
                cost_s = wait_s + (ticket.n_tokens - reused) / rate
                if cheapest is None or cost_s < cheapest[0]:
                    cheapest = cost_s, server, slot, wait_s
        if cheapest is None or cheapest[0] + self.policy.root_threshold_s >= best.cost_s:
            return None
        _, server, slot, wait_s = cheapest
        self.bound_for[slot.id] = self.bound_for.get(slot.id, 0) + 1
        return UnderWay(server, slot, HoldReason.SLOT_WAIT, waiting.patience or self.now + WAIT_SLACK * wait_s)

    def _busy_before(self, waiting: Waiting, servers: Group) -> UnderWay | None:
        """The slot it waited for when it was last looked at."""
        why = None if waiting.standing is None else waiting.standing.standing
        if why is None or why.rest_s is None or waiting.patience is None or self.now >= waiting.patience:
            return None
        if not isinstance(why.what, Slot) or why.what.state is not SlotState.LEASED:
            return None
        if why.server not in servers or not self.can_fork(why.server):
            return None
        return UnderWay(why.server, why.what, HoldReason.SLOT_WAIT, waiting.patience)

    # which of these holds stand

    def stands(self, waiting: Waiting) -> bool:
        """Whether a look at it would find again what it was last held for."""
        hold = waiting.standing
        why = None if hold is None else hold.standing
        if hold is None or why is None or self.closed or why.terms != self.terms:
            return False
        if hold.until is not None and hold.until <= self.now:
            return False
        if self.stale:
            self.catch_up()
        leads = why.rest_s is None and hold.server is not None
        if leads and self.is_passed(why.server, why.servers):
            return False
        index = self.index
        if index is None or index.open.isdisjoint(why.servers.numbers) or not index.open.isdisjoint(why.without):
            return False
        if index.changes.now != why.seen and not self._untouched(why, waiting.ticket, index.changes):
            return False
        if why.past and not self._is_first(why, waiting.ticket):
            return False
        return self._as_measured(why, waiting.ticket, index)

    def _untouched(self, why: Standing, ticket: Ticket, changes: Changes) -> bool:
        since = changes.since(why.first, why.seen)
        if since is None or not all(self._is_harmless(change, why, ticket) for change in since):
            return False
        why.seen = changes.now
        return True

    def _is_harmless(self, change: Change, why: Standing, ticket: Ticket) -> bool:
        """Whether it neither gives the cheapest place more of the ticket, or less, nor would be waited for first."""
        if change is None or change is why.best:
            return False
        later = why.rest_s is None and _number(change) > why.server.slots.number
        if isinstance(change, int):
            return later
        if change is why.what:
            return True  # `_still` looks at it
        if why.best is not None and _number(why.best) == _number(change):
            return False
        held = change.held.chain.hashes
        if not held or held[0] != why.first:
            return True
        if change.idle:
            if change.promised is None:
                return tokens_of(ticket, ticket.chain.common_blocks(change.held.chain)) <= why.most
            return change.promised != ticket.id
        if change.state is SlotState.DRAINING or (change.state is SlotState.LEASED and change.first_token_at is None):
            return later or tokens_of(ticket, ticket.chain.common_blocks(change.held.chain)) <= why.least
        return True

    def _as_measured(self, why: Standing, ticket: Ticket, index: Index) -> bool:
        same = index.measured == why.measured and why.copied in (None, index.copied)
        if same and isinstance(why.what, Slot) and why.rest_s is None:
            what = why.what
            if what.turn != why.turn:
                return False
            leads = what.state is SlotState.LEASED and what.first_token_at is None
            return leads or (what.state is SlotState.RESERVED and what.promised == ticket.id)
        for server, rate, kept in why.rates:
            if abs(server.rate(self.policy) - rate) > 2 * ALIKE * rate or server.slots.rates.kept != kept:
                return False
        if index.bounds()[0] > why.highest * (1 + 2 * ALIKE) or not self._still(why, ticket):
            return False
        if not same and not self._is_first(why, ticket):
            return False
        why.measured, why.copied = index.measured, None if why.copied is None else index.copied
        return True

    def _is_first(self, why: Standing, ticket: Ticket) -> bool:
        """Whether nothing else would be waited for, even if the cheapest place had the least of the ticket."""
        first = self._next(ticket, why.servers, why.least)
        return first is None if why.rest_s is not None else first is not None and first.what is why.what

    def _highest(self) -> float:
        return 0.0 if self.index is None else self.index.bounds()[0]

    def _still(self, why: Standing, ticket: Ticket) -> bool:
        server, what = why.server, why.what
        if isinstance(what, Root):
            return what.running and why.more > server.rate(self.policy) * server.slots.rates.copy_s(what.tokens)
        if isinstance(what, Gathering):
            return self.worth(server, why.more)
        if what.turn != why.turn:
            return False
        if what.state is SlotState.RESERVED:
            return what.promised == ticket.id
        if what.state is not SlotState.LEASED or not self.worth(server, why.more):
            return False
        if why.rest_s is None:
            return what.first_token_at is None
        cost_s = server.slots.remaining_s(what, server.rate(self.policy), self.now) + why.rest_s
        return cost_s + self.policy.root_threshold_s < why.least_s

    def _hold(self, ticket: Ticket, servers: Group, one: UnderWay, best: Place) -> Hold:
        """Hold it for this, and say why that stands, if it does so whatever becomes of other prompts: also if a
        cheaper place has more of this one than `best`; and if one has less, nothing else would be waited for."""
        if self._limited(ticket) or _unsteady(one) or not ticket.reuse or not self._all_reserved(ticket):
            return one.hold
        if one.reason is HoldReason.SLOT_WAIT and not self.can_fork(one.server):
            return one.hold
        why = self._why(ticket, servers, one, best)
        stands = self._is_first(why, ticket) and self._still(why, ticket)
        return one.hold_standing(why) if stands else one.hold

    def _why(self, ticket: Ticket, servers: Group, one: UnderWay, best: Place | None) -> Standing:
        index, policy, server, highest = self.index, self.policy, one.server, self._highest()
        assert index is not None
        first = ticket.chain.hashes[0] if ticket.chain.hashes else 0
        most, without = self._at_most(ticket)
        shared = self._shared_with(ticket, server, one.what)
        rates = [(s, s.rate(policy), s.slots.rates.kept) for s in (server, best.server if best else server)]
        return Standing(
            terms=self.terms,
            first=first,
            seen=index.changes.now,
            measured=index.measured,
            copied=index.copied if self._other_roots(ticket, one) else None,
            servers=servers,
            without=without,
            server=server,
            what=one.what,
            past=any(self.is_passed(other.server, servers) for other in self._alike(ticket)),
            turn=one.what.turn if isinstance(one.what, Slot) else 0,
            least=self._at_least(ticket, best),
            most=most,
            more=shared - most,
            rates=tuple(rates),
            highest=highest,
            best=best.slot if best is not None and best.root is None and best.cached else None,
            rest_s=(ticket.n_tokens - shared) / server.rate(policy) if one.reason is HoldReason.SLOT_WAIT else None,
            least_s=(ticket.n_tokens - most) / highest - ROUNDING_S,
        )

    def _other_roots(self, ticket: Ticket, one: UnderWay) -> bool:
        """Whether a root is under way that is waited for as long as that takes longer than a copy."""
        return bool(ticket.chain.hashes) and any(
            other.is_root and other.what is not one.what for other in self._alike(ticket)
        )

    def _limited(self, ticket: Ticket) -> bool:
        """Whether it may not use every slot there is at any time."""
        policy = self.policy
        return bool(
            self.closed or policy.side_slots or policy.max_concurrency or share_of(policy, ticket.tenant).max_slots
        )

    def _all_reserved(self, ticket: Ticket) -> bool:
        """Whether no slot that was prepared for it is ready."""
        return all(slot.state is SlotState.RESERVED for slot in self.fleet.census.promised_to(ticket.id))

    def _known_place(self, waiting: Waiting, servers: Group) -> Place | None:
        """The idle slot that was the cheapest when it was last looked at, at today's price."""
        why = None if waiting.standing is None else waiting.standing.standing
        slot = None if why is None else why.best
        if slot is None or not slot.idle or slot.promised is not None:
            return None
        server = self.fleet.numbered(slot.number // MOST_SLOTS)
        if server not in servers or server.slots.slot(slot.id) is not slot:
            return None
        return self.direct(waiting.ticket, server, slot, server.rate(self.policy))

    def _shared_with(self, ticket: Ticket, server: Server, what: Root | Gathering | Slot) -> int:
        if isinstance(what, Slot):
            return self.reuse(ticket, server, what.held)[0]
        return tokens_of(ticket, ticket.chain.common_blocks(what.chain))

    def _at_least(self, ticket: Ticket, best: Place | None) -> int:
        """Tokens of it that the cheapest place has as long as nothing changes that begins like it: whatever has less
        costs more than the idle slot `best`."""
        if best is None or best.root is not None or best.server.slots.rates.truncated_reuse is None:
            return 0
        if not best.cached:
            return 0
        return max(0, int(ticket.n_tokens - self._highest() * (best.cost_s * (1 + 8 * ALIKE) + ROUNDING_S)))

    def _at_most(self, ticket: Ticket) -> tuple[int, frozenset[int]]:
        """Tokens of it that any place has, and the upstreams with snapshots of more that have no idle slot."""
        index, without = self.index, set[int]()
        for blocks, node in reversed(self.path(ticket)):
            if blocks and index is not None:
                if node.idle or not index.open.isdisjoint(node.saved):
                    return tokens_of(ticket, blocks), frozenset(without)
                without.update(node.saved)
        return 0, frozenset(without)


def _unsteady(one: UnderWay) -> bool:
    """Whether it is waited for this only as long as an estimate says."""
    return isinstance(one.what, Slot) and (one.what.state is SlotState.DRAINING or one.what.quiet)


def _number(what: Slot | int) -> int:
    """Of the upstream."""
    return what if isinstance(what, int) else what.number // MOST_SLOTS
