"""What can be decided for a waiting ticket, and the upstream it is decided for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from prefixproxy.prefix import BLOCK_ENDS, PrefixChain, blocks_within, bytes_of
from prefixproxy.routing import serving
from prefixproxy.schedule.ram import Loads
from prefixproxy.schedule.rates import Kept
from prefixproxy.schedule.roots import Gathering, Root, RootTable
from prefixproxy.schedule.slot import Held, Slot, continues
from prefixproxy.schedule.slots import Upstream
from prefixproxy.schedule.types import HoldReason, Policy, Reason, Ticket

WAIT_SLACK = 2.0
"""A wait for a busy slot is given up after this many times the expected time."""


@dataclass(slots=True, eq=False)
class Server:
    """An upstream with its roots. `rewarm`: it came back empty and has had no look at its snapshots yet."""

    slots: Upstream
    roots: RootTable
    rewarm: bool = False
    lost_at: float = -inf

    def rate(self, policy: Policy) -> float:
        """Prefill tokens per second."""
        return self.slots.rates.prefill or policy.assumed_prefill_rate

    def snapshots_off_because(self, policy: Policy, now: float) -> str:
        """ "" if roots can be warmed, saved and restored here now, else why not."""
        can = self.slots.facts.capabilities
        if not (can.snapshot and can.warm):
            return "the server cannot save slots" if can.warm else "roots cannot be warmed here"
        if self.slots.facts.reuse_off:
            return "reuse is off"
        if not policy.fork or not policy.max_snapshots:
            return "switched off"
        return self.roots.off_because or self.slots.unpinned_because(now)


class Group:
    """Some of the upstreams, in order."""

    __slots__ = ("numbers", "servers")

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers
        self.numbers = frozenset(server.slots.number for server in servers)

    def __iter__(self) -> Iterator[Server]:
        return iter(self.servers)

    def __len__(self) -> int:
        return len(self.servers)

    def __contains__(self, server: Server) -> bool:
        return server.slots.number in self.numbers


@dataclass(slots=True)
class Standing:
    """Why a hold stands whatever becomes of other prompts: as long as the `terms` are the same (`Fleet.terms`), one of
    the `servers` that are open has a slot that anybody may have, none of `without` has (upstreams with a better
    snapshot, and no slot for it), and nothing that was `seen` last of prompts with its `first` block (`Changes`), or
    was `measured`, has changed that; nor was it how long a copy takes (`copied`, None: no matter). `what` it waits for
    is on `server`, in that `turn` of a slot, perhaps `past` others that too many wait for, and has `more` tokens of the
    ticket than the cheapest place can have,
    which has from `least` to `most`. `rates`: of upstreams, with what slots keep there, and the `highest` of all.
    `best`: the cheapest place, if it has some of the ticket. `rest_s`: to evaluate what is not in the busy slot it
    waits for; `least_s`: no place is cheaper."""

    terms: tuple[object, ...]
    first: int
    seen: int
    measured: int
    copied: int | None
    servers: Group
    without: frozenset[int]
    server: Server
    what: Root | Slot | Gathering
    past: bool
    turn: int
    least: int
    most: int
    more: int
    rates: tuple[tuple[Server, float, Kept], ...]
    highest: float
    best: Slot | None
    rest_s: float | None = None
    least_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hold:
    """`server`: the number of the upstream it waits for. `standing`: it need not be looked at again before that
    falls."""

    reason: HoldReason
    until: float | None = None
    standing: Standing | None = None
    server: int | None = None


@dataclass(frozen=True, slots=True)
class Gather:
    """Open a window in which lanes that share `chain` are waited for."""

    server: Server
    chain: PrefixChain


@dataclass(frozen=True, slots=True)
class Place:
    """One way to run a ticket now: in `slot`, after `root` was restored into it if there is one."""

    server: Server
    slot: Slot
    root: Root | None
    cached: int
    cost_s: float
    reason: Reason = Reason.RESIDENT
    loads: Loads | None = None
    """What the server is counted on to load there from its own cache."""
    shares: int = 0
    """Blocks that the slot and the ticket have in common, whether or not they are reused, if these are more than a
    template opens every chat with; not told in a large fleet."""

    @property
    def rank(self) -> tuple[float, bool, int, int]:
        """The cheapest first; of those that cost the same one that need not be loaded, where most of the prompt is, as
        the server would choose (a checkpoint may lie nearer than it was taken to), that was left alone for longest."""
        return round(self.cost_s, 4), self.loads is not None, -self.shares, self.slot.turn


@dataclass(frozen=True, slots=True)
class WarmFirst:
    server: Server
    slot: Slot
    chain: PrefixChain
    leader: Ticket
    others: tuple[Ticket, ...]
    loads: Loads | None = None
    whole: bool = False
    """Not a root of several, but all of the leader's prompt."""

    @property
    def uncached(self) -> int:
        """Tokens that the warm-up is expected to evaluate."""
        there = self.chain.common_blocks(self.slot.held.chain)
        return tokens_of(self.leader, len(self.chain.hashes)) - tokens_of(self.leader, there)


