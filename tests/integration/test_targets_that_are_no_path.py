"""A request target that is no path never leads anywhere but to an error of ours."""

from __future__ import annotations

import asyncio

import pytest
from running_proxy import proxied_stub

pytestmark = pytest.mark.anyio


async def answer_to(url: str, request: bytes) -> bytes:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("target", ["@127.0.0.1:1/slots", "*", "127.0.0.1/slots", "u:p@127.0.0.1:1/"])
async def test_another_host_cannot_be_named_in_the_target(method: str, target: str) -> None:
    async with proxied_stub() as (stub, running):
        request = f"{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\nContent-Length: 0\r\n\r\n"
        head = await answer_to(running.url, request.encode())
        assert head.startswith(b"HTTP/1.1 400 ")
        assert all(seen.header(b"authorization") is None for seen in stub.requests)


async def test_odd_paths_still_reach_the_upstream() -> None:
    async with proxied_stub() as (stub, running):
        head = await answer_to(running.url, b"GET //a@b/c?d=@e HTTP/1.1\r\nHost: x\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ")
        assert any(seen.target == "//a@b/c?d=@e" for seen in stub.requests)
