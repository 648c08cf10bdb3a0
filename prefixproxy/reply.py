"""Writes one ASGI response: its head at most once, its length right, errors in the shape of the API called."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import Send

from prefixproxy.errors import ProxyError, UpstreamFailed
from prefixproxy.intake import OUR_HEADERS, ClientGone
from prefixproxy.origins import Origin
from prefixproxy.patience import signs
from prefixproxy.types import Api

STALL_S = 300.0
RETRY_AFTER_S = 5
"""For a "not now" of an upstream that does not say when: some clients give up at once where none says so."""
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""A buffering proxy in front of us would hold the events back (nginx reads the second one)."""

_STREAMS = re.compile(rb"event-stream|ndjson", flags=re.IGNORECASE)
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_NOT_NOW = frozenset({429, 503})

Headers = Iterable[tuple[bytes, bytes]]

log = logging.getLogger(__name__)


class Reply:
    """One response to one request. `more` are headers of ours that every head gets.

    Two tasks write to it: the request's work, and, while a stream has no token yet, whoever calls `alive`.
    """

    def __init__(self, send: Send, path: str, origin: Origin | None = None) -> None:
        self._send = send
        self._origin = origin
        self._path = path
        self._streams = b""
        self._last = _EVENT_ENDS[0]
        self._turn = asyncio.Lock()
        self._waiting = True
        self.status: int | None = None
        self.begun = False
        """The answer, or its error, is on its way: signs of life alone do not count."""
        self.early = False
        """A head and a sign of life were sent before the answer's own."""
        self.finished = False
        self.more: dict[bytes, bytes] = {}

    async def alive(self, api: Api, ident: str, model: str, created: int) -> bool:
        """A sign of life to the client of a stream, with a head before the first one. False once none is needed.

        Raises ClientGone like `body`.
        """
        async with self._turn:
            if not self._waiting:
                return False
            if self.status is None:
                self.early = True
                kind = (b"content-type", signs.content_type(api))
                await self._head(200, [kind, *STREAM_HEADERS, *self._allowing()])
                await self._write(signs.opening(api, ident, model, created))
            else:
                await self._write(signs.further(api, opened=self.early))
        return True

    async def first_token(self) -> None:
        """The client has waited long enough: no sign of life comes behind this."""
        if self._waiting:
            async with self._turn:
                self._waiting = False

    async def start(self, status: int, headers: Headers) -> None:
        """Send the upstream's head; of a stream whose client has one already, nothing. Called once, or it is our
        mistake."""
        if self._origin is not None:
            self._origin.learn(headers)
        await self._start(status, headers)

    async def _start(self, status: int, headers: Headers) -> None:
        async with self._turn:
            if self.begun:
                raise RuntimeError("a response has one head")
            self.begun = True
            if not self.early:
                await self._head(status, headers)

    def _allowing(self) -> Headers:
        return self._origin.allowing if self._origin else ()

    async def body(self, chunk: bytes) -> None:
        """One piece. Raises ClientGone when the client has read nothing for `STALL_S`: it holds a slot meanwhile."""
        self._last = chunk or self._last
        await self._write(chunk)

    async def end(self, chunk: bytes = b"") -> None:
        await self.first_token()
        self.finished = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Head and body at once, with the body's length. To a client that was kept waiting for a stream it comes as the
        last event: Raises UpstreamFailed where it is none of an error."""
        if self._origin is not None:
            self._origin.learn(headers)
        await self._whole(status, headers, body)

    async def _whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.first_token()
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        if not self.early:
            await self.end(body)
        elif status < 400 and self._streams == b"ndjson":
            await self.end(body.strip() + b"\n")
        elif status < 400:
            raise UpstreamFailed("the upstream answered a request for a stream without one")
        else:
            await self._end_in_error(signs.late_error(self._path, status, body))

    async def json(self, status: int, value: object) -> None:
        await self._whole(status, [(b"content-type", b"application/json")], orjson.dumps(value))

    async def error(self, failure: ProxyError) -> None:
        """The error as an answer; or, if the head is out, as the last event of the stream. Any other body is left
        unfinished: the server then closes the connection, which tells the client."""
        await self.first_token()
        if self.status is None:
            await self._whole(failure.status, [*failure.headers(), *self._allowing()], failure.body(self._path))
        elif not self.finished:
            log.warning("%s broke off: %s", self._path, failure.message)
            await self._end_in_error(failure.envelope(self._path))

    async def _end_in_error(self, error: dict[str, Any]) -> None:
        if self._streams == b"ndjson":
            await self.end((b"" if self._last.endswith(b"\n") else b"\n") + orjson.dumps(error) + b"\n")
        elif self._streams:
            # An event too long to be held back, and broken off in its middle, must not swallow this one.
            gap = b"" if self._last.endswith(_EVENT_ENDS) else b"\n\n"
            ident = self.more.get(OUR_HEADERS + b"request-id", b"").decode()
            await self.end(gap + error_event(self._path, error, ident))

    async def _head(self, status: int, headers: Headers) -> None:
        self.status = status
        all_headers = [*headers, *self.more.items()]
        names = {name.lower() for name, _ in all_headers}
        if status in _NOT_NOW and b"retry-after" not in names:
            all_headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        for name, value in all_headers:
            if name == b"content-type" and (found := _STREAMS.search(value)):
                self._streams = found[0].lower()
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def _write(self, chunk: bytes) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise ClientGone from None


def error_event(path: str, error: dict[str, Any], ident: str = "") -> bytes:
    """The error as the last server-sent events of this API; `ident` is what an answer of Responses is called by."""
    if path.startswith(("/v1/responses", "/responses")):
        return signs.failed_response(error, ident)
    named = b"event: error\n" if path.startswith("/v1/messages") else b""
    return named + b"data: " + orjson.dumps(error) + b"\n\n"
