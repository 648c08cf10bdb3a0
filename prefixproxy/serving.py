"""Runs the proxy: the embedded engine if it is needed, the socket, the server, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn

from prefixproxy.app import EMBEDDED, Proxy, create_app
from prefixproxy.engine import (
    Engine,
    EngineEvent,
    EngineSettings,
    EngineState,
    check_installed,
    check_model,
    default_model,
)
from prefixproxy.errors import UsageError
from prefixproxy.settings import Settings
from prefixproxy.upkeep import Upkeep

DEFAULT_CTX_TOKENS = 4096
ENGINE_START_S = 300.0
"""How long requests wait for the embedded engine to load its model before they are refused."""
DRAIN_S = 30
BACKLOG = 2048
KEEP_ALIVE_S = 120
"""How long an idle connection of a client is kept. Longer than clients keep theirs (httpx and with it the openai SDK
5 s, undici 4 s, aiohttp 15 s, Go 90 s): the side that closes first must be the one that sends, or a request meets a
socket that is just being closed. uvicorn's own 5 s are httpx's to the second."""

log = logging.getLogger(__name__)


def engine_settings(settings: Settings) -> EngineSettings | None:
    """The embedded engine these settings ask for; None with an upstream. Raises UsageError for a bad model."""
    if settings.upstreams:
        return None
    check_installed()
    model = Path(settings.engine.model) if settings.engine.model else default_model()
    check_model(model)
    parallel = settings.engine.parallel
    return EngineSettings(model=model, parallel=parallel, ctx=parallel * (settings.engine.ctx or DEFAULT_CTX_TOKENS))


class _EngineWatch:
    """Tells the upstream's keeper what happens to its process."""

    def __init__(self) -> None:
        self.keeper: Upkeep | None = None

    def heard(self, event: EngineEvent) -> None:
        if self.keeper is None:
            return
        if event.state is EngineState.READY:
            self.keeper.state.probe_now.set()
        elif event.state in (EngineState.STARTING, EngineState.CRASHED):
            self.keeper.restarting(ENGINE_START_S)
        elif event.state is EngineState.GAVE_UP:
            self.keeper.gone(event.reason)


@asynccontextmanager
async def wired(settings: Settings, engine: EngineSettings | None) -> AsyncIterator[Proxy]:
    """The proxy's application with its engine running beneath it; the application's lifespan is the server's to run."""
    if engine is None:
        yield create_app(settings)
        return
    watch = _EngineWatch()
    async with Engine(engine, on_event=watch.heard) as running:
        proxy = create_app(settings, engine=running)
        watch.keeper = proxy.parts.dispatcher.keepers[EMBEDDED]
        watch.keeper.state.restart_s = ENGINE_START_S
        watch.keeper.restarting(ENGINE_START_S)
        yield proxy


def bind(host: str, port: int) -> socket.socket:
    """An address that listens: who connects from now on waits for the server. Raises UsageError when it is taken or
    not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as failure:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {failure.strerror} (server.host, server.port)") from None
    return listener


class _Server(uvicorn.Server):
    """Ends in order on SIGINT and SIGTERM, and with exit code 0: uvicorn would raise the signal once more at the end,
    over the head of an engine that still has to be stopped."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def server_of(proxy: Proxy) -> uvicorn.Server:
    """The HTTP server. Upstream's own `date` and `server` headers pass, so it adds none."""
    config = uvicorn.Config(
        proxy.app,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )
    return _Server(config)


async def serve(settings: Settings, on_listening: Callable[[str], None]) -> None:
    """Until told to stop (SIGINT, SIGTERM). Raises UsageError before anything has started."""
    engine = engine_settings(settings)
    listener = bind(settings.server.host, settings.server.port)
    try:
        async with wired(settings, engine) as proxy:
            host, port = listener.getsockname()[:2]
            on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            await server_of(proxy).serve(sockets=[listener])
    finally:
        listener.close()


def run(settings: Settings, on_listening: Callable[[str], None]) -> None:
    """`serve` in an event loop of its own."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(settings, on_listening))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # uvloop has no build for Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop
