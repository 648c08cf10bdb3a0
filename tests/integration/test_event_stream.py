"""The journal's event stream: every record once, in order, also after a reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest
from running_proxy import proxied_stub

pytestmark = pytest.mark.anyio

BODY = {"messages": [{"role": "user", "content": "hello"}]}


async def events(client: httpx.AsyncClient, last_id: str = "") -> AsyncIterator[tuple[str, dict[str, Any]]]:
    headers = {"last-event-id": last_id} if last_id else {}
    async with client.stream("GET", "/prefixproxy/events", headers=headers) as stream:
        assert stream.headers["content-type"] == "text/event-stream"
        fields: dict[str, str] = {}
        async for line in stream.aiter_lines():
            name, _, value = line.partition(": ")
            if name in ("id", "event", "data"):
                fields[name] = value
            elif not line and "data" in fields:
                yield fields.get("id", ""), orjson.loads(fields["data"])
                fields = {}


async def chat(client: httpx.AsyncClient) -> str:
    answer = await client.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-prefixproxy-request-id"]


async def test_each_request_is_one_event_and_a_reconnect_misses_none() -> None:
    async with proxied_stub() as (_, running), httpx.AsyncClient(base_url=running.url, timeout=30) as client:
        before = await chat(client)
        seen: list[tuple[str, str]] = []

        async def watch(last_id: str, count: int) -> None:
            async for number, record in events(client, last_id):
                seen.append((number, record["id"]))
                if len(seen) == count:
                    return

        async with asyncio.timeout(30):
            await watch("0", 1)
            assert seen == [("1", before)]
            ids = [await chat(client), await chat(client)]
            await watch(seen[-1][0], 3)
        assert seen[1:] == [("2", ids[0]), ("3", ids[1])]


async def test_without_a_key_there_is_no_stream() -> None:
    async with proxied_stub(server__api_keys=["secret"]) as (_, running):
        async with httpx.AsyncClient(base_url=running.url) as client:
            answer = await client.get("/prefixproxy/events")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
