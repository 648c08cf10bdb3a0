"""The HTTP server: uvicorn, ended in good order, with answers that old clients can read.

The end has three steps. No new connection is taken, and what runs may finish (waiting requests too: a slot may come
free in time). After the drain, or when told again, every request still there is cancelled: it answers its client in
the shape of its API (`intake.until_stopped`) and writes its record. A client that does not read even that is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

BACKLOG = 2048
KEEP_ALIVE_S = 120
"""How long an idle connection of a client is kept. Longer than clients keep theirs (httpx and with it the openai SDK
5 s, undici 4 s, aiohttp 15 s, Go 90 s): the side that closes first must be the one that sends, or a request meets a
socket that is just being closed. uvicorn's own 5 s are httpx's to the second."""
DRAIN_S = 30.0
LAST_WORD_S = 5.0
"""How long cancelled requests have to tell their clients so."""
CUT_OFF_S = 1.0
LOOK_EVERY_S = 0.05


class Server(uvicorn.Server):
    """Serves `app` until `tell_to_stop`. `ending` is called when the end begins, for streams that never end by
    themselves. Signals are the caller's; `up` is set once it listens."""

    def __init__(self, app: ASGIApp, ending: Callable[[], None], drain_s: float = DRAIN_S) -> None:
        super().__init__(_config(app))
        self.up = asyncio.Event()
        self._ending = ending
        self._drain_s = drain_s
        self._drain: asyncio.Timeout | None = None

    def tell_to_stop(self) -> None:
        """The first time what runs may finish; the second time it is ended at once."""
        if self.should_exit:
            self._drain_s = 0.0
            if self._drain is not None and not self._drain.expired():
                self._drain.reschedule(asyncio.get_running_loop().time())
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()

    async def shutdown(self, sockets: Any = None) -> None:
        """As uvicorn's, but requests that are cancelled get the time to answer, and are over when the lifespan ends."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        self._ending()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s) as self._drain:
                await self._idle()
        self._drain = None
        for task in list(self.server_state.tasks):
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._idle()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(CUT_OFF_S):
                await self._idle()
        await self.lifespan.shutdown()

    async def _idle(self) -> None:
        """Until every answer has left and no request runs; nothing tells when a connection has closed."""
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)


def _config(app: ASGIApp) -> uvicorn.Config:
    """Upstream's own `date` and `server` headers pass, so none is added."""
    return uvicorn.Config(
        _ForOldClients(app),
        loop="uvloop",
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


class _Protocol(HttpToolsProtocol):
    """Without the trailers of a chunked body: uvicorn adds them to the headers that the application reads, and those
    who speak for a header by its trailer (credentials above all) must not be heard (RFC 9110 section 6.5.1). A request
    to upgrade is a plain one here, which needs no word in the log."""

    _in_body = False

    def on_message_begin(self) -> None:
        self._in_body = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_body = True
        super().on_headers_complete()

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.debug("a request to upgrade its connection is taken as a plain one")


class _ForOldClients:
    """HTTP/1.0 knows no chunks (RFC 9112 section 6.1): there the end of the connection is the end of the body. uvicorn
    over httptools sends chunks all the same; it leaves them out for a body whose length it believes to know."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = getattr(send, "__self__", None)
        if scope.get("http_version") == "1.0" and isinstance(cycle, RequestResponseCycle):
            send = _until_closed(cycle, send)
        await self._app(scope, receive, send)


def _until_closed(cycle: RequestResponseCycle, send: Send) -> Send:
    unknown_length = False

    async def sending(message: Message) -> None:
        nonlocal unknown_length
        if message["type"] == "http.response.start":
            unknown_length = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if unknown_length:
                cycle.chunked_encoding = False
        elif unknown_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return sending
