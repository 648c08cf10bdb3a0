"""The end of the proxy: what runs may finish, and whoever cannot is told so in the shape of its API before it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from running_proxy import RunningProxy, eventually, running_proxy
from stub_upstream import Exchange, StubUpstream, event

from prefixproxy import server
from prefixproxy.types import Outcome

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/completion": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "stream": False},
}
TOKEN = event({"choices": [{"index": 0, "delta": {"content": "Fi"}, "finish_reason": None}]})
LONG_S = 600.0


async def stall(exchange: Exchange) -> None:
    await exchange.request.connection_gone.wait()


async def stall_behind_a_token(exchange: Exchange) -> None:
    await exchange.stream_head()
    await exchange.send(TOKEN)
    await exchange.request.connection_gone.wait()


@asynccontextmanager
async def one_slot(
    caplog: pytest.LogCaptureFixture, drain_s: float
) -> AsyncIterator[tuple[StubUpstream, RunningProxy]]:
    """A proxy with one slot to give; leaving it, nothing may have been logged with a traceback."""
    async with StubUpstream(n_slots=1) as stub, running_proxy(stub.url, drain_s=drain_s) as running:
        yield stub, running
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert stub.violations == []


def outcomes(running: RunningProxy) -> list[tuple[Outcome, int]]:
    return [(record.outcome, record.status) for record in running.proxy.parts.telemetry.journal.newest(10)]


def code_of(answer: dict[str, Any]) -> str:
    error = answer["error"]
    return str(error["code"] if isinstance(error, dict) else answer["code"])


@pytest.mark.parametrize("path", list(BODIES))
async def test_who_still_waits_when_the_drain_ends_is_told_in_its_own_shape(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with one_slot(caplog, drain_s=0.05) as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(stall)
        async with asyncio.TaskGroup() as group:
            running_one = group.create_task(client.post(path, json=BODIES[path]))
            await stub.arrived(1)
            queued = group.create_task(client.post(path, json=BODIES[path]))
            await eventually(lambda: running.proxy.parts.dispatcher.snapshot().waiting)
            running.server.tell_to_stop()
        for answer in (running_one.result(), queued.result()):
            assert (answer.status_code, code_of(answer.json())) == (503, "upstream_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
        assert len(stub.generating()) == 1
    assert outcomes(running) == [(Outcome.UPSTREAM_DOWN, 503)] * 2


@pytest.mark.parametrize(
    ("path", "start"),
    [(CHAT, "data: "), ("/v1/messages", "event: error\ndata: "), ("/v1/responses", "event: error\ndata: ")],
)
async def test_a_stream_ends_in_an_error_event(path: str, start: str, caplog: pytest.LogCaptureFixture) -> None:
    async with one_slot(caplog, drain_s=0.05) as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(stall_behind_a_token)
        async with client.stream("POST", path, json={**BODIES[path], "stream": True}) as answer:
            chunks = answer.aiter_text()
            got = await anext(chunks)
            running.server.tell_to_stop()
            got += "".join([chunk async for chunk in chunks])
        first, *_, last = got.removesuffix("\n\n").split("\n\n")
        assert first.encode() + b"\n\n" == TOKEN
        assert last.startswith(start)
        assert code_of(orjson.loads(last.removeprefix(start))) == "upstream_unavailable"
    assert outcomes(running) == [(Outcome.UPSTREAM_DOWN, 200)]


@pytest.mark.parametrize("within_the_drain", [False, True])
async def test_told_twice_it_ends_at_once(within_the_drain: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with one_slot(caplog, drain_s=LONG_S) as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(stall)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(client.post(CHAT, json=BODIES[CHAT]))
            await stub.arrived(1)
            running.server.tell_to_stop()
            if within_the_drain:
                await eventually(lambda: not any(each.is_serving() for each in running.server.servers))
            running.server.tell_to_stop()
        assert answer.result().status_code == 503


async def test_what_waits_in_the_queue_may_go_on_within_the_drain(caplog: pytest.LogCaptureFixture) -> None:
    release = asyncio.Event()
    async with one_slot(caplog, drain_s=LONG_S) as (stub, running), httpx.AsyncClient(base_url=running.url) as client:

        async def hold(exchange: Exchange) -> None:
            await release.wait()
            await stub.answer(exchange)

        stub.next_answers.append(hold)
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(client.post(CHAT, json=BODIES[CHAT])) for _ in range(2)]
            await eventually(lambda: running.proxy.parts.dispatcher.snapshot().waiting)
            running.server.tell_to_stop()
            await eventually(lambda: not any(each.is_serving() for each in running.server.servers))
            release.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]


async def test_the_journals_stream_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async with one_slot(caplog, drain_s=LONG_S) as (_, running), httpx.AsyncClient(base_url=running.url) as client:
        async with client.stream("GET", "/prefixproxy/events") as answer:
            chunks = answer.aiter_text()
            assert (await anext(chunks)).startswith(":")
            running.server.tell_to_stop()
            assert [chunk async for chunk in chunks] == []


@pytest.mark.parametrize("path", ["/v1/embeddings", "/elsewhere", "/prefixproxy/upstreams/local/metrics"])
async def test_a_request_that_is_passed_on_is_told_too(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with one_slot(caplog, drain_s=0.05) as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.routes["/metrics" if path.endswith("metrics") else path] = stall
        async with asyncio.TaskGroup() as group:
            method = "GET" if path.endswith("metrics") else "POST"
            answer = group.create_task(client.request(method, path, content=b"{}" if method == "POST" else None))
            await eventually(lambda: any(seen.path in stub.routes for seen in stub.requests))
            running.server.tell_to_stop()
        assert (answer.result().status_code, code_of(answer.result().json())) == (503, "upstream_unavailable")


async def test_a_client_that_does_not_read_is_cut_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LAST_WORD_S", 0.05)
    full = asyncio.Event()

    async def flood(exchange: Exchange) -> None:
        await exchange.stream_head()
        full.set()
        while not exchange.request.connection_gone.is_set():
            await exchange.send(TOKEN * 1000)

    async with one_slot(caplog, drain_s=0.05) as (stub, running):
        stub.next_answers.append(flood)
        host, port = running.url.removeprefix("http://").split(":")
        _reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        request = httpx.Request("POST", running.url + CHAT, json={**BODIES[CHAT], "stream": True})
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        writer.write(f"POST {CHAT} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        await full.wait()
        running.server.tell_to_stop()
        await eventually(lambda: outcomes(running))
        writer.transport.abort()
    assert outcomes(running)[0][0] in (Outcome.UPSTREAM_DOWN, Outcome.CLIENT_GONE)
