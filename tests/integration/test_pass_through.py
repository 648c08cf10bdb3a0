"""Paths, queries, headers and bodies that are none of the proxy's business."""

from __future__ import annotations

import asyncio
import gzip

import httpx
import pytest
from running_proxy import RunningProxy, proxied_stub, running_proxy
from stub_upstream import Exchange, StubUpstream

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


async def raw_exchange(running: RunningProxy, request: bytes) -> bytes:
    """The bytes of one answer to a request written by hand, which asks for the connection to be closed."""
    host, port = running.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "POST", "PROPFIND"])
async def test_any_method_path_and_query_reach_the_upstream_as_written(method: str) -> None:
    target = "/lora-adapters/%2Fa%20b/c;v=1?q=a+b%20c&q=%C3%BC&empty=&flag"

    async def answer(exchange: Exchange) -> None:
        await exchange.whole(207, b"" if method == "HEAD" else b"as is", [(b"X-From", b"upstream")])

    async with proxied_stub() as (stub, running):
        stub.routes[target.partition("?")[0]] = answer
        head = f"{method} {target} HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbody"
        got = await raw_exchange(running, head.encode())
        seen = stub.requests[-1]
    assert got.startswith(b"HTTP/1.1 207")
    assert b"x-from: upstream" in got.lower()
    assert got.endswith(b"\r\n\r\n" if method == "HEAD" else b"as is")
    assert (seen.method, seen.target, seen.body) == (method, target, b"body")


async def test_an_unknown_path_gets_the_upstreams_own_answer() -> None:
    async with proxied_stub() as (_stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.get("/no/such/path")
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_get_on_a_prompt_path_is_passed_through() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.get(f"{CHAT}?a=1")).status_code == 404
        assert (stub.requests[-1].method, stub.requests[-1].target) == ("GET", f"{CHAT}?a=1")


async def test_the_query_of_a_prompt_stays() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        await client.post(f"{CHAT}?user=%C3%BC&x=1+2", json={"messages": [{"role": "user", "content": "hi"}]})
        assert stub.generating()[0].target == f"{CHAT}?user=%C3%BC&x=1+2"


