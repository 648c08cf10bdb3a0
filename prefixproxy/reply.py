"""Writes one ASGI response: its head at most once, its length right, errors in the shape of the API called."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable

import orjson
from starlette.types import Send

from prefixproxy.errors import ProxyError
from prefixproxy.intake import ClientGone

STALL_S = 300.0

_STREAMS = re.compile(rb"event-stream|ndjson", flags=re.IGNORECASE)
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")

Headers = Iterable[tuple[bytes, bytes]]

log = logging.getLogger(__name__)


class Reply:
    """One response to one request. `more` are headers of ours that every head gets."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._streams = b""
        self._last = _EVENT_ENDS[0]
        self.status: int | None = None
        self.finished = False
        self.more: dict[bytes, bytes] = {}

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head. Called once, or it is our mistake."""
        if self.status is not None:
            raise RuntimeError("a response has one head")
        self.status = status
        all_headers = [*headers, *self.more.items()]
        for name, value in all_headers:
            if name == b"content-type" and (found := _STREAMS.search(value)):
                self._streams = found[0].lower()
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})

    async def body(self, chunk: bytes) -> None:
        """One piece. Raises ClientGone when the client has read nothing for `STALL_S`: it holds a slot meanwhile."""
        self._last = chunk or self._last
        try:
            async with asyncio.timeout(STALL_S):
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise ClientGone from None

    async def end(self, chunk: bytes = b"") -> None:
        self.finished = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Head and body at once, with the body's length."""
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def json(self, status: int, value: object) -> None:
        await self.whole(status, [(b"content-type", b"application/json")], orjson.dumps(value))

    async def error(self, failure: ProxyError) -> None:
        """The error as an answer; or, if the head is out, as the last event of the stream. Any other body is left
        unfinished: the server then closes the connection, which tells the client."""
        if self.status is None:
            await self.whole(failure.status, failure.headers(), failure.body(self._path))
        elif not self.finished:
            log.warning("%s broke off: %s", self._path, failure.message)
            if self._streams == b"ndjson":
                await self.end((b"" if self._last.endswith(b"\n") else b"\n") + failure.body(self._path) + b"\n")
            elif self._streams:
                # An event too long to be held back, and broken off in its middle, must not swallow this one.
                gap = b"" if self._last.endswith(_EVENT_ENDS) else b"\n\n"
                await self.end(gap + error_event(self._path, failure))


def error_event(path: str, failure: ProxyError) -> bytes:
    """The error as a server-sent event of this API."""
    named = b"event: error\n" if path.startswith(("/v1/messages", "/v1/responses", "/responses")) else b""
    return named + b"data: " + failure.body(path) + b"\n\n"
