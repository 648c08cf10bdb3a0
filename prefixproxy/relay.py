"""The hot path: one request from its first byte to its journal record, as a raw ASGI application.

The callable itself holds the lease, so a slot is given back on every way out, also while `send` is blocked on a slow
reader. Two tasks race: the request's work, and a watch for the client leaving (ASGI tells that only through `receive`).
Bytes of a stream go through as they came; nothing in them is parsed but the first events, while progress reports that
we asked for are taken out, and the last, which carry the counts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from prefixproxy.answering import Answering
from prefixproxy.answers import message_of, tool_calls_of
from prefixproxy.assemble import can_assemble, stream_body_edits
from prefixproxy.backends import UpstreamResponse
from prefixproxy.backends.http import Peeked, end_to_end, peek
from prefixproxy.backends.llamacpp import LOADING_BYTES, says_loading
from prefixproxy.body import Body
from prefixproxy.canary import ReuseMode
from prefixproxy.dispatch import Dispatcher
from prefixproxy.errors import ProxyError, UpstreamFailed, UpstreamUnavailable
from prefixproxy.exchange import Exchange, Hints, Times, client_streams, rendering_of, spoils_itself, ticket_of
from prefixproxy.gate import Gate
from prefixproxy.guard import ContextGuard
from prefixproxy.identity import NamedConversations, conversation_of
from prefixproxy.intake import (
    OUR_HEADERS,
    ClientGone,
    decoded_body,
    header,
    read_body,
    target_of,
    unless_gone,
    until_stopped,
    without,
)
from prefixproxy.lease import Lease
from prefixproxy.origins import Origins
from prefixproxy.outcomes import outcome_of_answer, outcome_of_error
from prefixproxy.patience.beat import Pace, Patience
from prefixproxy.patience.names import ResponseNames
from prefixproxy.plan import Planner
from prefixproxy.prompt import Edit, Remove, SetKey
from prefixproxy.reply import Reply
from prefixproxy.schedule.types import Ticket
from prefixproxy.side import is_side
from prefixproxy.telemetry import Telemetry
from prefixproxy.types import API_OF_PATH, PINNABLE, Outcome, TicketId
from prefixproxy.warming import Rendering

ATTEMPTS = 2
"""One retry, and only while nothing was generated: an idle connection may have been closed by the server in the moment
it was used."""
SERVICE_UNAVAILABLE = 503
_MAY_BE_ELSEWHERE = b"cloud"
"""No name of a model that an upstream forwards is without it: other bodies need not be read for that."""
_RESUMABLE = b"x-conversation-id"
"""It turns on resumable streams, which run on after a disconnect (server-stream.cpp): the slot would not come free."""
_NOT_FORWARDED = frozenset({b"content-length", b"content-encoding", b"accept-encoding", b"expect", _RESUMABLE})
_PLAIN = ((b"accept-encoding", b"identity"),)
"""What comes back has to be read here; the client may be offered any encoding by whoever stands before us."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What every request needs. `clock` is monotonic seconds; `queue_timeout_s` is asked anew for each request, as it
    can be changed live."""

    dispatcher: Dispatcher
    planner: Planner
    telemetry: Telemetry
    gate: Gate
    guard: ContextGuard
    max_body_bytes: int
    queue_timeout_s: Callable[[], float]
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    learned: Callable[[], None]
    """To be called when the planner may have something new to keep over a restart."""
    reuse: ReuseMode
    pace: Pace = field(default_factory=Pace)
    named: NamedConversations = field(default_factory=NamedConversations)
    names: ResponseNames = field(default_factory=ResponseNames)
    origins: Origins = field(default_factory=Origins)


class Relay:
    """Raw ASGI application for every path in `API_OF_PATH`."""

    def __init__(self, parts: Parts, elsewhere: Callable[[Scope, Reply, bytes], Awaitable[bool]]) -> None:
        """`elsewhere` forwards a request of which no upstream here has the work, and says whether it was one."""
        self._parts = parts
        self._elsewhere = elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, scope["path"], self._parts.origins.of(header(scope, b"origin")))
        exchange = Exchange(
            id=TicketId(secrets.token_hex(8)),
            path=scope["path"],
            api=API_OF_PATH[scope["path"]],
            hints=Hints.of(scope),
            tenant="",
            unix_time=self._parts.unix_time(),
            times=Times(self._parts.clock()),
        )
        reply.more[OUR_HEADERS + b"request-id"] = exchange.id.encode()
        self._parts.telemetry.began(exchange)
        try:
            await self._serve(exchange, reply, scope, receive)
        finally:
            self._parts.telemetry.ended(exchange)

    async def _serve(self, exchange: Exchange, reply: Reply, scope: Scope, receive: Receive) -> None:
        try:
            with until_stopped():
                raw = await self._admit(exchange, scope, receive)
                run = _Run(self._parts, exchange, scope, reply)
                if _MAY_BE_ELSEWHERE in raw and await self._forwarded(scope, receive, reply, raw):
                    return
                if not await unless_gone(receive, run.work(raw), Patience(self._parts.pace, exchange, reply)):
                    exchange.outcome = Outcome.CLIENT_GONE
        except ClientGone:
            exchange.outcome = Outcome.CLIENT_GONE
        except ProxyError as failure:
            if not reply.finished:
                exchange.outcome = outcome_of_error(failure)
                exchange.refused = "" if reply.begun else failure.code
            await reply.error(failure)
        self._parts.telemetry.record(exchange, reply.status or 0, self._parts.clock())

    async def _forwarded(self, scope: Scope, receive: Receive, reply: Reply, raw: bytes) -> bool:
        was_elsewhere = False

        async def forward() -> None:
            nonlocal was_elsewhere
            was_elsewhere = await self._elsewhere(scope, reply, raw)

        gone = not await unless_gone(receive, forward())
        return gone or was_elsewhere

    async def _admit(self, exchange: Exchange, scope: Scope, receive: Receive) -> bytes:
        """The decoded body of a client that may use this proxy, with a target that can be forwarded."""
        exchange.target = target_of(scope)
        exchange.tenant = self._parts.gate.tenant(scope)
        limit = self._parts.max_body_bytes
        raw = await read_body(scope, receive, limit)
        exchange.times.arrived = self._parts.clock()
        return await decoded_body(raw, header(scope, b"content-encoding"), limit)


class _Run:
    """One exchange at work. It is what waits in the dispatcher's queue."""

    def __init__(self, parts: Parts, exchange: Exchange, scope: Scope, reply: Reply) -> None:
        self._parts = parts
        self._planner = parts.planner
        self._dispatcher = parts.dispatcher
        self._clock = parts.clock
        self._exchange = exchange
        self._reply = reply
        self._headers = parts.gate.outgoing(without(end_to_end(scope["headers"]), _NOT_FORWARDED))
        self._body = Body(b"{}", {})
        self._checked: Ticket | None = None
        self._loading: Peeked | None = None
        """What the upstream said while it was loading its model."""
        self._generated = False
        """Something of an answer came: a second try would pay for it, and run its tools, twice."""

    def ticket(self) -> Ticket:
        checked, self._checked = self._checked, None
        return checked or self._planned_anew()

    def _planned_anew(self) -> Ticket:
        exchange = self._exchange
        exchange.plan = self._planner.plan(
            exchange.api,
            self._body,
            exchange.id,
            self._clock(),
            lane=exchange.hints.lane,
            client=exchange.conversation,
            off=exchange.hints.stabilise_off,
        )
        exchange.arm = self._parts.reuse.arm(exchange.api, self._body.data, exchange.hints.lane, exchange.plan.family)
        reuses = self._parts.reuse.reuses(exchange.api, exchange.arm)
        exchange.reuse = reuses and not spoils_itself(self._body.data)
        n_tokens = self._dispatcher.estimate_tokens(exchange.plan.chain)
        return ticket_of(exchange, n_tokens, self.deadline(), pinnable=exchange.api in PINNABLE)

    def deadline(self) -> float:
        exchange = self._exchange
        wait_s = exchange.hints.longest_wait_s(self._parts.queue_timeout_s(), streaming=exchange.streaming)
        return exchange.times.arrived + wait_s

    def rendering(self) -> Rendering:
        return rendering_of(self._exchange)

    async def work(self, raw: bytes) -> None:
        """Until the client has its answer or its error. Only cancelled from outside."""
        exchange = self._exchange
        try:
            self._body = Body.parse(raw)
            exchange.streaming = client_streams(exchange.api, self._body.data)
            self._recognise()
            off = exchange.hints.stabilise_off
            for _ in self._planner.read_ahead(exchange.api, self._body, off=off):
                await asyncio.sleep(0)
            if self._planner.arrive(exchange.api, self._body, exchange.id, self._clock(), off=off):
                self._dispatcher.refresh()
            await self._guard()
            await self._attempts()
        except ClientGone:
            exchange.outcome = Outcome.CLIENT_GONE
        except ProxyError as failure:
            exchange.outcome, exchange.refused = outcome_of_error(failure), failure.code
            await self._reply.error(failure)
        except Exception:
            log.exception("request %s failed inside the proxy", exchange.id)
            exchange.outcome = Outcome.UPSTREAM_ERROR
            await self._reply.error(ProxyError("the proxy failed on this request; its log says why"))
        finally:
            if exchange.lease is None:
                self._planner.forget(exchange.id)

    def _recognise(self) -> None:
        """What its client says it belongs to, and whether it goes beside that."""
        exchange = self._exchange
        exchange.conversation = conversation_of(exchange.hints.names, self._body.data)
        prompt = self._planner.read(exchange.api, self._body)
        beside = self._parts.named.is_beside(exchange.conversation, prompt)
        exchange.side = beside or is_side(exchange.api, self._body.data)

    async def _guard(self) -> None:
        """Raises ContextLengthExceeded before the queue, not behind it. How long a slot is, is known only while an
        upstream is up."""
        times, before = self._exchange.times, self._clock()
        ticket = self._planned_anew()
        was_up = self._dispatcher.fleet.is_served(ticket.model, ticket.path)
        planned = self._clock()
        await self._dispatcher.fleet.until_served(ticket.model, ticket.path, ticket.deadline)
        up = self._clock()
        times.queue_s += up - planned
        if await self._parts.guard.check(self._exchange) and was_up:
            self._checked = ticket
        times.own_s += planned - before + self._clock() - up

    async def _attempts(self) -> None:
        for attempt in range(ATTEMPTS):
            last = attempt + 1 == ATTEMPTS
            try:
                if await self._once(last=last):
                    return
                why = "the upstream is loading its model"
            except (UpstreamFailed, UpstreamUnavailable) as failure:
                if await self._loading_passed():
                    return
                too_late = self._generated or self._reply.begun
                if last or too_late or not await self._worth_another_try(failure):
                    raise
                why = failure.message
            log.warning("request %s is sent once more: %s", self._exchange.id, why)

    async def _loading_passed(self) -> bool:
        """Whether the upstream's own "loading" was the answer: it still is, for longer than requests wait for it."""
        answer, lease = self._loading, self._exchange.lease
        if answer is None or lease is None or self._reply.begun:
            return False
        if self._is_served(lease) or not self._dispatcher.fleet.is_coming(lease.ticket.model):
            return False
        self._exchange.outcome = outcome_of_answer(answer.status)
        headers = without(end_to_end(answer.headers), frozenset({b"content-length"}))
        await self._reply.whole(answer.status, headers, answer.start)
        return True

    async def _worth_another_try(self, failure: ProxyError) -> bool:
        """Nothing was generated yet. If the upstream that broke off is alive, its connection was stale: once more
        there. If it is dead, once more where another one is up or it comes back by itself; else the failure is the
        answer."""
        lease = self._exchange.lease
        if lease is None:
            return False
        if isinstance(failure, UpstreamFailed) and not self._dispatcher.is_lost(lease.backend):
            try:
                await lease.backend.health()
            except ProxyError as gone:
                self._dispatcher.lost(lease.backend, gone)
            else:
                return True
        return self._is_served(lease) or self._dispatcher.fleet.is_coming(lease.ticket.model)

    def _is_served(self, lease: Lease) -> bool:
        return self._dispatcher.fleet.is_served(lease.ticket.model, lease.ticket.path)

    async def _once(self, *, last: bool) -> bool:
        """Wait for a slot and run there; False if the upstream turned out to be loading its model and this was not the
        last try."""
        before = self._clock()
        async with self._dispatcher.lease(self) as lease:
            exchange = self._exchange
            exchange.lease = lease
            exchange.times.queue_s += lease.queued_s
            exchange.times.own_s += max(0.0, self._clock() - before - lease.queued_s)
            self._parts.telemetry.sent(exchange, self._clock())
            self._parts.learned()
            lease.require_obedience(exchange.api)
            ours, control = self._control(lease)
            answering = Answering(
                exchange,
                self._body,
                self._reply,
                lease,
                self._clock,
                self._dispatcher.first_token,
                ours,
                self._parts.names,
            )
            response: UpstreamResponse = await self._open(lease, control)
            try:
                if lease.native and response.status == SERVICE_UNAVAILABLE:
                    response = peeked = await peek(response, LOADING_BYTES)
                    if says_loading(peeked.start):
                        lease.idle = True
                        self._dispatcher.loading(lease.backend)
                        self._loading = peeked
                        if not last:
                            return False
                self._dispatcher.started(lease)
                finish = await answering.relay(response)
            finally:
                self._generated = answering.generated
                await response.close()
        self._parts.guard.learn(self._exchange)
        self._parts.learned()
        await finish()
        self._remember(answering.said)
        return True

    def _remember(self, said: dict[str, Any] | None) -> None:
        """What was said may come back: tool calls re-serialised, text quoted by a reducer."""
        message = message_of(said)
        if message is not None:
            self._planner.answered(self._exchange.id, message)
            self._parts.learned()
        for call_id, name, arguments in tool_calls_of(message):
            self._planner.answers.learn(call_id, name, arguments)
        if message and isinstance(text := message.get("content"), str):
            self._parts.telemetry.answered(self._exchange, text)

    async def _open(self, lease: Lease, control: Sequence[Edit]) -> UpstreamResponse:
        """Send it. A slot that was never reached is idle."""
        started = self._clock()
        payload = self._exchange.planned().rendered(control)
        headers = [*self._headers, *_PLAIN, (b"content-length", str(len(payload)).encode())]
        self._exchange.times.own_s += self._clock() - started
        try:
            return await lease.backend.open("POST", self._exchange.target, headers, payload)
        except UpstreamUnavailable as failure:
            lease.idle = True
            self._dispatcher.lost(lease.backend, failure)
            raise

    def _control(self, lease: Lease) -> tuple[bool, list[Edit]]:
        """The keys that are ours: slot, progress, a stream even for JSON; first, whether it will hold progress that its
        client did not ask for. Other servers get none of these, and no slot of the client's either."""
        api, data = self._exchange.api, self._body.data
        streams = lease.native and (self._exchange.streaming or can_assemble(api, data))
        added = stream_body_edits(api, data) if streams else ()
        edits = [*added, *lease.backend.control(api, data), *self._parts.names.edits(api, data)]
        if lease.slot is not None:
            edits.append(SetKey((), "id_slot", lease.slot))
        elif "id_slot" in data and api in PINNABLE:
            edits.append(Remove(("id_slot",)))
        off = lease.native and api in PINNABLE and not (self._exchange.reuse and not lease.reuse_off)
        if off:
            edits.append(SetKey((), "cache_prompt", False))
        elif lease.native and api in PINNABLE and not lease.reuses_unasked and "cache_prompt" not in data:
            edits.append(SetKey((), "cache_prompt", True))
        if not lease.native:
            self._exchange.arm = None  # such a server cannot be asked for no reuse
        self._exchange.reuse_off = off or (lease.native and data.get("cache_prompt") is False)
        return bool(added), edits
