"""Everything that is not a prompt of ours: any method, path, query and body, forwarded as it is; only JSON that comes
compressed is sent decoded.

Some of these paths still take a slot on the server (embeddings, reranking, transcription read no `id_slot` and take
whichever is idle, server-context.cpp): they wait for their turn like any request, so that none is ever pinned to a
slot one of them just took.
"""

from __future__ import annotations

import re
import secrets
from urllib.parse import parse_qs, unquote

import orjson
from starlette.types import Receive, Scope, Send

from prefixproxy.backends import Backend
from prefixproxy.backends.http import end_to_end
from prefixproxy.errors import ProxyError, UpstreamUnavailable
from prefixproxy.intake import (
    ClientGone,
    decoded_body,
    header,
    is_decodable,
    read_body,
    target_of,
    unless_gone,
    until_stopped,
    without,
)
from prefixproxy.lease import Lease
from prefixproxy.listing import LISTS, listed
from prefixproxy.prefix import chain_of
from prefixproxy.relay import Parts
from prefixproxy.reply import Reply
from prefixproxy.schedule.types import Ticket
from prefixproxy.types import Priority, TicketId
from prefixproxy.warming import Rendering

SLOT_TAKING = frozenset(
    {
        "/embedding",
        "/embeddings",
        "/api/embed",
        "/api/embeddings",
        "/v1/embeddings",
        "/rerank",
        "/reranking",
        "/v1/rerank",
        "/v1/reranking",
        "/v1/systemone",
        "/audio/transcriptions",
        "/v1/audio/transcriptions",
    }
)

FIRST_PROBE_S = 5.0
"""How long a request that takes no slot waits, in the proxy's first moments, for what its upstreams are. Agents read
the list of models at their start, and some take an error there for the last word."""

_SLOT_ACTIONS = "/slots/"
"""A client that erases or restores a slot itself changes what is believed of it."""
_NOT_FORWARDED = frozenset({b"content-length", b"expect"})
"""The body has been read by the time it is sent: the client's `Expect` is answered, and an upstream that knows none
would be waited for."""
_NOT_FOR_LISTS = _NOT_FORWARDED | {b"accept-encoding", b"if-none-match", b"if-modified-since"}
_FORM_FIELD = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n')


def _is_encoded_json(scope: Scope) -> bool:
    """llama-server refuses every encoded body (415). Encoded JSON is decoded for it; what else is encoded passes."""
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    return (kind == "application/json" or kind.endswith("+json")) and is_decodable(header(scope, b"content-encoding"))


def asked_model(scope: Scope, body: bytes) -> str:
    """The model that a request names: in its JSON or form, in its query, or behind /v1/models/; "" if it does not."""
    head, _, tail = scope["path"].partition("/models/")
    if tail and head in ("", "/v1"):
        return unquote(tail)
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        found = _FORM_FIELD.search(body)
        return str(found[1].decode("utf-8", "replace").strip()) if found else ""
    try:
        data = orjson.loads(body) if body.lstrip()[:1] == b"{" else {}
    except orjson.JSONDecodeError:
        data = {}
    named = data.get("model") or data.get("name") if scope["path"].startswith("/api/") else data.get("model")
    if isinstance(named, str) and named:
        return str(named)
    return str(parse_qs(scope["query_string"].decode("latin-1")).get("model", [""])[-1])