@pytest.mark.parametrize("path", [CHAT, "/elsewhere"])
async def test_headers_about_one_connection_or_for_the_proxy_are_not_forwarded(path: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    headers = [
        b"POST %s HTTP/1.1" % path.encode(),
        b"Host: proxy",
        b"Connection: close, X-Hop",
        b"X-Hop: 1",
        b"Keep-Alive: timeout=9",
        b"TE: trailers",
        b"Proxy-Connection: keep-alive",
        b"X-Prefixproxy-Lane: seven",
        b"x-prefixproxy-priority: batch",
        b"X-Own: kept",
        b"Authorization: Bearer client-key",
        b"Cookie: a=1",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
    ]
    async with proxied_stub() as (stub, running):
        await raw_exchange(running, b"\r\n".join(headers) + b"\r\n\r\n" + body)
        seen = next(seen for seen in stub.requests if seen.path == path)
        upstream_host = stub.url.removeprefix("http://").encode()
    names = {name for name, _value in seen.headers}
    assert names & {b"x-hop", b"keep-alive", b"te", b"proxy-connection", b"transfer-encoding"} == set()
    assert not any(name.startswith(b"x-prefixproxy-") for name in names)
    assert [seen.header(n) for n in (b"x-own", b"authorization", b"cookie")] == [b"kept", b"Bearer client-key", b"a=1"]
    assert seen.header(b"host") == upstream_host
    assert seen.header(b"content-length") == str(len(seen.body)).encode()


@pytest.mark.parametrize("path", [CHAT, "/elsewhere"])
async def test_headers_of_an_answer_come_back_but_for_those_about_the_connection(path: str) -> None:
    async def answer(exchange: Exchange) -> None:
        extra = [(b"Set-Cookie", b"a=1"), (b"Set-Cookie", b"b=2"), (b"Keep-Alive", b"timeout=5"), (b"X-Own", b"1")]
        await exchange.whole(418, b"teapot", [*extra, (b"Server", b"llama.cpp")])

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.routes[path] = answer
        got = await client.post(path, json={"messages": []})
    assert (got.status_code, got.content) == (418, b"teapot")
    assert got.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert got.headers.get_list("server") == ["llama.cpp"]
    assert got.headers["x-own"] == "1"
    assert "keep-alive" not in got.headers


async def test_an_encoded_answer_passes_with_its_bytes_and_encoding() -> None:
    packed = gzip.compress(b'{"plain": true}')

    async def answer(exchange: Exchange) -> None:
        await exchange.whole(200, packed, [(b"Content-Encoding", b"gzip"), (b"Content-Type", b"application/json")])

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.routes["/packed"] = answer
        async with client.stream("GET", "/packed") as got:
            raw = b"".join([chunk async for chunk in got.aiter_raw()])
    assert raw == packed
    assert got.headers["content-encoding"] == "gzip"


async def test_a_body_that_is_passed_through_keeps_its_encoding() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        packed = gzip.compress(b"{}")
        await client.post("/elsewhere", content=packed, headers={"content-encoding": "gzip"})
        seen = stub.requests[-1]
    assert (seen.body, seen.header(b"content-encoding")) == (packed, b"gzip")


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/scim+json"])
async def test_encoded_json_is_decoded_on_every_path(kind: str) -> None:
    """llama-server answers 415 to any encoded body."""
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        headers = {"content-encoding": "gzip", "content-type": kind}
        answer = await client.post("/tokenize", content=gzip.compress(b'{"content": "hi"}'), headers=headers)
        seen = stub.requests[-1]
    assert answer.json() == {"tokens": [104, 105]}
    assert (seen.body, seen.header(b"content-encoding")) == (b'{"content": "hi"}', None)
    assert seen.header(b"content-length") == str(len(seen.body)).encode()


@pytest.mark.parametrize(
    ("content", "coding", "status"),
    [
        (gzip.compress(b'"' + b"x" * 5000 + b'"'), "gzip", 413),
        (b"no gzip", "gzip", 400),
        (b"whatever br is", "br", 404),
    ],
    ids=["too large", "broken", "unknown"],
)
async def test_encoded_json_that_cannot_be_decoded(content: bytes, coding: str, status: int) -> None:
    async with (
        proxied_stub(server__max_body_bytes=2048) as (stub, running),
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        answer = await client.post("/elsewhere", content=content, headers=headers)
        forwarded = [(seen.body, seen.header(b"content-encoding")) for seen in stub.requests if seen.method == "POST"]
    assert answer.status_code == status
    assert ((content, coding.encode()) in forwarded) is (status == 404)


async def test_a_body_of_many_megabytes_arrives_whole() -> None:
    content = bytes(range(256)) * (3 << 12)
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        await client.post("/elsewhere", content=content)
        assert stub.requests[-1].body == content


async def test_an_empty_answer_stays_empty() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.whole(204, b"")

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.routes["/nothing"] = answer
        got = await client.options("/nothing")
    assert (got.status_code, got.content) == (204, b"")


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/props"])
async def test_in_its_first_moments_the_proxy_waits_for_what_its_upstream_is(path: str) -> None:
    """Agents read the list of models at their start, and that nobody was asked yet is no answer."""
    asked, may_answer, stub = asyncio.Event(), asyncio.Event(), StubUpstream()

    async def held_back(exchange: Exchange) -> None:
        asked.set()
        await may_answer.wait()
        await exchange.json(200, {"total_slots": 2, "model_alias": "stub"})

    stub.routes["/props"] = held_back
    async with (
        stub,
        running_proxy(stub.url, wait_ready=False) as running,
        httpx.AsyncClient(base_url=running.url) as client,
        asyncio.TaskGroup() as group,
    ):
        await asked.wait()
        early = group.create_task(client.get(path))
        assert (await client.get("/healthz")).status_code == 200
        may_answer.set()
        assert (await early).status_code == 200
