"""A client that leaves: the upstream's work ends with it, and its slot serves others only once it is seen idle."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from running_proxy import RunningProxy, eventually, proxied_stub
from stub_upstream import Exchange, Seen, StubUpstream, event

from prefixproxy.types import Outcome, SlotState

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PATIENCE_S = 60.0


def chat(stream: bool, text: str = "hi") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stream": stream}


class Client:
    """A connection that can be closed at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def sending(cls, running: RunningProxy, body: dict[str, Any]) -> Client:
        host, port = running.url.removeprefix("http://").split(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        request = httpx.Request("POST", running.url + CHAT, json=body)
        lines = [f"POST {CHAT} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
        client._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + request.content)
        return client

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def stall(exchange: Exchange) -> None:
    await exchange.request.connection_gone.wait()


async def stall_behind_the_head(exchange: Exchange) -> None:
    await exchange.stream_head()
    await exchange.request.connection_gone.wait()


async def stall_behind_a_token(exchange: Exchange) -> None:
    await exchange.stream_head()
    await exchange.send(event({"choices": [{"index": 0, "delta": {"content": "Fi"}, "finish_reason": None}]}))
    await exchange.request.connection_gone.wait()


async def closed(seen: Seen) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await seen.connection_gone.wait()


async def outcome_of_first(running: RunningProxy) -> Outcome:
    """The outcome of the oldest request in the journal, once it is there."""
    journal = running.proxy.parts.telemetry.journal
    await eventually(lambda: journal.newest(10))
    return journal.newest(10)[-1].outcome


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [stall, stall_behind_the_head, stall_behind_a_token])
async def test_the_upstream_connection_is_closed_when_the_client_leaves(script: Any, stream: bool) -> None:
    async with proxied_stub(StubUpstream(n_slots=1)) as (stub, running):
        stub.next_answers.append(script)
        client = await Client.sending(running, chat(stream))
        seen = await stub.arrived(1)
        if stream and script is stall_behind_a_token:
            await client.reader.readuntil(b'"Fi"')
        await client.leave()
        await closed(seen)
        assert await outcome_of_first(running) is Outcome.CLIENT_GONE


async def test_a_client_that_leaves_the_queue_is_never_sent() -> None:
    async with proxied_stub(StubUpstream(n_slots=1)) as (stub, running):
        release = asyncio.Event()

        async def hold(exchange: Exchange) -> None:
            await release.wait()
            await stub.answer(exchange)

        stub.next_answers.append(hold)
        first = await Client.sending(running, chat(True, "first"))
        await stub.arrived(1)
        second = await Client.sending(running, chat(True, "second"))
        snapshot = running.proxy.parts.dispatcher.snapshot
        await eventually(lambda: len(snapshot().waiting) == 1)
        await second.leave()
        await eventually(lambda: not snapshot().waiting)
        release.set()
        assert b"[DONE]" in await first.reader.readuntil(b"[DONE]")
        await first.leave()
        async with httpx.AsyncClient(base_url=running.url) as client:
            assert (await client.post(CHAT, json=chat(False, "third"))).status_code == 200
        assert [seen.json()["messages"][0]["content"] for seen in stub.generating()] == ["first", "third"]


async def test_a_slot_whose_client_left_is_used_again_only_when_it_is_seen_idle() -> None:
    async with proxied_stub(StubUpstream(n_slots=1)) as (stub, running):
        stub.may_drain.clear()
        stub.next_answers.append(stall_behind_a_token)
        first = await Client.sending(running, chat(True, "first"))
        await first.reader.readuntil(b'"Fi"')
        await first.leave()
        await closed(await stub.arrived(1))
        second = await Client.sending(running, chat(True, "second"))
        await readings(stub, 3)
        assert len(stub.generating()) == 1
        assert [slot.state for slot in running.proxy.parts.dispatcher.snapshot().slots] == [SlotState.DRAINING]
        stub.may_drain.set()
        assert b"Fine." in await second.reader.readuntil(b"[DONE]")
        await second.leave()


async def readings(stub: StubUpstream, more: int) -> None:
    """Until the slots have been read this many times more."""

    def count() -> int:
        return sum(seen.path == "/slots" for seen in stub.requests)

    until = count() + more
    await eventually(lambda: count() >= until)


async def test_a_client_that_leaves_half_way_through_its_upload_costs_nothing() -> None:
    async with proxied_stub() as (stub, running):
        host, port = running.url.removeprefix("http://").split(":")
        _reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".encode() + b'{"messages"')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert await outcome_of_first(running) is Outcome.CLIENT_GONE
        assert stub.generating() == []
