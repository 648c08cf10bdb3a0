"""A page of another origin reads errors of ours, and streams that were begun early, where the upstream allows it to."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from running_proxy import proxied_stub
from stub_upstream import Exchange, StubUpstream

pytestmark = pytest.mark.anyio

PATH, APP = "/v1/chat/completions", "http://app.example"
ALLOW = "access-control-allow-origin"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
LIMIT_S = 60.0


async def preflight(exchange: Exchange) -> None:
    """As llama-server answers it (server-http.cpp)."""
    await exchange.whole(200, b"", [(b"Access-Control-Allow-Origin", exchange.request.header(b"origin") or b"")])


async def asked(client: httpx.AsyncClient, stub: StubUpstream) -> None:
    stub.routes[PATH] = preflight
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    answer = await client.options(PATH, headers=wanted)
    del stub.routes[PATH]
    assert answer.headers[ALLOW] == APP


async def test_an_error_of_ours_can_be_read_by_a_page_that_may_ask() -> None:
    async with (
        proxied_stub(StubUpstream()) as (stub, running),
        httpx.AsyncClient(base_url=running.url, headers={"origin": APP}, timeout=LIMIT_S) as client,
    ):
        unread = await client.post(PATH, content=b"{bad")
        assert (unread.status_code, ALLOW in unread.headers) == (400, False)
        await asked(client, stub)
        read = await client.post(PATH, content=b"{bad")
        assert (read.status_code, read.headers[ALLOW]) == (400, APP)
        other = await client.post(PATH, content=b"{bad", headers={"origin": "http://other.example"})
        assert ALLOW not in other.headers


async def test_so_can_a_stream_that_was_begun_early() -> None:
    soon = {"patience__after": 0.05, "patience__every": 0.05}
    async with (
        proxied_stub(StubUpstream(), **soon) as (stub, running),
        httpx.AsyncClient(base_url=running.url, headers={"origin": APP}, timeout=LIMIT_S) as client,
    ):
        await asked(client, stub)
        go = asyncio.Event()

        async def held(exchange: Exchange) -> None:
            await go.wait()
            await exchange.json(400, {"error": {"message": "no"}})

        stub.next_answers.append(held)
        async with client.stream("POST", PATH, json={**BODY, "stream": True}) as answer:
            go.set()
            assert (answer.status_code, answer.headers[ALLOW]) == (200, APP)
            await answer.aread()


REBOUND = {"host": "app.example:8100", "origin": "http://app.example:8100"}


@pytest.mark.parametrize("path", [PATH, "/slots", "/prefixproxy/requests", "/prefixproxy/events", "/metrics"])
async def test_a_page_that_has_its_own_name_resolve_to_the_proxy_reads_nothing(path: str) -> None:
    async with (
        proxied_stub() as (stub, running),
        httpx.AsyncClient(base_url=running.url, headers=REBOUND, timeout=LIMIT_S) as client,
    ):
        answer = await (client.post(path, json=BODY) if path == PATH else client.get(path))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert stub.generating() == []


@pytest.mark.parametrize(
    "settings", [{"server__hosts": ["app.example"]}, {"server__api_keys": ["k"]}, {"server__host": "0.0.0.0"}], ids=str
)
async def test_where_its_name_is_known_or_keys_are_asked_for_it_is_answered(settings: dict[str, Any]) -> None:
    async with (
        proxied_stub(**settings) as (_, running),
        httpx.AsyncClient(base_url=running.url, headers={**REBOUND, "x-api-key": "k"}, timeout=LIMIT_S) as client,
    ):
        assert (await client.post(PATH, json=BODY)).status_code == 200
