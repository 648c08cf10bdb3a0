"""All upstreams of one scheduler, and what can be asked of them together without a look at each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from prefixproxy.schedule.census import Census
from prefixproxy.schedule.index import Index
from prefixproxy.schedule.plan import Group, Hold, Server, serving_servers, tokens_of
from prefixproxy.schedule.roots import RootTable
from prefixproxy.schedule.slot import Slot, Work
from prefixproxy.schedule.slots import MOST_SLOTS, Upstream
from prefixproxy.schedule.types import HoldReason, Policy, Ticket
from prefixproxy.types import SlotState, TicketId, UpstreamFacts

_MOST_LISTS = 1024
FEW_SLOTS = 32
"""Up to so many it is as fast to look at every one."""
_FEW_SERVERS = 4
_UNRESOLVED = (SlotState.RESERVED, SlotState.DRAINING, SlotState.FOREIGN)


class Fleet:
    """Upstreams in the order in which they first came up. `restless` ones are looked at with every event, the others
    only when a ticket may go there."""

    def __init__(self, few_slots: int = FEW_SLOTS) -> None:
        self.census = Census()
        self._few_slots = few_slots
        self._index: Index | None = None
        self._indexed = False
        self._servers: dict[str, Server] = {}
        self._numbered: list[Server] = []
        self._up: list[Server] | None = None
        self.epoch = 0
        """Grows when an upstream comes up, is lost or becomes another than it was."""
        self._reuse_off: tuple[str, ...] = ()
        self._rewarming: set[int] | None = None
        self._serving: dict[tuple[str, str, int], Group] = {}

    def __iter__(self) -> Iterator[Server]:
        return iter(self._numbered)

    def __len__(self) -> int:
        return len(self._numbered)

    @property
    def by_name(self) -> Mapping[str, Server]:
        return self._servers

    def get(self, name: str) -> Server | None:
        return self._servers.get(name)

    def numbered(self, number: int) -> Server:
        return self._numbered[number]

    def obtain(self, facts: UpstreamFacts) -> Server:
        """The upstream of this name, known or new."""
        known = self._servers.get(facts.name)
        if known is None:
            upstream = Upstream(facts, len(self._numbered), self.census)
            known = self._servers[facts.name] = Server(upstream, RootTable(facts.name))
            self._numbered.append(known)
        return known

    def changed(self) -> None:
        """An upstream came up, was lost, or is another than it was."""
        self._up = None
        self.epoch += 1
        self._serving.clear()
        self._indexed = False
        self._rewarming = None

    def index(self, policy: Policy) -> Index | None:
        """All slots by what they hold, up to date; None of a small fleet."""
        if not self._indexed or (self._index is not None and self._index.policy is not policy):
            large = sum(len(server.slots.slots) for server in self.up()) > self._few_slots
            self.census.noting = large
            self._index = Index(self.census, self.up(), policy) if large else None
            self._indexed = True
        if self._index is not None:
            self._index.refresh()
        return self._index

    def uncached_tokens(self, ticket: Ticket, policy: Policy) -> int:
        """Tokens a ticket would make the best server evaluate as things stand, at least one."""
        if not ticket.reuse:
            return ticket.n_tokens
        index = self.index(policy) if len(self) > _FEW_SERVERS else None
        if index is not None and not index.odd:
            blocks = index.deepest(ticket.chain)
        else:
            able = (server for server in self.up() if not server.slots.facts.reuse_off)
            blocks = max((server.slots.counts.deepest(ticket.chain) for server in able), default=0)
        return max(1, ticket.n_tokens - tokens_of(ticket, blocks))

    def up(self) -> list[Server]:
        if self._up is None:
            self._up = [server for server in self._numbered if server.slots.up]
            self._reuse_off = tuple(server.slots.name for server in self._up if server.slots.facts.reuse_off)
        return self._up

    def serving(self, ticket: Ticket) -> Group:
        """Those that may get this ticket."""
        key = ticket.model, ticket.path, ticket.needs_ctx
        known = self._serving.get(key)
        if known is None:
            if len(self._serving) >= _MOST_LISTS:
                self._serving.clear()
            known = self._serving[key] = Group(serving_servers(self._numbered, ticket))
        return known

    # who is to be looked after

    def restless(self) -> list[Server]:
        numbers = self.census.restless
        return [self._numbered[number] for number in (sorted(numbers) if len(numbers) > 1 else numbers)]

    def rewarming(self) -> list[Server]:
        """Those that came back empty and have had no look at their snapshots yet."""
        if self._rewarming is None:
            self._rewarming = {server.slots.number for server in self if server.rewarm}
        self._rewarming = {number for number in self._rewarming if self._numbered[number].rewarm}
        return [self._numbered[number] for number in sorted(self._rewarming)]

    def note_rewarm(self, server: Server) -> None:
        """It turned out to be empty."""
        if self._rewarming is not None and server.rewarm:
            self._rewarming.add(server.slots.number)

    def stir(self) -> None:
        self.census.restless.update(range(len(self._numbered)))

    def calm_down(self, policy: Policy, now: float) -> None:
        """Those of whom nothing is unresolved are left alone until something touches them."""
        for server in self.restless():
            if is_calm(server, policy, now):
                self.census.restless.discard(server.slots.number)

    # questions about all

    def state(self, policy: Policy, now: float) -> tuple[object, ...]:
        """Equal as long as nothing changed that could let a held ticket go."""
        self.up()
        return (self.census.version, self._reuse_off, *self.terms(policy, now)[1:])

    def terms(self, policy: Policy, now: float) -> tuple[object, ...]:
        """Equal as long as the same requests may be sent to the same upstreams."""
        flags: list[object] = [self.epoch, policy]
        for server in self.restless():
            table = server.slots
            if table.up:
                flag = table.unpinned_because(now), table.choosing(now), table.stale(now)
                if any(flag):
                    flags.append((table.name, *flag))
        return tuple(flags)

    def any_open(self) -> bool:
        """Whether any slot may take a request: an idle one, or in its turn one that others use."""
        return self.census.open_slots > 0

    def busy(self, running: int) -> int:
        """Requests and warm-ups that keep the servers at work; `running` tickets are granted."""
        for server in self.restless():
            running += sum(slot.work is Work.WARM for slot in server.slots.in_state(SlotState.RESERVED))
            running += len(server.slots.in_state(SlotState.DRAINING))
        return running

    def lost_at(self) -> float:
        """When one was lost last, as far as that may still matter."""
        return max((server.lost_at for server in self.restless()), default=-inf)

    # what is prepared for a ticket

    def prepared(self, ticket: Ticket, servers: Group) -> Hold | None:
        """A slot is being prepared for it on one of these."""
        slot = self.prepared_slot(ticket, servers)
        return None if slot is None else prepared(slot)

    def prepared_slot(self, ticket: Ticket, servers: Group) -> Slot | None:
        for slot in self.census.promised_to(ticket.id):
            if slot.state is SlotState.RESERVED and self._servers[slot.id.upstream] in servers:
                return slot
        return None

    def release_promise(self, ticket: TicketId) -> None:
        """A ticket no longer waits for the slot that was prepared for it."""
        self._release(self.census.promised_to(ticket))

    def release_idle(self, ticket: TicketId) -> bool:
        """The slots that are ready for it are anybody's again; whether there were any."""
        ready = [slot for slot in self.census.promised_to(ticket) if slot.idle]
        self._release(ready)
        return bool(ready)

    def _release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.census.promise(slot, None)
            self._servers[slot.id.upstream].slots.touch()


