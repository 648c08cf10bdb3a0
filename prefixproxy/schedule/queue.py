"""Who waits, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.counts import PrefixCounts
from prefixproxy.schedule.plan import Hold
from prefixproxy.schedule.turns import Accounts, Charge, is_batch, share_of
from prefixproxy.schedule.types import HoldReason, Policy, Reason, Ticket
from prefixproxy.types import Priority, TicketId

_FEW = 64
_PASSING = (HoldReason.OVERTAKEN, HoldReason.SEVERAL)
"""These hold for one look: they are for the sake of others that wait."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One ticket in the queue. `cost`: tokens it is expected to evaluate. `hold` and `until`: what the last look at it
    found. `overtaken`: how often a later one that had more use for a slot went first, or any if it needs several;
    `kept_until`: idle slots are kept for it so long; `saves`: how often a slot was saved first; `passed`: how many
    later ones of its tenant were granted before it. `gathered`: lanes that share its root were waited for. `plain`: no
    root is warmed for it any more, and why. `patience`: until when it may wait for a busy slot that holds its prefix.
    `decided`: the state of all upstreams that `hold` was found in; `standing`: what it was held for when it was last
    looked at. `bound_for`: the number of the upstream where what it waits for is under way. `gone`: it waits no more.
    """

    ticket: Ticket
    seq: int
    cost: int
    hold: HoldReason = HoldReason.NO_SLOT
    until: float | None = None
    overtaken: int = 0
    kept_until: float | None = None
    saves: int = 0
    passed: int = 0
    gathered: bool = False
    plain: Reason | None = None
    patience: float | None = None
    decided: tuple[object, ...] | None = None
    standing: Hold | None = None
    bound_for: int | None = None
    gone: bool = False

    def stands(self, state: tuple[object, ...], now: float) -> bool:
        """Whether what the last look at it found still holds."""
        over = self.until is not None and self.until <= now
        return self.decided == state and not over and self.hold not in _PASSING

    def keeps(self, policy: Policy, now: float, *, copying: bool) -> bool:
        """Whether idle slots are kept for it, as it needs several: while a slot is saved or restored for it, or when it
        was overtaken often; not for too long at once."""
        overtaken = self.hold is HoldReason.NO_SLOT and self.overtaken >= policy.max_overtaken
        if self.ticket.n_seqs == 1 or not (copying or overtaken):
            return False
        if self.kept_until is None:
            self.kept_until = now + policy.max_kept_s
        if now < self.kept_until:
            self.until = self.kept_until if self.until is None else min(self.until, self.kept_until)
            return True
        self.overtaken, self.kept_until = 0, None
        return False

    def wait_for_save(self, until: float) -> None:
        """A slot is saved before it goes."""
        self.hold, self.until = HoldReason.WARMING, until
        self.saves += 1

    def again(self, state: tuple[object, ...]) -> None:
        """It is still held for the same, in this state too."""
        if self.standing is not None:
            self.hold, self.until, self.bound_for = self.standing.reason, self.standing.until, self.standing.server
            self.decided = state

    def take(self, hold: Hold) -> None:
        """It is held."""
        self.standing, self.hold, self.until, self.bound_for = hold, hold.reason, hold.until, hold.server
        if hold.reason is HoldReason.SLOT_WAIT and self.patience is None:
            self.patience = hold.until
        self.overtaken += hold.reason is HoldReason.OVERTAKEN
        self.gathered |= hold.reason is HoldReason.GATHERING


class Queue:
    """Waiting tickets by id, in turn (see `turns`)."""

    def __init__(self) -> None:
        self.counts = PrefixCounts()
        """How many waiting prompts share each block."""
        self._waiting: dict[TicketId, Waiting] = {}
        self._accounts = Accounts()
        self._line: tuple[Policy, list[Waiting]] | None = None
        self._seq = 0
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._pushed = count()
        self._served_in = -1
        self.unserved: dict[TicketId, Waiting] = {}
        """Of whom it is not known that an upstream serves them (see `serve`)."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def get(self, ticket: TicketId) -> Waiting | None:
        return self._waiting.get(ticket)

    def add(self, ticket: Ticket, cost: int | None = None) -> None:
        """Append. `cost`: tokens it is expected to evaluate (None: all of it)."""
        self._accounts.join(ticket, (waiting.ticket for waiting in self))
        self._seq += 1
        waiting = Waiting(ticket, self._seq, ticket.n_tokens if cost is None else cost)
        self._waiting[ticket.id] = self.unserved[ticket.id] = waiting
        self._expect(waiting)
        self.counts.add(_shared(ticket))
        self._line = None

    def replace(self, ticket: Ticket, cost: int | None = None) -> None:
        """The same request with another prompt: it keeps its place."""
        waiting = self._waiting.get(ticket.id)
        if waiting is not None:
            self.counts.remove(_shared(waiting.ticket))
            self.counts.add(_shared(ticket))
            waiting.ticket, waiting.decided, waiting.standing = ticket, None, None
            waiting.cost = ticket.n_tokens if cost is None else cost
            self.unserved[ticket.id] = waiting
            self._expect(waiting)
            self._line = None

    def pop(self, ticket: TicketId) -> Waiting | None:
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None:
            self.counts.remove(_shared(waiting.ticket))
            self.unserved.pop(ticket, None)
            waiting.gone, self._line = True, None
        return waiting

    def serve(self, epoch: int) -> None:
        """Another epoch: other upstreams are up."""
        if epoch != self._served_in:
            self._served_in, self.unserved = epoch, dict(self._waiting)

    def _expect(self, waiting: Waiting) -> None:
        """Its deadline; those of tickets that are gone are dropped now and then."""
        if len(self._deadlines) > 2 * len(self._waiting) + _FEW:
            self._deadlines = [each for each in self._deadlines if not each[2].gone]
            heapify(self._deadlines)
        heappush(self._deadlines, (waiting.ticket.deadline, next(self._pushed), waiting))

    def first_deadline(self) -> float | None:
        deadlines = self._deadlines
        while deadlines and (deadlines[0][2].gone or deadlines[0][2].ticket.deadline != deadlines[0][0]):
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def late(self, now: float) -> list[Waiting]:
        """Those whose deadline is over, in the order in which they came."""
        first = self.first_deadline()
        return [] if first is None or first > now else [w for w in self if w.ticket.deadline <= now]

    def next_until(self, now: float) -> float | None:
        """When the first of them is to be looked at again."""
        untils = (waiting.until for waiting in self)
        return min((until for until in untils if until is not None and until > now), default=None)

    def granted(self, ticket: Ticket, tokens: int, policy: Policy) -> Charge:
        """It leaves the queue for a slot, and will evaluate about so many tokens."""
        gone = self.pop(ticket.id)
        for waiting in self:
            if gone is not None and waiting.seq < gone.seq and waiting.ticket.priority is ticket.priority:
                waiting.passed += waiting.ticket.tenant == ticket.tenant
                waiting.overtaken += waiting.ticket.n_seqs > 1
        self.charge(ticket, tokens, policy)
        return Charge(tokens, self._accounts.era)

    def charge(self, ticket: Ticket, tokens: int, policy: Policy) -> None:
        """To the ticket's tenant and family; nobody is remembered while nobody waits."""
        if self._waiting:
            self._accounts.charge(ticket, tokens, policy)
        else:
            self._accounts.close()
        self._line = None

    def settle(self, ticket: Ticket, charged: Charge | None, evaluated: int | None, policy: Policy) -> None:
        """A granted ticket ended: what it was charged becomes what it evaluated, where that is known."""
        if charged is not None and evaluated is not None and charged.era == self._accounts.era:
            self.charge(ticket, evaluated - charged.tokens, policy)

    def give_up(self, chain: PrefixChain, why: Reason) -> None:
        """Whoever was held for a root that cannot be had evaluates its whole prompt."""
        half = len(chain.hashes) // 2
        for waiting in self:
            if waiting.hold is HoldReason.WARMING and waiting.ticket.chain.common_blocks(chain) > half:
                waiting.plain, waiting.standing = why, None

    def depth(self) -> dict[Priority, int]:
        out = dict.fromkeys(Priority, 0)
        for waiting in self:
            out[waiting.ticket.priority] += 1
        return out

    def ordered(self, policy: Policy) -> list[Waiting]:
        """Everybody, first to be served first. Sorted anew only when somebody came, went or was charged."""
        if self._line is None or self._line[0] is not policy:
            self._line = policy, self._accounts.order(self, policy)
        return self._line[1]

    def surplus(self, policy: Policy) -> Waiting:
        """Whom to turn away first: batch before all, then the newest of the tenant that has most waiting for its
        weight."""
        batch = [waiting for waiting in self if is_batch(waiting)] or list(self)
        waits = Counter(waiting.ticket.tenant for waiting in batch)
        share = {tenant: n / share_of(policy, tenant).weight for tenant, n in waits.items()}
        return max(batch, key=lambda waiting: (share[waiting.ticket.tenant], waiting.seq))


def _shared(ticket: Ticket) -> PrefixChain:
    """What of a ticket others may have in common with it: nothing of one that reuses nothing."""
    return ticket.chain if ticket.reuse else ticket.chain.head(0)
