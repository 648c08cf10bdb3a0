"""Runs the proxy: the embedded engine if it is needed, the socket, the server, the signals that end it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

from prefixproxy.app import EMBEDDED, Proxy, create_app
from prefixproxy.engine import (
    HOST,
    Engine,
    EngineEvent,
    EngineFailed,
    EngineSettings,
    EngineState,
    check_installed,
    check_model,
    default_model,
)
from prefixproxy.errors import UsageError
from prefixproxy.server import BACKLOG, Server
from prefixproxy.settings import Settings
from prefixproxy.upkeep import Upkeep

DEFAULT_CTX_TOKENS = 4096
ENGINE_START_S = 300.0
"""How long requests wait for the embedded engine to load its model before they are refused."""
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
    """Tells the upstream's keeper what happens to its process; `never_up` is called if that never served and never
    will."""

    def __init__(self, never_up: Callable[[], None]) -> None:
        self.keeper: Upkeep | None = None
        self.failure = ""
        """Why it never served."""
        self._never_up = never_up
        self._was_ready = False

    def heard(self, event: EngineEvent) -> None:
        if self.keeper is None:
            return
        if event.state is EngineState.READY:
            self._was_ready = True
            self.keeper.state.probe_now.set()
        elif event.state in (EngineState.STARTING, EngineState.CRASHED):
            self.keeper.restarting(ENGINE_START_S)
        elif event.state is EngineState.GAVE_UP:
            if not self._was_ready:
                self.failure, self.keeper.state.told_down = event.reason, True
                self._never_up()
            self.keeper.gone(event.reason)


@asynccontextmanager
async def wired(
    settings: Settings, engine: EngineSettings | None, never_up: Callable[[], None] = lambda: None
) -> AsyncIterator[Proxy]:
    """The proxy's application with its engine running beneath it; the application's lifespan is the server's to run.

    If the engine gives up before it ever served, `never_up` is called, and leaving raises EngineFailed.
    """
    if engine is None:
        yield create_app(settings)
        return
    watch = _EngineWatch(never_up)
    async with Engine(engine, on_event=watch.heard) as running:
        proxy = create_app(settings, engine=running)
        watch.keeper = proxy.parts.dispatcher.keepers[EMBEDDED]
        watch.keeper.state.restart_s = ENGINE_START_S
        watch.keeper.restarting(ENGINE_START_S)
        yield proxy
        if watch.failure:
            raise EngineFailed(watch.failure)


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


class _Signals:
    """Ends the server in order on SIGINT, SIGTERM and SIGHUP, from before it starts until its engine has stopped."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._told = 0

    def tell(self) -> None:
        self._told += 1
        if self._server is not None:
            self._server.tell_to_stop()

    def end(self, server: Server) -> None:
        """From now on they end this one; those that came already do so now."""
        self._server = server
        for _ in range(self._told):
            server.tell_to_stop()

    @contextmanager
    def heard(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _stop_signals():
            loop.add_signal_handler(number, self.tell)
        try:
            yield
        finally:
            for number in _stop_signals():
                loop.remove_signal_handler(number)


def _stop_signals() -> list[int]:
    """Nothing is reloaded on SIGHUP: a terminal that goes away ends us, unless nohup has us ignore that."""
    hangup: int | None = getattr(signal, "SIGHUP", None)
    told: list[int] = [signal.SIGINT, signal.SIGTERM]
    return told if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN else [*told, hangup]


def server_of(proxy: Proxy) -> Server:
    return Server(proxy.app, proxy.ending)


@asynccontextmanager
async def on_loopback(settings: Settings, engine: EngineSettings | None) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy with these settings on a free loopback port; its parts and its URL. Whatever ends the block, Ctrl-C
    too, ends the server in good order: a task group alone would cancel it."""
    failure: BaseException | None = None
    with closing(bind(HOST, 0)) as listener:
        async with wired(settings, engine) as proxy:
            async with asyncio.TaskGroup() as group:
                server = server_of(proxy)
                group.create_task(server.serve(sockets=[listener]))
                try:
                    await server.up.wait()
                    yield proxy, f"http://{HOST}:{listener.getsockname()[1]}"
                except BaseException as error:  # noqa: BLE001 - raised as it is, once the server has ended
                    failure = error
                    server.tell_to_stop()  # nobody waits for what still runs
                server.tell_to_stop()
            if failure is not None:
                raise failure


async def serve(settings: Settings, on_listening: Callable[[str], None]) -> None:
    """Until told to stop (SIGINT, SIGTERM, SIGHUP). Raises UsageError before anything has started, and when its engine
    cannot run the model."""
    engine = engine_settings(settings)
    signals = _Signals()
    with closing(bind(settings.server.host, settings.server.port)) as listener, signals.heard():
        async with wired(settings, engine, signals.tell) as proxy:
            server = server_of(proxy)
            signals.end(server)
            host, port = listener.getsockname()[:2]
            on_listening(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
            await server.serve(sockets=[listener])


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
