"""Runs a proxy on a socket of its own: in the test's event loop, or in a thread for clients that block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from stub_upstream import StubUpstream
from threads import in_thread

from prefixproxy.app import Proxy, create_app
from prefixproxy.schedule.types import SchedulerSnapshot
from prefixproxy.server import Server
from prefixproxy.serving import bind
from prefixproxy.settings import load_settings, packaged_config
from prefixproxy.types import SlotState

READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RunningProxy:
    url: str
    proxy: Proxy
    server: Server


@asynccontextmanager
async def running_proxy(
    upstream: str, *, wait_ready: bool = True, drain_s: float = 1.0, port: int = 0, **settings: Any
) -> AsyncIterator[RunningProxy]:
    """The proxy in front of `upstream`, in this event loop. `settings` are overrides with `__` for the dots."""
    overrides: dict[str, Any] = {name.replace("__", "."): value for name, value in settings.items()}
    overrides = {"state.path": ":memory:", "upstreams": [{"name": "local", "url": upstream}], **overrides}
    proxy = create_app(load_settings(packaged_config("default.toml"), overrides, {}))
    async with listening(proxy, wait_ready=wait_ready, drain_s=drain_s, port=port) as running:
        yield running


@asynccontextmanager
async def listening(
    proxy: Proxy, *, wait_ready: bool = True, drain_s: float = 1.0, port: int = 0
) -> AsyncIterator[RunningProxy]:
    """A proxy that is built already, on a socket of its own, in this event loop."""
    listener = bind("127.0.0.1", port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(proxy.app, proxy.ending, drain_s)
    failure: BaseException | None = None
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        try:
            await server.up.wait()
            if wait_ready:
                await until_ready(url)
            yield RunningProxy(url, proxy, server)
        except BaseException as error:  # noqa: BLE001 - raised as it is, once the server has ended in good order
            failure = error
        server.tell_to_stop()
    listener.close()
    if failure is not None:
        raise failure


async def until_ready(url: str) -> None:
    """Until /readyz says so: it tells only those who ask."""
    async with httpx.AsyncClient() as client, asyncio.timeout(READY_TIMEOUT_S):
        status = 0
        while status != 200:
            await asyncio.sleep(0.01)
            status = (await client.get(f"{url}/readyz")).status_code


@asynccontextmanager
async def proxied_stub(
    stub: StubUpstream | None = None, **settings: Any
) -> AsyncIterator[tuple[StubUpstream, RunningProxy]]:
    """A stub upstream and the proxy before it. Leaving it checks what must hold after anything: no slot is held, no
    request waits, and no request ever met a busy slot."""
    async with stub or StubUpstream() as upstream, running_proxy(upstream.url, **settings) as running:
        yield upstream, running
        await until_quiet(running)
        assert upstream.violations == []


async def until_quiet(running: RunningProxy) -> None:
    """Until every slot is idle again and nothing waits."""
    await eventually(lambda: _quiet(running.proxy.parts.dispatcher.snapshot()))


async def eventually(condition: Callable[[], object]) -> None:
    """Until the condition holds, for what no event tells; fails after a long while."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


def _quiet(snapshot: SchedulerSnapshot) -> bool:
    return not snapshot.waiting and all(slot.state is SlotState.IDLE for slot in snapshot.slots)


def proxy_in_thread(upstream: str, **settings: Any) -> AbstractContextManager[RunningProxy]:
    """The same for clients that block."""
    return in_thread("proxy", lambda: running_proxy(upstream, **settings))
