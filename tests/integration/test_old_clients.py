"""HTTP/1.0 knows neither chunks nor connections that stay: the body ends where the connection does."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from running_proxy import RunningProxy, proxied_stub
from stub_upstream import Exchange

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def asked(running: RunningProxy, path: str, body: bytes = b"", headers: str = "") -> tuple[str, bytes]:
    """All that an HTTP/1.0 client reads until the end of its connection: head and body."""
    host, port = running.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    method = "POST" if body else "GET"
    writer.write(f"{method} {path} HTTP/1.0\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body)
    head, _, got = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    return head.decode().lower(), got


@pytest.mark.parametrize("headers", ["", "connection: keep-alive\r\n"])
async def test_a_stream_comes_without_chunks_and_ends_with_the_connection(headers: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 3}
    async with proxied_stub() as (stub, running):
        head, got = await asked(running, CHAT, orjson.dumps(body), headers)
        wanted = [e for e in stub.chat_events(stub.generating()[0]) if b"prompt_progress" not in e]
    assert "200 ok" in head
    assert "transfer-encoding" not in head
    assert "connection: close" in head
    assert got == b"".join(wanted)


async def test_an_answer_of_known_length_keeps_it() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with proxied_stub() as (_, running):
        head, got = await asked(running, CHAT, orjson.dumps(body))
    assert f"content-length: {len(got)}" in head
    assert orjson.loads(got)["choices"][0]["message"]["content"] == "Fine."


async def test_what_is_passed_on_in_chunks_comes_without_them() -> None:
    async def in_chunks(exchange: Exchange) -> None:
        await exchange.head(200, [(b"Content-Type", b"text/plain")])
        for part in (b"one ", b"two ", b"three"):
            await exchange.send(part)
        await exchange.end()

    async with proxied_stub() as (stub, running):
        stub.routes["/elsewhere"] = in_chunks
        head, got = await asked(running, "/elsewhere")
    assert "transfer-encoding" not in head
    assert got == b"one two three"