@dataclass(frozen=True, slots=True)
class SaveFirst:
    """Save an idle slot as it is: several tickets share `chain` with it."""

    server: Server
    slot: Slot
    chain: PrefixChain
    leader: Ticket
    parked: bool = False
    """Nobody wants it now: it is about to be overwritten."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Let the server spread `need` sequences over its idle slots, or the first that comes free. `likely`: where it will
    find most of the prompt."""

    server: Server
    need: int
    likely: Slot | None = None


Decision = Hold | Gather | Place | WarmFirst | SaveFirst | Spread


def tokens_of(ticket: Ticket, blocks: int) -> int:
    """Estimated tokens in the first `blocks` blocks of a ticket."""
    return ticket.n_tokens * bytes_of(blocks) // ticket.chain.n_bytes if blocks else 0


def tokens_in(ticket: Ticket, n_bytes: int) -> int:
    """The same of its first bytes."""
    return ticket.n_tokens * n_bytes // ticket.chain.n_bytes if n_bytes else 0


def cuttable(ticket: Ticket, blocks: int) -> int:
    """The most of so many blocks behind which a ticket's prompt can be cut."""
    n_bytes = bytes_of(blocks)
    return next((blocks_within(start) for start, end in ticket.solid if start < n_bytes < end), blocks)


def blocks_for(ticket: Ticket, tokens: float) -> int:
    """The fewest blocks of a ticket that have more than so many tokens (`tokens_of`)."""
    n_bytes = -(-(int(tokens) + 1) * ticket.chain.n_bytes // ticket.n_tokens)
    return bisect_left(BLOCK_ENDS, n_bytes) + 1


def reuses(ticket: Ticket, server: Server) -> bool:
    """Whether any of it may come from what a slot holds."""
    return ticket.reuse and not server.slots.facts.reuse_off


def shared(ticket: Ticket, server: Server, held: Held) -> tuple[int, int]:
    """Tokens of a ticket that `held` has too, and the blocks; the server evaluates a prompt's last token always."""
    blocks = ticket.chain.common_blocks(held.chain) if reuses(ticket, server) else 0
    return max(0, min(held.tokens_at(blocks), ticket.n_tokens - 1)), blocks


def is_truncated(ticket: Ticket, server: Server, held: Held, blocks: int) -> bool:
    """Whether a prompt that shares so many blocks with `held` has to forget more than an answer there. A difference in
    the last, partial block matters only where slots cannot be cut back."""
    if blocks < len(held.chain.hashes):
        return True
    return not (server.slots.rolls_back or ticket.chain.goes_on(held.chain) or continues(ticket, held, blocks))


def kept_by_cut(ticket: Ticket, held: Held, blocks: int, *, starts: bool) -> int:
    """Tokens of a ticket before the last checkpoint in what both share; no more than in whole blocks, as all that is
    compared with it."""
    return min(tokens_in(ticket, held.cut_for(ticket.chain, blocks, starts=starts)), tokens_of(ticket, blocks))


def evaluated(ticket: Ticket, server: Server, slot: Slot) -> Held:
    """What a ticket finds evaluated in an idle slot. Where one cache serves all: whatever of it anybody evaluated."""
    if not server.slots.facts.capabilities.shared_cache:
        return slot.held
    known = (s.held for s in server.slots.slots if s.idle or s.first_token_at is not None)
    return max(known, key=lambda held: ticket.chain.common_blocks(held.chain), default=slot.held)


def prefill_s(slot: Slot, server: Server, policy: Policy) -> float:
    """How long the prefill in a leased slot may take. Where its end does not show, what is expected of it must do."""
    expected_s = WAIT_SLACK * slot.uncached / server.rate(policy)
    return min(policy.max_warm_s, expected_s) if slot.quiet else policy.max_warm_s


def serving_servers(servers: Sequence[Server], ticket: Ticket) -> list[Server]:
    """Of all upstreams ever seen, those that are up and may get this ticket (`routing.serving`); of these, those whose
    slots are long enough, or all."""
    found = [server for server in servers if server.slots.up]
    if len(servers) > 1:
        down = [server.slots.facts for server in servers if not server.slots.up]
        chosen = {one.name for one in serving(ticket.model, ticket.path, [s.slots.facts for s in found], down)}
        found = [server for server in found if server.slots.name in chosen]
    if ticket.needs_ctx and len(found) > 1:
        return [s for s in found if (s.slots.facts.n_ctx_slot or ticket.needs_ctx) >= ticket.needs_ctx] or found
    return found