class Passthrough:
    """Raw ASGI application for every path that has no other owner."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, scope["path"], self._parts.origins.of(header(scope, b"origin")))
        try:
            with until_stopped():
                self._parts.gate.tenant(scope)
                limit = self._parts.max_body_bytes
                body = await read_body(scope, receive, limit)
                if _is_encoded_json(scope):
                    body = await decoded_body(body, header(scope, b"content-encoding"), limit)
                    scope = {**scope, "headers": without(scope["headers"], frozenset({b"content-encoding"}))}
                await unless_gone(receive, self._forward(scope, reply, body))
        except ClientGone:
            return
        except ProxyError as failure:
            await reply.error(failure)

    async def _forward(self, scope: Scope, reply: Reply, body: bytes) -> None:
        try:
            fleet, path = self._parts.dispatcher.fleet, scope["path"]
            model = asked_model(scope, body) if fleet.is_several else ""
            if scope["method"] == "POST" and path in SLOT_TAKING:
                async with self._parts.dispatcher.lease(_SlotTaker(self._parts, body, model, path)) as lease:
                    await self._exchange(scope, reply, body, lease.backend, lease)
                return
            lists = scope["method"] == "GET" and path in LISTS
            await fleet.until_asked(model, path, FIRST_PROBE_S, all_of_them=lists)
            if not (lists and await self._listed(scope, reply)):
                backend = fleet.backend_for(model, path)
                await self._exchange(scope, reply, body, backend, None)
                if scope["method"] == "POST" and path.startswith(_SLOT_ACTIONS):
                    self._parts.dispatcher.keepers[backend.name].read_soon()
        except ProxyError as failure:
            await reply.error(failure)

    async def elsewhere(self, scope: Scope, reply: Reply, body: bytes) -> bool:
        """Forward a prompt whose model runs on somebody else's machine, as it came: it takes no slot here, waits for
        none, and is nothing to measure. False for any other."""
        fleet = self._parts.dispatcher.fleet
        backend = fleet.elsewhere(asked_model(scope, body), scope["path"])
        if backend is None:
            return False
        plain = {**scope, "headers": without(scope["headers"], frozenset({b"content-encoding"}))}
        try:
            await self._exchange(plain, reply, body, backend, None)
        except ProxyError as failure:
            await reply.error(failure)
        return True

    async def _listed(self, scope: Scope, reply: Reply) -> bool:
        """The models of all upstreams, if there are several to ask."""
        backends = self._parts.dispatcher.fleet.listing(scope["path"])
        if len(backends) < 2:
            return False
        headers = self._parts.gate.outgoing(without(end_to_end(scope["headers"]), _NOT_FOR_LISTS))
        models = await listed(backends, target_of(scope), headers)
        if models is not None:
            kind = (b"content-type", b"application/json; charset=utf-8")
            await reply.whole(200, [kind], orjson.dumps(models))
        return models is not None

    async def _exchange(self, scope: Scope, reply: Reply, body: bytes, backend: Backend, lease: Lease | None) -> None:
        headers = self._parts.gate.outgoing(without(end_to_end(scope["headers"]), _NOT_FORWARDED))
        if body or scope["method"] in ("POST", "PUT", "PATCH"):
            headers.append((b"content-length", str(len(body)).encode()))
        try:
            response = await backend.open(scope["method"], target_of(scope), headers, body)
        except UpstreamUnavailable as failure:
            self._parts.dispatcher.lost(backend, failure)
            raise
        try:
            await reply.start(response.status, end_to_end(response.headers))
            async for chunk in response.chunks():
                await reply.body(chunk)
            if lease is not None:
                lease.idle = True
            await reply.end()
        finally:
            await response.close()


class _SlotTaker:
    """What the dispatcher sees of such a request: a prompt of its own, on any idle slot."""

    def __init__(self, parts: Parts, body: bytes, model: str, path: str) -> None:
        self._parts = parts
        now = parts.clock()
        chain = chain_of([body], salt=b"slot-taker")
        self._ticket = Ticket(
            id=TicketId(secrets.token_hex(8)),
            chain=chain,
            head_blocks=0,
            family="",
            n_tokens=parts.dispatcher.estimate_tokens(chain),
            arrived=now,
            deadline=now + parts.queue_timeout_s(),
            model=model,
            path=path,
            priority=Priority.INTERACTIVE,
            side=True,
            pinnable=False,
            warmable=False,
        )

    def ticket(self) -> Ticket:
        return self._ticket

    def deadline(self) -> float:
        return self._ticket.arrived + self._parts.queue_timeout_s()

    def rendering(self) -> Rendering:
        raise RuntimeError("a request that is not warmable is never rendered")
