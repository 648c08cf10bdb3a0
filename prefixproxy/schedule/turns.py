"""Whose turn it is: tenants share the prefill by weight, and within each its families take turns.

Both are charged by what they make the servers evaluate, cached tokens are free: an estimate when a ticket is granted or
a root is warmed for it, put right when the server has told. Tenants go by start-time fair queueing (each ticket starts
where its tenant's earlier ones end, the lowest start first), which is deficit round robin with the smallest quantum.
Families go by rounds of `Policy.family_quantum` tokens: a wave of lanes on one root is served by arrival and stays
together, a family that has had its quantum lets the others of its tenant have theirs. A ticket that others of its
tenant passed `Policy.max_passed` times has had enough of it and goes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prefixproxy.schedule.plan import Server, tokens_of
from prefixproxy.schedule.types import Policy, Share, Ticket
from prefixproxy.types import Priority, SlotState

MAX_FAMILIES = 4096
"""Accounts of families kept while somebody waits; beyond it those go that wait for nothing."""
_NO_SHARE = Share()


class Turn(Protocol):
    """What is asked of a waiting ticket. `cost`: tokens it is expected to evaluate; `passed`: how many later ones of
    its tenant went first."""

    ticket: Ticket
    seq: int
    cost: int
    passed: int


T = TypeVar("T", bound=Turn)


@dataclass(frozen=True, slots=True)
class Charge:
    """What was charged for a ticket, and in which era: the accounts of an earlier one are closed."""

    tokens: int
    era: int


def share_of(policy: Policy, tenant: str) -> Share:
    return policy.shares.get(tenant, _NO_SHARE)


def is_batch(turn: Turn) -> bool:
    return turn.ticket.priority is Priority.BATCH


class Accounts:
    """What each tenant (in tokens over its weight) and each family of it (in tokens) was charged in this era."""

    def __init__(self) -> None:
        self.era = 0
        self._tenants: dict[str, float] = {}
        self._families: dict[tuple[str, str], float] = {}

    def charge(self, ticket: Ticket, tokens: int, policy: Policy) -> None:
        tenant, family = ticket.tenant, (ticket.tenant, ticket.family)
        self._tenants[tenant] = self._tenants.get(tenant, 0.0) + tokens / share_of(policy, tenant).weight
        self._families[family] = self._families.get(family, 0.0) + tokens

    def close(self) -> None:
        """Nobody waits: nobody has to be remembered."""
        self.era += 1
        self._tenants.clear()
        self._families.clear()

    def join(self, ticket: Ticket, waiting: Iterable[Ticket]) -> None:
        """A ticket comes. Who comes back from idleness has saved up nothing: it starts where the least charged one of
        those who wait stands."""
        waiting = list(waiting)
        tenants = {other.tenant for other in waiting}
        families = {(other.tenant, other.family) for other in waiting if other.tenant == ticket.tenant}
        _start_no_earlier(self._tenants, ticket.tenant, tenants)
        _start_no_earlier(self._families, (ticket.tenant, ticket.family), families)
        if len(self._families) > MAX_FAMILIES:
            kept = {(other.tenant, other.family) for other in [*waiting, ticket]}
            self._families = {key: spent for key, spent in self._families.items() if key in kept}

    def order(self, line: Iterable[T], policy: Policy) -> list[T]:
        """Everybody, first to be served first: interactive before batch, always. Policy "fifo": then by arrival."""
        arrived = [turn for *_, turn in sorted((is_batch(turn), turn.seq, turn) for turn in line)]
        if policy.policy == "fifo":
            return arrived
        tenants: dict[str, list[T]] = {}
        for turn in arrived:
            tenants.setdefault(turn.ticket.tenant, []).append(turn)
        in_turn = {tenant: self._families_in_turn(tenant, turns, policy) for tenant, turns in tenants.items()}
        if len(in_turn) == 1:
            return [turn for turn, _ in next(iter(in_turn.values()))]
        starts: list[tuple[bool, float, int, T]] = []
        for tenant, turns in in_turn.items():
            start, weight = self._tenants.get(tenant, 0.0), share_of(policy, tenant).weight
            for turn, cost in turns:
                starts.append((is_batch(turn), start, turn.seq, turn))
                start += cost / weight
        return [turn for *_, turn in sorted(starts)]

    def _families_in_turn(self, tenant: str, turns: Sequence[T], policy: Policy) -> list[tuple[T, int]]:
        """One tenant's tickets with what each is expected to cost: a head is paid by the first that waits for it."""
        spent: dict[str, float] = {}
        rounds: list[tuple[bool, float, int, T, int]] = []
        for turn in turns:
            family, cost = turn.ticket.family, turn.cost
            if family in spent and turn.ticket.reuse:
                cost = max(1, min(cost, turn.ticket.n_tokens - tokens_of(turn.ticket, turn.ticket.head_blocks)))
            before = spent.get(family, self._families.get((tenant, family), 0.0))
            spent[family] = before + cost
            place = -1.0 if turn.passed >= policy.max_passed else before // policy.family_quantum
            rounds.append((is_batch(turn), place, turn.seq, turn, cost))
        return [(turn, cost) for *_, turn, cost in sorted(rounds)]


K = TypeVar("K")


def _start_no_earlier(spent: dict[K, float], who: K, waiting: set[K]) -> None:
    if who not in waiting:
        floor = min((spent.get(other, 0.0) for other in waiting), default=0.0)
        spent[who] = max(spent.get(who, 0.0), floor)


def slots_held(servers: Iterable[Server], tenant: str) -> int:
    """The slots a tenant has: those its requests run in, those not yet seen idle behind one that broke off, and those
    prepared for one that waits."""
    held = 0
    for server in servers:
        for slot in server.slots.slots:
            if slot.tenant == tenant:
                draining = slot.state is SlotState.DRAINING and not slot.ended
                held += slot.state is SlotState.LEASED or draining or slot.promised is not None
        settling = server.slots.settling
        if settling is not None and settling.tenant == tenant:
            held += settling.need
    return held


def is_over(ticket: Ticket, servers: Sequence[Server], policy: Policy) -> bool:
    """Whether a ticket would take its tenant over the slots it may have."""
    limit = share_of(policy, ticket.tenant).max_slots
    if not limit:
        return False
    own = sum(slot.promised == ticket.id for server in servers for slot in server.slots.slots)
    need = ticket.n_seqs if any(ticket.n_seqs <= len(server.slots.slots) for server in servers) else 1
    return slots_held(servers, ticket.tenant) - own + need > limit
