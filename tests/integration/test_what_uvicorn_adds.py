"""What the HTTP server beneath us would let through, or tell, by itself: trailers, `Expect`, upgrades."""

from __future__ import annotations

import asyncio
import logging

import orjson
import pytest
from running_proxy import RunningProxy, proxied_stub

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = orjson.dumps({"messages": [{"role": "user", "content": "hi"}]})
TENANTS = [{"name": "team-a", "api_key": "right"}]


async def answered(running: RunningProxy, *writes: bytes) -> tuple[int, bytes]:
    """Status and the whole answer to a request that comes in these pieces."""
    host, port = running.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for number, piece in enumerate(writes):
        if number:
            await asyncio.sleep(0.05)  # two segments: no event tells that the first was read
        writer.write(piece)
        await writer.drain()
    async with asyncio.timeout(20):
        got = await reader.read(-1)
    writer.close()
    return int(got.split(b" ", 2)[1]), got


def chunked(path: str, *trailers: bytes, body: bytes = BODY) -> tuple[bytes, bytes]:
    head = b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n" % path.encode()
    rest = b"%x\r\n%s\r\n0\r\n" % (len(body), body) + b"".join(line + b"\r\n" for line in trailers) + b"\r\n"
    return head + b"content-type: application/json\r\ntrailer: x-api-key\r\n\r\n", rest


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/elsewhere"])
@pytest.mark.parametrize("trailer", [b"x-api-key: right", b"authorization: Bearer right"])
async def test_a_key_in_a_trailer_lets_nobody_in(path: str, trailer: bytes, in_one: bool) -> None:
    async with proxied_stub(tenants=TENANTS) as (stub, running):
        pieces = chunked(path, trailer)
        status, _ = await answered(running, *([b"".join(pieces)] if in_one else pieces))
        assert status == 401
        assert not any(seen.path == path and seen.method == "POST" for seen in stub.requests)


@pytest.mark.parametrize("in_one", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/elsewhere"])
async def test_a_trailer_is_not_forwarded(path: str, in_one: bool) -> None:
    async with proxied_stub() as (stub, running):
        pieces = chunked(path, b"trail: 1", b"x-prefixproxy-lane: a")
        await answered(running, *([b"".join(pieces)] if in_one else pieces))
        [seen] = [seen for seen in stub.requests if seen.path == path and seen.method == "POST"]
    assert orjson.loads(seen.body)["messages"][0]["content"] == "hi"
    assert (seen.header(b"content-type"), seen.header(b"trail")) == (b"application/json", None)


async def test_the_headers_behind_a_request_with_trailers_are_read() -> None:
    """Both come on one connection."""
    head, rest = chunked(CHAT, b"trail: 1")
    head = head.replace(b"connection: close\r\n", b"")
    second = b"GET /elsewhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\nmine: 2\r\n\r\n"
    async with proxied_stub() as (stub, running):
        await answered(running, head, rest + second)
        [seen] = [seen for seen in stub.requests if seen.path == "/elsewhere"]
    assert seen.header(b"mine") == b"2"


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/models", "/elsewhere"])
async def test_who_expects_to_be_told_to_continue_is_told_by_us_alone(path: str) -> None:
    """The stub, as many servers, sends no interim answer."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nexpect: 100-continue\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    async with proxied_stub() as (stub, running):
        status, _ = await answered(running, head.encode(), BODY)
        assert status == 100
        [seen] = [seen for seen in stub.requests if seen.path == path and seen.method == "POST"]
    assert (seen.header(b"expect"), orjson.loads(seen.body)["messages"][0]["content"]) == (None, "hi")


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
async def test_a_request_to_upgrade_is_a_plain_one_and_no_matter_for_the_log(
    upgrade: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: " + upgrade
    head += b"\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    async with proxied_stub() as (stub, running):
        status, _ = await answered(running, head)
        assert status == 200
        [seen] = [s for s in stub.requests if s.path == "/v1/models" and s.header(b"sec-websocket-key")]
    assert seen.header(b"upgrade") is None
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
