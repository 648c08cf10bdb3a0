"""Who waits, and in which order: interactive before batch, tenants in turn, first come first served within a tenant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prefixproxy.schedule_slots import PrefixCounts
from prefixproxy.schedule_types import HoldReason, Reason, Ticket
from prefixproxy.types import Priority, TicketId


@dataclass(slots=True)
class Waiting:
    """One ticket in the queue. `hold` and `until`: what the last look at it found. `overtaken`: how often a later one
    went first. `gathered`: lanes that share its root were waited for. `plain`: no root is warmed for it any more, and
    why. `patience`: until when it may wait for a busy slot that holds its prefix. `decided`: the state of all
    upstreams that `hold` was found in."""

    ticket: Ticket
    seq: int
    hold: HoldReason = HoldReason.NO_SLOT
    until: float | None = None
    overtaken: int = 0
    gathered: bool = False
    plain: Reason | None = None
    patience: float | None = None
    decided: tuple[object, ...] | None = None

    def stands(self, state: tuple[object, ...], now: float) -> bool:
        """Whether what the last look at it found still holds."""
        over = self.until is not None and self.until <= now
        return self.decided == state and not over and self.hold is not HoldReason.OVERTAKEN


class Queue:
    """Waiting tickets by id. Tenants share by start-time fair queueing: each has a virtual time that grows by the
    tokens it made the servers evaluate, and who is furthest behind goes first. One tenant alone is plain FIFO."""

    def __init__(self) -> None:
        self.counts = PrefixCounts()
        """How many waiting prompts share each block."""
        self._waiting: dict[TicketId, Waiting] = {}
        self._spent: dict[str, float] = {}
        self._seq = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def get(self, ticket: TicketId) -> Waiting | None:
        return self._waiting.get(ticket)

    def add(self, ticket: Ticket) -> None:
        """Append; a tenant that comes back from idleness has saved up nothing."""
        if all(waiting.ticket.tenant != ticket.tenant for waiting in self):
            floor = min((self._spent.get(w.ticket.tenant, 0.0) for w in self), default=0.0)
            self._spent[ticket.tenant] = max(self._spent.get(ticket.tenant, 0.0), floor)
        self._seq += 1
        self._waiting[ticket.id] = Waiting(ticket, self._seq)
        self.counts.add(ticket.chain)

    def replace(self, ticket: Ticket) -> None:
        """The same request with another prompt: it keeps its place."""
        waiting = self._waiting.get(ticket.id)
        if waiting is not None:
            self.counts.remove(waiting.ticket.chain)
            self.counts.add(ticket.chain)
            waiting.ticket, waiting.decided = ticket, None

    def pop(self, ticket: TicketId) -> Waiting | None:
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None:
            self.counts.remove(waiting.ticket.chain)
        return waiting

    def charge(self, tenant: str, evaluated_tokens: int) -> None:
        """Add to a tenant's virtual time; nobody is remembered while nobody waits."""
        if self._waiting:
            self._spent[tenant] = self._spent.get(tenant, 0.0) + evaluated_tokens
        else:
            self._spent.clear()

    def depth(self) -> dict[Priority, int]:
        out = dict.fromkeys(Priority, 0)
        for waiting in self:
            out[waiting.ticket.priority] += 1
        return out

    def ordered(self, fifo: bool) -> list[Waiting]:
        """Everybody, first to be served first. `fifo`: by arrival alone, within a priority."""
        waiting = list(self)
        if fifo or len({w.ticket.tenant for w in waiting}) < 2:
            return sorted(waiting, key=lambda w: (w.ticket.priority is Priority.BATCH, w.seq))
        reached = dict(self._spent)
        start: dict[TicketId, float] = {}
        for w in waiting:
            start[w.ticket.id] = reached.get(w.ticket.tenant, 0.0)
            reached[w.ticket.tenant] = start[w.ticket.id] + w.ticket.n_tokens
        return sorted(waiting, key=lambda w: (w.ticket.priority is Priority.BATCH, start[w.ticket.id], w.seq))

    def newest(self) -> Waiting:
        """Whom to turn away first: the last batch ticket, else the last of all."""
        return max(self, key=lambda w: (w.ticket.priority is Priority.BATCH, w.seq))
