"""The product's own scheduler on a virtual clock: carries out its effects on virtual servers, tells it what happened.

Nothing here decides anything. A step costs as much as the scheduler takes for it; no time passes otherwise.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any

from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import (
    Decode,
    Drop,
    Effect,
    Finish,
    Grant,
    Policy,
    Poll,
    Reject,
    Restore,
    Save,
    Ticket,
    Warm,
    WarmResult,
)
from prefixproxy.simulate.server import VirtualServer
from prefixproxy.simulate.text import BYTES_PER_TOKEN, Text, span
from prefixproxy.types import TicketId

SEND_S = 0.001
"""From a grant until the server has the request."""
RENDER_S = 0.01
"""To find a root's exact tokens before it is warmed."""
RETRY_S = 0.01
"""How often a request that found no slot free is looked at again by the server's own queue."""
ANY_TOKEN = span(-(1 << 62), 1)
"""Nothing else begins with it."""
LOOK_S = (0.005, 0.002)
"""Until a look at the slots is asked for, and until its answer is there."""


@dataclass(slots=True)
class Request:
    """`head`: tokens of its system text. `ends`: "waiting", "running", "ok", "gone", or why it was rejected. Times are
    virtual seconds, -1 while not known."""

    prompt: Text
    answer: Text
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


def _ignore(request: Request) -> None:
    """Nobody wants to know."""


