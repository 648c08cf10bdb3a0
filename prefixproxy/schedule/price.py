"""What it costs to run a waiting ticket in each idle slot, in seconds: evaluating what is not cached, copying a
snapshot, and the value of what is overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prefixproxy.prefix import bytes_of
from prefixproxy.schedule.counts import PrefixCounts
from prefixproxy.schedule.fleet import Fleet
from prefixproxy.schedule.index import Index
from prefixproxy.schedule.park import can_save, is_parked, worthwhile_tokens
from prefixproxy.schedule.plan import Place, Server, evaluated, is_truncated, kept_by_cut, reuses, tokens_of
from prefixproxy.schedule.queue import Waiting
from prefixproxy.schedule.ram import KEPT_ENOUGH, Loads, kept
from prefixproxy.schedule.roots import Root
from prefixproxy.schedule.slot import Held, Slot, continues
from prefixproxy.schedule.slots import REUSE_CHANCE, REUSE_HALF_LIFE_S
from prefixproxy.schedule.tree import Path
from prefixproxy.schedule.types import HoldReason, Policy, Reason, Ticket
from prefixproxy.types import SlotId, TicketId


@dataclass(slots=True)
class Prices:
    """One look at all state at `now`. `line`: who waits, in order, `counts`: what their prompts
    share. `closed`: upstreams that take no more in this look,
    and why. `bound_for`: tickets ahead that wait for a busy slot, `ahead`: those that wait for what is under way on an
    upstream, by its number, `full`: those of them that have no slot left for another one. `yielding`: whether a ticket
    may be overtaken."""

    fleet: Fleet
    line: Sequence[Waiting]
    counts: PrefixCounts
    policy: Policy
    now: float
    running: int
    closed: dict[str, HoldReason] = field(default_factory=dict)
    bound_for: dict[SlotId, int] = field(default_factory=dict)
    ahead: dict[int, int] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)
    yielding: bool = True
    index: Index | None = None
    """Of a large fleet, as it is for this decision."""
    _forking: dict[str, bool] = field(default_factory=dict)
    _saved: dict[tuple[TicketId, str], tuple[Root, int] | None] = field(default_factory=dict)
    _paths: dict[TicketId, tuple[int, Path]] = field(default_factory=dict)

    def worth(self, server: Server, tokens: float) -> bool:
        """Whether so many tokens cost more than a warm-up is worth."""
        return tokens > worthwhile_tokens(server, self.policy)

    def can_fork(self, server: Server) -> bool:
        known = self._forking.get(server.slots.name)
        if known is None:
            known = self._forking[server.slots.name] = not server.snapshots_off_because(self.policy, self.now)
        return known

    def usable(self, ticket: Ticket, server: Server) -> Iterator[Slot]:
        """The idle slots of one upstream that a ticket may use."""
        return (slot for slot in server.slots.slots if self.may_use(ticket, server, slot))

    def may_use(self, ticket: Ticket, server: Server, slot: Slot) -> bool:
        if not slot.idle or slot.promised not in (None, ticket.id):
            return False
        if not self.policy.side_slots:
            return True
        n_slots = len(server.slots.slots)
        kept = n_slots - min(self.policy.side_slots, n_slots - 1)
        return kept == n_slots or ticket.side == (slot.id.slot >= kept)

    def reuse(self, ticket: Ticket, server: Server, held: Held, can_fork: bool = False) -> tuple[int, int]:
        """Tokens of the ticket expected to be reused from `held`, and the blocks they share. In the ticket's own
        estimate, as is everything that is weighed here: an exact count beside an estimate would look like a gap."""
        if not reuses(ticket, server):
            return 0, 0
        blocks = ticket.chain.common_blocks(held.chain)
        tokens = tokens_of(ticket, blocks)
        if is_truncated(ticket, server, held, blocks):
            tokens = self.kept(ticket, server, held, blocks, can_fork)
        elif held.answered:
            tokens = int(tokens * server.slots.turn_share)
        return tokens, blocks

    def kept(self, ticket: Ticket, server: Server, held: Held, blocks: int, can_fork: bool) -> int:
        """Tokens that stay of the blocks that both share when the rest has to go."""
        if held.cuts and not server.slots.rolls_back:
            rates = server.slots.rates
            share = rates.cut_share(can_fork and server.slots.trying is not None)
            return int(kept_by_cut(ticket, held, blocks, starts=rates.takes_starts) * share)
        facts = server.slots.facts
        if not facts.capabilities.rolls_back and bytes_of(blocks) <= len(facts.template.opening):
            return 0  # what every chat begins with: no miss would tell that so little is not kept
        return int(tokens_of(ticket, blocks) * server.slots.kept_share(can_fork))

    def places(self, waiting: Waiting, server: Server) -> list[Place]:
        ticket, rate = waiting.ticket, server.rate(self.policy)
        idle = list(self.usable(ticket, server))
        promised = [slot for slot in idle if slot.promised == ticket.id]
        idle = promised or idle
        direct = [self.direct(ticket, server, slot, rate) for slot in idle]
        forks = [] if promised or not idle else self.forks(ticket, server, idle)
        if self.is_displaced(ticket, server, max((place.cached for place in direct + forks), default=0)):
            # a pin to an empty slot bypasses the server's RAM cache (llama-server computes 0/0 similarity there), a pin
            # to one that holds something consults it
            direct = [place for place in direct if place.slot.dirty] or direct
        return direct + forks

    def is_displaced(self, ticket: Ticket, server: Server, cached: int) -> bool:
        """Whether what lost its slot has more of a ticket than these tokens, and may be in the server's own cache. A
        large fleet does not look for that."""
        ram = server.slots.ram
        if self.index is not None or not (server.slots.evicted and ram.limit and reuses(ticket, server)):
            return False
        return ram.most_of(ticket.chain, lambda held: self.reuse(ticket, server, held)[0]) > cached

    def direct(self, ticket: Ticket, server: Server, slot: Slot, rate: float) -> Place:
        cached, _ = self.reuse(ticket, server, evaluated(ticket, server, slot), self.can_fork(server))
        kept = ticket.chain.common_blocks(slot.held.chain) if reuses(ticket, server) else 0
        extends = continues(ticket, slot.held, kept)
        copied = is_parked(server, slot) or self.in_host_cache(server, slot, kept)
        lost_s = 0.0 if extends or copied else server.slots.lost_s(slot, kept, rate, self.now)
        lost_s += self.lost_soon_s(ticket, server, slot)
        loads = self.loaded(ticket, server, slot)
        if loads is not None:
            cached, reason = loads.tokens, Reason.HOST_CACHE
            lost_s += self.moved_s(ticket, loads, rate)
        elif cached:
            reason = Reason.RESIDENT
        elif ticket.side:
            reason = Reason.SIDE
        else:
            reason = Reason.LEAST_VALUABLE if slot.dirty else Reason.EMPTY_SLOT
        shares = kept if self.index is None and bytes_of(kept) > len(server.slots.facts.template.opening) else 0
        return Place(server, slot, None, cached, (ticket.n_tokens - cached) / rate + lost_s, reason, loads, shares)

    def in_host_cache(self, server: Server, slot: Slot, kept: int) -> bool:
        """Whether the server copies what is lost to its own cache, when something starts there that shares so many
        blocks with it; then any slot gets it back. Not in a large fleet, as the index does not know of that."""
        slots, held = server.slots, slot.held
        if self.index is not None or not slots.ram.limit or held.tokens_at(kept) >= KEPT_ENOUGH * held.tokens:
            return False
        return slots.ram.has_room_for(held, slots.rates.bytes_per_token)

    def lost_soon_s(self, ticket: Ticket, server: Server, slot: Slot) -> float:
        """The same of the ticket's own prompt, in a slot that may be cleared before that is asked for. Not in a large
        fleet, where slots that hold the same are taken to cost the same."""
        if self.index is not None or not server.slots.cleared.n or can_save(server, self.policy, self.now):
            return 0.0
        chance = REUSE_CHANCE * server.slots.cleared.chance(slot, REUSE_HALF_LIFE_S, self.now)
        return ticket.n_tokens / server.rate(self.policy) * chance

    def loaded(self, ticket: Ticket, server: Server, slot: Slot) -> Loads | None:
        """What the server would load into this slot from its own cache, more of the ticket than the slot has. In a
        large fleet nothing is counted on: the index knows of slots and files alone."""
        if self.index is not None or not slot.held.tokens or not reuses(ticket, server):
            return None
        if server.slots.rolls_back and (ticket.n_seqs > 1 or not server.slots.ram.proven):
            return None  # files serve as well, and nothing is loaded for a prompt that is sent without a slot
        if kept(slot.held, ticket.chain) >= KEPT_ENOUGH:
            return None
        found = server.slots.ram.find(ticket.chain, lambda held: self.reuse(ticket, server, held)[0])
        return found if found is not None and found.tokens > self.reuse(ticket, server, slot.held)[0] else None

    def moved_s(self, ticket: Ticket, loads: Loads, rate: float) -> float:
        """The value of what is lost of an entry that another conversation left: the server moves it to the slot."""
        held = loads.held
        if ticket.chain.goes_on(held.chain) or continues(ticket, held, ticket.chain.common_blocks(held.chain)):
            return 0.0
        return REUSE_CHANCE * max(0, held.tokens - loads.tokens) / rate

    def forks(self, ticket: Ticket, server: Server, idle: Sequence[Slot]) -> list[Place]:
        saved = self.best_saved(ticket, server)
        if saved is None:
            return []
        root, cached = saved
        cost_s = self.fork_s(ticket, server, root, cached)
        places = (self.fork(ticket, server, slot, root, cached, cost_s) for slot in idle)
        return [place for place in places if place is not None]

    def fork_s(self, ticket: Ticket, server: Server, root: Root, cached: int) -> float:
        rate = server.rate(self.policy)
        return server.slots.rates.restore_s(root.n_bytes) + (ticket.n_tokens - cached) / rate

    def fork(self, ticket: Ticket, server: Server, slot: Slot, root: Root, cached: int, cost_s: float) -> Place | None:
        """A copy of `root` in this slot, where that has more of the ticket. `cost_s`: but for what is lost."""
        there, kept = self.reuse(ticket, server, slot.held, can_fork=True)
        if there >= cached:
            return None
        rate = server.rate(self.policy)
        lost_s = 0.0 if is_parked(server, slot) else server.slots.lost_s(slot, kept, rate, self.now)
        return Place(server, slot, root, cached, cost_s + lost_s, Reason.FORKED)

    def start_over(self) -> None:
        """Before the first ticket in line."""
        self.bound_for.clear()
        self.ahead.clear()
        self.full.clear()

    def go_past(self, waiting: Waiting) -> None:
        """It goes on waiting, ahead of all that come now."""
        if waiting.bound_for is not None and not waiting.gone:
            self.ahead[waiting.bound_for] = self.ahead.get(waiting.bound_for, 0) + 1
            if self.is_taken(self.fleet.numbered(waiting.bound_for)):
                self.full.add(waiting.bound_for)

    def is_taken(self, server: Server) -> bool:
        """Whether every slot of an upstream has to come free once more before another ticket gets one: what is under
        way there has one, and each ticket ahead that waits for it."""
        return self.ahead.get(server.slots.number, 0) + 1 >= len(server.slots.slots)

    def changed(self) -> None:
        """Effects took place since the last decision."""
        self._saved.clear()

    def best_saved(self, ticket: Ticket, server: Server) -> tuple[Root, int] | None:
        key = ticket.id, server.slots.name
        if key not in self._saved:
            self._saved[key] = self._find_saved(ticket, server) if self.can_fork(server) else None
        return self._saved[key]

    def _find_saved(self, ticket: Ticket, server: Server) -> tuple[Root, int] | None:
        best: tuple[Root, int] | None = None
        for root in self._saved_roots(ticket, server):
            if root.snapshot is not None and not root.running:
                cached = self.reuse_of_file(ticket, server, root.snapshot, root.parked)
                if cached > (best[1] if best else 0):
                    best = root, cached
        return best

    def reuse_of_file(self, ticket: Ticket, server: Server, held: Held, parked: bool) -> int:
        cached, blocks = self.reuse(ticket, server, held)
        if blocks == len(held.chain.hashes):
            return cached
        return int(cached * server.slots.rates.file_share(parked, server.slots.facts.capabilities.rolls_back))

    def _saved_roots(self, ticket: Ticket, server: Server) -> Iterable[Root]:
        """Those with a snapshot that may be the best for a ticket, in order."""
        if self.index is None or server.slots.number in self.index.odd:
            return server.roots.saved()
        return self.index.saved_roots(self.path(ticket), server)

    # what shares something with a ticket, in a large fleet

    def path(self, ticket: Ticket) -> Path:
        """Where the ticket's prompt goes through the index."""
        index = self.index
        assert index is not None
        known = self._paths.get(ticket.id)
        if known is None or known[0] != index.generation:
            path = index.tree.path(ticket.chain.hashes if ticket.reuse else ())
            known = self._paths[ticket.id] = index.generation, path
        return known[1]

    def least_worth(self) -> float:
        """The fewest tokens that are worth a warm-up anywhere; 0 of a small fleet."""
        return 0.0 if self.index is None else self.index.bounds()[1]

    def sharing(self, ticket: Ticket, tokens: float) -> Sequence[Slot] | None:
        """The slots that share more than so many tokens with it, or some that do not, in order; None: all may."""
        index = self.index
        if index is None or index.odd:
            return None
        for blocks, node in self.path(ticket):
            if tokens_of(ticket, blocks) > tokens:
                return node.slots()
        return ()
