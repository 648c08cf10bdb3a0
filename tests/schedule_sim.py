"""A virtual-clock llama-server and the events around a scheduler: executes its effects, counts every token evaluated.

One prompt token is four bytes. The servers keep their own idea of who is busy: anything pinned to a busy slot is a
violation, as it would corrupt the request that runs there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from prefixproxy.prefix import blocks_within, chain_of
from prefixproxy.schedule import Scheduler
from prefixproxy.schedule_types import (
    Drop,
    Effect,
    Finish,
    Grant,
    Policy,
    Poll,
    Reject,
    Restore,
    Save,
    SlotSeen,
    Ticket,
    Warm,
    WarmResult,
)
from prefixproxy.types import Capabilities, Priority, SlotId, TicketId, UpstreamFacts

Tokens = tuple[int, ...]
FULL = Capabilities(pin=True, observe=True, snapshot=True, warm=True, reports_cached=True, tokenize=True, template=True)
NO_SNAPSHOT = Capabilities(pin=True, observe=True, warm=True, reports_cached=True)
UNPINNED = Capabilities(reports_cached=True)
KV_BYTES = 20_000


def words(name: str, n: int) -> Tokens:
    """`n` tokens that no other name shares."""
    seed = int.from_bytes(name.encode()[-2:], "little") * 7919 + len(name) * 104_729
    return tuple((seed + 31 * i + sum(name.encode()) * 1_000_003) % (1 << 31) for i in range(n))


def as_bytes(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def lower_bound(prompts: Sequence[Sequence[int]]) -> int:
    """The least prompt tokens anyone can evaluate: distinct prefixes."""
    seen: set[tuple[int, int]] = set()
    for prompt in prompts:
        state = 0
        for i, token in enumerate(prompt):
            state = hash((state, token))
            seen.add((i, state))
    return len(seen)


@dataclass
class Row:
    tokens: Tokens = ()
    busy: bool = False
    last_used: float = -1.0


@dataclass
class SimServer:
    """`rollback`: False for a recurrent model, which reuses a slot only if it holds nothing but a prefix."""

    facts: UpstreamFacts
    rate: float = 200.0
    decode_s: float = 0.02
    rollback: bool = True
    restore_ok: bool = True
    restore_effect: bool = True
    warm_ok: bool = True
    drain_s: float = 0.3
    rows: list[Row] = field(default_factory=list)
    files: dict[str, Tokens] = field(default_factory=dict)
    evaluated: int = 0
    violations: list[str] = field(default_factory=list)
    free_at: float = 0.0

    def __post_init__(self) -> None:
        self.rows = [Row() for _ in range(self.facts.n_slots)]

    def take(self, slot: int | None, prompt: Tokens, now: float, what: str) -> tuple[int, int, float] | None:
        """Start evaluating: (slot, tokens cached, end of prefill); None if no slot is free for an unpinned one."""
        if slot is None:
            slot = self._choose(prompt)
            if slot is None:
                return None
        row = self.rows[slot]
        if row.busy:
            self.violations.append(f"{now:.3f}: {what} on busy slot {slot}")
        cached = common(row.tokens, prompt)
        if not self.rollback and cached < len(row.tokens):
            cached = 0
        cached = max(0, min(cached, len(prompt) - 1))
        row.busy, row.tokens = True, prompt
        self.evaluated += len(prompt) - cached
        self.free_at = max(self.free_at, now) + (len(prompt) - cached) / self.rate
        return slot, cached, self.free_at

    def _choose(self, prompt: Tokens) -> int | None:
        idle = [i for i, row in enumerate(self.rows) if not row.busy]
        similar = [i for i in idle if common(self.rows[i].tokens, prompt) > 0.1 * len(prompt)]
        if similar:
            return max(similar, key=lambda i: common(self.rows[i].tokens, prompt))
        return min(idle, key=lambda i: (self.rows[i].last_used, -i), default=None)

    def release(self, slot: int, now: float) -> None:
        self.rows[slot].busy, self.rows[slot].last_used = False, now

    def seen(self) -> dict[int, SlotSeen]:
        return {i: SlotSeen(row.busy, len(row.tokens)) for i, row in enumerate(self.rows)}


@dataclass
class Request:
    prompt: Tokens
    answer: Tokens
    ticket: Ticket
    head: int
    ends: str = "waiting"
    grant: Grant | None = None
    granted_at: float = -1.0
    first_token_at: float = -1.0
    cached: int = -1
    slot: int | None = None
    children: list[int] = field(default_factory=list)
    gone: bool = False


class Sim:
    """Drives one scheduler over virtual servers. `submit`, `cancel` and `at` plan, `run` plays until all is done."""

    def __init__(
        self, servers: Sequence[SimServer], policy: Policy | None = None, scheduler: Scheduler | None = None
    ) -> None:
        self.scheduler = scheduler or Scheduler(policy)
        self.servers = {server.facts.name: server for server in servers}
        self.requests: dict[TicketId, Request] = {}
        self.effects: list[Effect] = []
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._seq = count()
        self._queued: list[Callable[[], bool]] = []
        for server in servers:
            self.apply(self.scheduler.upstream_up(server.facts, 0.0))

    def at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._seq), do))

    def submit(self, time: float, *requests: Request) -> None:
        for request in requests:
            self.requests[request.ticket.id] = request
        tickets = [request.ticket for request in requests]
        self.at(time, lambda: self.apply(self.scheduler.submit(tickets, self.now)))

    def cancel(self, time: float, request: Request) -> None:
        self.at(time, lambda: self._cancel(request))

    def run(self, until: float = 10_000.0) -> None:
        while True:
            wake = self.scheduler.next_wake()
            event = self._events[0][0] if self._events else None
            times = [time for time in (wake, event) if time is not None and time <= until]
            if not times or (event is None and not self._unfinished()):
                return
            self.now = max(self.now, min(times))
            if event is not None and event <= self.now:
                heapq.heappop(self._events)[2]()
            else:
                self.apply(self.scheduler.tick(self.now))

    def _unfinished(self) -> bool:
        return any(request.ends == "waiting" or request.ends == "running" for request in self.requests.values())

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        self.at(self.now + seconds, do)

    def _cancel(self, request: Request) -> None:
        if request.ends == "waiting":
            request.ends = "gone"
            self.apply(self.scheduler.cancel(request.ticket.id, self.now))
        elif request.ends == "running":
            request.ends, request.gone = "gone", True
            assert request.grant is not None
            server = self.servers[request.grant.upstream]
            done = Finish(ok=False, confirmed_idle=False)
            self.apply(self.scheduler.finished(request.ticket.id, done, self.now))
            if request.slot is not None:
                self._later(server.drain_s, lambda: self._release(request, server))

    # effects

    def apply(self, effects: Sequence[Effect]) -> None:
        self.effects += effects
        for effect in effects:
            match effect:
                case Grant():
                    self._grant(effect)
                case Reject():
                    self.requests[effect.ticket_id].ends = effect.reason
                case Warm():
                    self._warm(effect)
                case Save():
                    self._save(effect)
                case Restore():
                    self._restore(effect)
                case Poll():
                    self._poll(effect)
                case Drop():
                    self.servers[effect.upstream].files.pop(effect.file, None)

    def _grant(self, grant: Grant) -> None:
        request, server = self.requests[grant.ticket_id], self.servers[grant.upstream]
        assert request.ends == "waiting", "granted twice"
        request.ends, request.grant, request.granted_at = "running", grant, self.now
        slot = None if grant.slot is None else grant.slot.slot
        self._later(0.001, lambda: self._arrive(request, server, slot))

    def _arrive(self, request: Request, server: SimServer, slot: int | None) -> None:
        if request.gone:
            return
        taken = server.take(slot, request.prompt, self.now, f"grant {request.ticket.id}")
        if taken is None:
            self._later(0.01, lambda: self._arrive(request, server, slot))  # the server's own queue
            return
        request.slot, request.cached, ready = taken
        self._spread(request, server)
        self.apply(self.scheduler.started(request.ticket.id, self.now))
        self.at(ready, lambda: self._first_token(request, server))

    def _spread(self, request: Request, server: SimServer) -> None:
        """The further answers take the lowest idle slots and clear them."""
        idle = [i for i, row in enumerate(server.rows) if not row.busy]
        request.children = idle[: request.ticket.n_seqs - 1]
        for child in request.children:
            server.rows[child].busy, server.rows[child].tokens = True, ()

    def _release(self, request: Request, server: SimServer) -> None:
        assert request.slot is not None
        for slot in (request.slot, *request.children):
            server.release(slot, self.now)

    def _first_token(self, request: Request, server: SimServer) -> None:
        if request.gone:
            return
        request.first_token_at = self.now
        self.apply(self.scheduler.first_token(request.ticket.id, self.now))
        self._later(server.decode_s * len(request.answer), lambda: self._finish(request, server))

    def _finish(self, request: Request, server: SimServer) -> None:
        if request.gone:
            return
        assert request.slot is not None
        request.ends = "ok"
        server.rows[request.slot].tokens = request.prompt + request.answer[:-1]
        self._release(request, server)
        evaluated = len(request.prompt) - request.cached
        done = Finish(
            True,
            request.cached if server.facts.capabilities.reports_cached else None,
            evaluated,
            len(request.answer),
            evaluated / server.rate,
        )
        self.apply(self.scheduler.finished(request.ticket.id, done, self.now))

    def _warm(self, warm: Warm) -> None:
        server = self.servers[warm.slot.upstream]
        lanes = [self.requests[ticket] for ticket in warm.tickets][:3]
        if warm.whole:
            root = lanes[0].prompt[:-1]
        elif len(lanes) == 1:
            root = lanes[0].prompt[: lanes[0].head]
        else:
            root = lanes[0].prompt[: min(common(lanes[0].prompt, lane.prompt) for lane in lanes[1:])]
            root = root[: min(len(lane.prompt) for lane in lanes) - 1]
        self._later(0.01, lambda: self._warm_arrives(warm, server, root))

    def _warm_arrives(self, warm: Warm, server: SimServer, root: Tokens) -> None:
        before = server.evaluated
        taken = server.take(warm.slot.slot, root, self.now, "warm")
        assert taken is not None
        self.at(taken[2], lambda: self._warmed(warm, server, root, server.evaluated - before))

    def _warmed(self, warm: Warm, server: SimServer, root: Tokens, evaluated: int) -> None:
        server.release(warm.slot.slot, self.now)
        result = WarmResult(server.warm_ok, len(root), evaluated / server.rate)
        self.apply(self.scheduler.warmed(warm.root, result, self.now))

    def _save(self, save: Save) -> None:
        server = self.servers[save.slot.upstream]
        self._check_idle(server, save.slot, "save")
        server.files[save.file] = server.rows[save.slot.slot].tokens
        n_bytes = len(server.files[save.file]) * KV_BYTES
        self._later(0.05, lambda: self.apply(self.scheduler.saved(save.root, True, n_bytes, 0.05, self.now)))

    def _restore(self, restore: Restore) -> None:
        server = self.servers[restore.slot.upstream]
        self._check_idle(server, restore.slot, "restore")
        tokens = server.files[restore.file] if server.restore_ok and server.restore_effect else ()
        server.rows[restore.slot.slot].tokens = tokens

        def answer() -> None:
            self.apply(self.scheduler.restored(restore.slot, restore.root, server.restore_ok, 0.03, self.now))

        self._later(0.03, answer)

    def _check_idle(self, server: SimServer, slot: SlotId, what: str) -> None:
        if server.rows[slot.slot].busy:
            server.violations.append(f"{self.now:.3f}: {what} on busy slot {slot.slot}")

    def _poll(self, poll: Poll) -> None:
        server = self.servers[poll.upstream]

        def answer() -> None:
            seen, asked = server.seen(), self.now
            self._later(0.002, lambda: self.apply(self.scheduler.slots_seen(poll.upstream, seen, self.now, asked)))

        self._later(0.005, answer)


def facts(name: str = "u", n_slots: int = 4, capabilities: Capabilities = FULL, **more: str) -> UpstreamFacts:
    return UpstreamFacts(name, "llama-server", n_slots, capabilities=capabilities, **more)  # type: ignore[arg-type]


_ids = count()


def request(
    root: Tokens,
    tail: Tokens,
    *,
    head: int | None = None,
    answer: int = 20,
    at: float = 0.0,
    timeout: float = 5_000.0,
    priority: Priority = Priority.INTERACTIVE,
    pinnable: bool = True,
    warmable: bool = True,
    side: bool = False,
    n_seqs: int = 1,
    wanted_slot: int | None = None,
    model: str = "",
    tenant: str = "",
) -> Request:
    """A request whose head is `root` (or its first `head` tokens)."""
    prompt = root + tail
    name = f"t{next(_ids)}"
    ticket = Ticket(
        TicketId(name),
        chain_of([as_bytes(prompt)]),
        blocks_within(4 * (len(root) if head is None else head)),
        family=str(root[:1]),
        n_tokens=len(prompt),
        arrived=at,
        deadline=at + timeout,
        model=model,
        tenant=tenant,
        priority=priority,
        side=side,
        wanted_slot=wanted_slot,
        pinnable=pinnable,
        warmable=warmable,
        n_seqs=n_seqs,
    )
    return Request(prompt, words(f"answer {name}", answer), ticket, len(root) if head is None else head)