class Simulation:
    """Drives one scheduler over virtual servers: `submit`, `cancel` and `at` plan, `run` plays until all is done.
    `ended` is told of each request that was answered or rejected, which is then forgotten."""

    def __init__(
        self,
        servers: Iterable[VirtualServer],
        policy: Policy | None = None,
        ended: Callable[[Request], None] | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.scheduler = scheduler or Scheduler(policy)
        self.servers = {server.facts.name: server for server in servers}
        self.requests: dict[TicketId, Request] = {}
        self.now = 0.0
        self._told = ended or _ignore
        self._forget = ended is not None
        self._unfinished = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._seq = count()
        for server in self.servers.values():
            self.apply(self.scheduler.upstream_up(server.facts, 0.0))

    def at(self, time: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._seq), do, arguments))

    def submit(self, time: float, *requests: Request) -> None:
        """Have these arrive together."""
        self._unfinished += len(requests)
        self.at(time, self._submit, requests)

    def cancel(self, time: float, request: Request) -> None:
        self.at(time, self._cancel, request)

    def run(self, until: float = inf) -> None:
        while self._unfinished or self._events:
            wake = self.scheduler.next_wake()
            event = self._events[0][0] if self._events else None
            times = [time for time in (wake, event) if time is not None and time <= until]
            if not times or (event is None and not self._unfinished):
                return
            self.now = max(self.now, min(times))
            if event is not None and event <= self.now:
                _, _, do, arguments = heapq.heappop(self._events)
                do(*arguments)
            else:
                self.apply(self.scheduler.tick(self.now))

    def _later(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, do, *arguments)

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.requests[request.ticket.id] = request
        self.apply(self.scheduler.submit([request.ticket for request in requests], self.now))

    def _end(self, request: Request, how: str) -> None:
        request.ends = how
        self._unfinished -= 1
        if self._forget:
            del self.requests[request.ticket.id]
        self._told(request)

    def _cancel(self, request: Request) -> None:
        if request.ends == "waiting":
            self._end(request, "gone")
            self.apply(self.scheduler.cancel(request.ticket.id, self.now))
        elif request.ends == "running" and request.grant is not None:
            request.gone = True
            self._end(request, "gone")
            server = self.servers[request.grant.upstream]
            done = Finish(ok=False, confirmed_idle=False)
            self.apply(self.scheduler.finished(request.ticket.id, done, self.now))
            if request.slot is not None:
                self._later(server.drain_s, self._release, request, server)

    # effects

    def apply(self, effects: Sequence[Effect]) -> None:
        """Carry them out."""
        for effect in effects:
            match effect:
                case Grant():
                    self._grant(effect)
                case Reject():
                    self._end(self.requests[effect.ticket_id], effect.reason)
                case Warm():
                    self._warm(effect)
                case Save():
                    self._save(effect)
                case Restore():
                    self._restore(effect)
                case Decode():
                    self._decode(effect)
                case Poll():
                    self._later(LOOK_S[0], self._look, self.servers[effect.upstream])
                case Drop():
                    self.servers[effect.upstream].files.pop(effect.file, None)

    def _grant(self, grant: Grant) -> None:
        request, server = self.requests[grant.ticket_id], self.servers[grant.upstream]
        if request.ends != "waiting":
            raise AssertionError(f"{grant.ticket_id} was granted twice")
        request.ends, request.grant, request.granted_at = "running", grant, self.now
        slot = None if grant.slot is None else grant.slot.slot
        self._later(SEND_S, self._arrive, request, server, slot)

    def _arrive(self, request: Request, server: VirtualServer, slot: int | None) -> None:
        if request.gone:
            return
        taken = server.take(slot, request.prompt, self.now, f"grant {request.ticket.id}", request.head)
        if taken is None:
            self._later(RETRY_S, self._arrive, request, server, slot)
            return
        request.slot, request.cached = taken.slot, taken.cached
        request.children = server.spread(request.ticket.n_seqs - 1)
        self.apply(self.scheduler.started(request.ticket.id, self.now))
        self.at(taken.ready, self._first_token, request, server)

    def _release(self, request: Request, server: VirtualServer, text: Text | None = None) -> None:
        if request.slot is not None:
            server.release(request.slot, self.now, text)
        for child in request.children:
            server.release(child, self.now)

    def _first_token(self, request: Request, server: VirtualServer) -> None:
        if request.gone:
            return
        request.first_token_at = self.now
        self.apply(self.scheduler.first_token(request.ticket.id, self.now))
        self._later(server.decode_s * len(request.answer), self._finish, request, server)

    def _finish(self, request: Request, server: VirtualServer) -> None:
        if request.gone:
            return
        # the last token of an answer is sampled, but never evaluated
        self._release(request, server, request.prompt + request.answer.head(len(request.answer) - 1))
        evaluated = len(request.prompt) - request.cached
        done = Finish(
            True,
            request.cached if server.facts.capabilities.reports_cached else None,
            evaluated,
            len(request.answer),
            evaluated / server.rate,
        )
        effects = self.scheduler.finished(request.ticket.id, done, self.now)
        self._end(request, "ok")
        self.apply(effects)

    def _warm(self, warm: Warm) -> None:
        lanes = [self.requests[ticket] for ticket in warm.tickets if ticket in self.requests][:3]
        if not lanes:
            self._later(RENDER_S, self._warm_failed, warm)
            return
        first = lanes[0].prompt
        if warm.whole:
            root = first.head(len(first) - 1)
        elif len(lanes) == 1:
            root = first.head(warm.n_bytes // BYTES_PER_TOKEN if warm.n_bytes else lanes[0].head)
        else:
            root = first.head(min(first.common(lane.prompt) for lane in lanes[1:]))
            root = root.head(min(len(lane.prompt) for lane in lanes) - 1)
        self._later(RENDER_S, self._warm_arrives, warm, self.servers[warm.slot.upstream], root)

    def _warm_failed(self, warm: Warm) -> None:
        self.apply(self.scheduler.warmed(warm.root, WarmResult(ok=False), self.now))

    def _warm_arrives(self, warm: Warm, server: VirtualServer, root: Text) -> None:
        taken = server.take(warm.slot.slot, root, self.now, "warm")
        if taken is not None:
            self.at(taken.ready, self._warmed, warm, server, root, len(root) - taken.cached)

    def _warmed(self, warm: Warm, server: VirtualServer, root: Text, evaluated: int) -> None:
        server.release(warm.slot.slot, self.now)
        result = WarmResult(server.warms, len(root), evaluated / server.rate, evaluated=evaluated)
        self.apply(self.scheduler.warmed(warm.root, result, self.now))

    def _save(self, save: Save) -> None:
        server = self.servers[save.slot.upstream]
        n_bytes = server.save(save.slot.slot, save.file, self.now)
        seconds, _ = server.copy_s(n_bytes)
        self._later(seconds, self._saved, save, n_bytes, seconds)

    def _saved(self, save: Save, n_bytes: int, seconds: float) -> None:
        self.apply(self.scheduler.saved(save.root, True, n_bytes, seconds, self.now))

    def _restore(self, restore: Restore) -> None:
        server = self.servers[restore.slot.upstream]
        ok = server.restore(restore.slot.slot, restore.file, self.now)
        _, seconds = server.copy_s(len(server.rows[restore.slot.slot].text) * server.kv_bytes)
        self._later(seconds, self._restored, restore, ok, seconds)

    def _restored(self, restore: Restore, ok: bool, seconds: float) -> None:
        self.apply(self.scheduler.restored(restore.slot, restore.root, ok, seconds, self.now))

    def _decode(self, decode: Decode) -> None:
        server = self.servers[decode.slot.upstream]
        taken = server.take(decode.slot.slot if decode.pinned else None, ANY_TOKEN, self.now, "decode")
        if taken is not None:
            self.at(taken.ready, self._decoded, decode, server, taken.slot)

    def _decoded(self, decode: Decode, server: VirtualServer, slot: int) -> None:
        server.release(slot, self.now)
        self.apply(self.scheduler.decoded(decode.slot, True, self.now))

    def _look(self, server: VirtualServer) -> None:
        self._later(LOOK_S[1], self._seen, server, self.now)

    def _seen(self, server: VirtualServer, asked: float) -> None:
        self.apply(self.scheduler.slots_seen(server.facts.name, server.seen(), self.now, asked))
