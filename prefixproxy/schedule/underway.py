"""What is being evaluated of a prompt already: lanes gathered, roots on their way, prefills, requests cut off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.fleet import Fleet
from prefixproxy.schedule.plan import WAIT_SLACK, Hold, Server, Standing, prefill_s, tokens_of
from prefixproxy.schedule.price import Prices
from prefixproxy.schedule.roots import Gathering, Root
from prefixproxy.schedule.slot import Slot
from prefixproxy.schedule.slots import MOST_SLOTS
from prefixproxy.schedule.tree import Path
from prefixproxy.schedule.types import HoldReason, Policy, Ticket
from prefixproxy.types import SlotState

DRAIN_WAIT_S = 2.0
"""How long a prompt waits for a slot whose client left while it evaluated the same: many send the same bytes again."""


@dataclass(frozen=True, slots=True, eq=False)
class UnderWay:
    """One of these. `until`: when it is no longer waited for."""

    server: Server
    what: Gathering | Root | Slot
    reason: HoldReason
    until: float

    @property
    def hold(self) -> Hold:
        return self.hold_standing(None)

    def hold_standing(self, why: Standing | None) -> Hold:
        """For as long as `why` says. Who has a slot prepared for it takes no other one."""
        return Hold(self.reason, self.until, why, None if self.is_prepared else self.server.slots.number)

    @property
    def is_prepared(self) -> bool:
        """It is a slot that is prepared for one ticket."""
        return isinstance(self.what, Slot) and self.what.state is SlotState.RESERVED

    @property
    def is_root(self) -> bool:
        return isinstance(self.what, Root)

    @property
    def chain(self) -> PrefixChain:
        return self.what.held.chain if isinstance(self.what, Slot) else self.what.chain

    def block(self, number: int) -> int | None:
        """The last of its first `number` blocks, if it has so many."""
        hashes = self.chain.hashes
        return hashes[number - 1] if number <= len(hashes) else None

    def has_more(self, prices: Prices, ticket: Ticket, cached: int) -> bool:
        """Whether it will have so much more of the ticket than `cached` tokens that it is waited for."""
        server, what = self.server, self.what
        if isinstance(what, Root):
            # its prefill is paid already, so it need not be worth a warm-up: it only has to take longer than the copy
            more = tokens_of(ticket, ticket.chain.common_blocks(what.chain)) - cached
            return more > server.rate(prices.policy) * server.slots.rates.copy_s(what.tokens)
        if prices.now >= self.until:
            return False
        if isinstance(what, Gathering):
            return prices.worth(server, tokens_of(ticket, ticket.chain.common_blocks(what.chain)) - cached)
        reused, _ = prices.reuse(ticket, server, what.held)
        return prices.worth(server, reused - cached)


def under_way(server: Server, policy: Policy) -> Iterator[UnderWay]:
    """All on one upstream, in the order in which they are asked."""
    yield from roots_under_way(server)
    for slot in server.slots.in_state(SlotState.LEASED):
        if slot.first_token_at is None:
            yield _prefill(server, slot, policy)
    for slot in server.slots.in_state(SlotState.DRAINING):
        yield _cut_off(server, slot, policy)


def roots_under_way(server: Server) -> Iterator[UnderWay]:
    for gathering in server.roots.gatherings:
        yield UnderWay(server, gathering, HoldReason.GATHERING, gathering.until)
    for root in server.roots.running():
        yield UnderWay(server, root, HoldReason.WARMING, root.until)


def _prefill(server: Server, slot: Slot, policy: Policy) -> UnderWay:
    return UnderWay(server, slot, HoldReason.LEADER, slot.since + prefill_s(slot, server, policy))


def _cut_off(server: Server, slot: Slot, policy: Policy) -> UnderWay:
    """A prefill that the server does not break off (no progress can be asked for in /v1/messages) goes on to its end:
    then it need not be done twice."""
    prefilling = slot.first_token_at is None and not slot.ended
    rest_s = WAIT_SLACK * slot.uncached / server.rate(policy) if prefilling else 0.0
    until = slot.since + max(DRAIN_WAIT_S, min(policy.max_warm_s, rest_s))
    return UnderWay(server, slot, HoldReason.LEADER, until)


def under_way_of(slots: list[Slot], server: Server, policy: Policy) -> Iterator[UnderWay]:
    """The same of these slots of one upstream alone."""
    yield from roots_under_way(server)
    for slot in slots:
        if slot.state is SlotState.LEASED and slot.first_token_at is None:
            yield _prefill(server, slot, policy)
    for slot in slots:
        if slot.state is SlotState.DRAINING:
            yield _cut_off(server, slot, policy)


def alike(fleet: Fleet, path: Path, first: int, policy: Policy) -> list[UnderWay]:
    """All whose first block is that of this path, over all upstreams in order."""
    mine: dict[int, list[Slot]] = {}
    for slot in path[1][1].slots() if len(path) > 1 else ():
        if slot.state is SlotState.DRAINING or (slot.state is SlotState.LEASED and slot.first_token_at is None):
            mine.setdefault(slot.number // MOST_SLOTS, []).append(slot)
    numbers = sorted(fleet.census.restless | mine.keys())
    found = (one for n in numbers for one in under_way_of(mine.get(n, []), fleet.numbered(n), policy))
    return [one for one in found if one.block(1) == first]