def prepared(slot: Slot) -> Hold:
    return Hold(HoldReason.RESTORING if slot.work is Work.RESTORE else HoldReason.WARMING, slot.until)


def is_calm(server: Server, policy: Policy, now: float) -> bool:
    """Whether time alone changes nothing here, nothing has to be asked, and nothing is under way but requests."""
    slots = server.slots
    return (
        slots.up
        and slots.observed
        and not slots.facts.shared
        and not (slots.poll_soon or slots.confirm or slots.doubted or slots.several or server.roots.gatherings)
        and slots.settling is None
        and now >= max(slots.foreign_until, slots.haunted_until, slots.copies_until)
        and now >= server.lost_at + policy.reconnect_s
        and len(server.roots.roots) <= policy.max_roots
        and not any(slots.has(state) for state in _UNRESOLVED)
    )


def in_state(server: Server, state: SlotState, these: Sequence[Slot] | None) -> Sequence[Slot]:
    """The slots of one upstream that are in a state; of `these` alone, if that is not None."""
    if these is None:
        return server.slots.in_state(state)
    name = server.slots.name
    return [slot for slot in these if slot.state is state and slot.id.upstream == name]


def by_server(fleet: Fleet, slots: Sequence[Slot], servers: Group) -> list[Server]:
    """The upstreams of these slots, in order."""
    numbers = {slot.number // MOST_SLOTS for slot in slots if slot.state is SlotState.LEASED}
    return [fleet.numbered(number) for number in sorted(numbers & servers.numbers)]
