"""The journal as a server-sent event stream: each new record as it is written, a comment now and then while none is.

An event's id is the record's number; a browser that reconnects sends the last one it saw (`Last-Event-ID`), and gets
what it missed as far as the ring still has it, and how many it has not (`event: missed`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import orjson
from starlette.types import Receive, Scope, Send

from prefixproxy.errors import ProxyError
from prefixproxy.gate import Gate
from prefixproxy.intake import ClientGone, header, unless_gone, until_stopped
from prefixproxy.journal import Journal, record_json
from prefixproxy.reply import Reply

KEEP_ALIVE_S = 15.0
BATCH = 100
_HEADERS = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class Events:
    """Raw ASGI application for `GET /prefixproxy/events`."""

    def __init__(self, journal: Journal, gate: Gate) -> None:
        self._journal = journal
        self._gate = gate
        self._over = False
        self._waiting: set[asyncio.Event] = set()

    def end(self) -> None:
        """End every stream in good order: browsers ask again by themselves."""
        self._over = True
        for news in self._waiting:
            news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, scope["path"])
        asked = header(scope, b"last-event-id")
        try:
            with until_stopped():
                self._gate.tenant(scope)
                await unless_gone(receive, self._stream(reply, int(asked) if asked.isdigit() else self._journal.last))
        except ProxyError as failure:
            await reply.error(failure)

    async def _stream(self, reply: Reply, number: int) -> None:
        news = asyncio.Event()
        stop = self._journal.listen(news.set)
        self._waiting.add(news)
        try:
            await reply.start(200, _HEADERS)
            await reply.body(b": the journal, record by record\n\n")
            while not self._over:
                news.clear()
                number = await self._send_since(reply, number)
                with suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await news.wait()
                        continue
                await reply.body(b": nothing new\n\n")
            await reply.end()
        except ClientGone:
            return
        finally:
            self._waiting.discard(news)
            stop()

    async def _send_since(self, reply: Reply, number: int) -> int:
        """Send all records behind `number`; the number of the last one."""
        while True:
            batch = self._journal.since(number, BATCH)
            if batch.missed:
                await reply.body(b"event: missed\ndata: %d\n\n" % batch.missed)
            for entry in batch.entries:
                data = orjson.dumps(record_json(entry.record))
                await reply.body(b"id: %d\nevent: record\ndata: %b\n\n" % (entry.number, data))
            number = batch.last
            if len(batch.entries) < BATCH:
                return number
