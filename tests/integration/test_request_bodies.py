"""What a client may put into a body, and what comes back when it is wrong."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import zstandard
from running_proxy import proxied_stub
from stub_upstream import Exchange

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "hello"}], "seed": 1}'


@pytest.mark.parametrize("body", [b"", b"{", b'{"messages": [}', b"\xff\xfe", b"not json"])
async def test_what_is_no_json_is_refused_before_it_reaches_the_upstream(body: bytes) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post(CHAT, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"
        assert stub.generating() == []


@pytest.mark.parametrize(
    ("path", "code_of", "rest"),
    [
        (CHAT, lambda answer: answer["error"]["code"], {"type": "invalid_request_error", "param": None}),
        ("/v1/completions", lambda answer: answer["error"]["code"], {"type": "invalid_request_error", "param": None}),
        ("/v1/messages", lambda answer: answer["error"]["code"], {"type": "invalid_request_error"}),
        ("/api/chat", lambda answer: answer["code"], {}),
    ],
)
async def test_an_error_has_the_shape_of_the_api_that_was_called(path: str, code_of: Any, rest: dict[str, Any]) -> None:
    async with proxied_stub() as (_stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = (await client.post(path, content=b"{")).json()
    assert code_of(answer) == "invalid_json"
    if path == "/v1/messages":
        assert answer["type"] == "error"
    if path == "/api/chat":
        assert isinstance(answer["error"], str)
    else:
        assert rest.items() <= answer["error"].items()


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": "none"}',
        b'{"messages": [{"role": 7, "content": {"a": 1}}]}',
        b'{"messages": [null], "tools": "x"}',
        b'{"prompt": 3}',
        b"{}",
    ],
)
async def test_wrong_types_are_the_upstreams_to_judge_and_its_error_comes_back(body: bytes) -> None:
    verdict = b'{"error": {"code": 400,  "message": "\xe2\x80\xa8 wrong type", "type": "invalid_request_error"}}'

    async def refuse(exchange: Exchange) -> None:
        await exchange.whole(400, verdict, [(b"Content-Type", b"application/json"), (b"X-Reason", b"types")])

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(refuse)
        answer = await client.post(CHAT, content=body)
        assert (answer.status_code, answer.content) == (400, verdict)
        assert answer.headers["x-reason"] == "types"
        sent = stub.generating()[0].json()
    asked = httpx.Response(200, content=body).json()
    assert {key: sent[key] for key in asked} == asked


ENCODINGS = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY),
    "deflate": zlib.compress(BODY),
    "zstd": zstandard.compress(BODY),
    "identity": BODY,
    "gzip, zstd": zstandard.compress(gzip.compress(BODY)),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_an_encoded_body_reaches_the_upstream_decoded(encoding: str) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post(CHAT, content=ENCODINGS[encoding], headers={"content-encoding": encoding})
        assert answer.status_code == 200
        seen = stub.generating()[0]
    assert seen.json()["messages"] == [{"role": "user", "content": "hello"}]
    assert seen.header(b"content-encoding") is None
    assert seen.header(b"content-length") == str(len(seen.body)).encode()


@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        ("br", BODY, 415, "unsupported_encoding"),
        ("gzip", BODY, 400, "invalid_encoding"),
        ("zstd", zstandard.compress(BODY)[:-3], 400, "invalid_encoding"),
    ],
)
async def test_an_encoding_that_cannot_be_undone_is_refused(encoding: str, body: bytes, status: int, code: str) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post(CHAT, content=body, headers={"content-encoding": encoding})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert stub.generating() == []


@pytest.mark.parametrize("path", [CHAT, "/prefixproxy/explain"])
@pytest.mark.parametrize("levels", [1_100, 5_000, 100_000])
async def test_a_body_nested_deeper_than_any_prompt_is_refused_in_words(path: str, levels: int) -> None:
    """llama-server would read it; the limit is documented."""
    body = BODY[:-1] + b', "x": ' + b"[" * levels + b"]" * levels + b"}"
    asked = body if path == CHAT else b'{"body": ' + body + b"}"
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post(path, content=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        assert (
            answer.json()["error"]["message"] == "The body is nested deeper than this proxy reads (about 1,000 levels)"
        )
        assert stub.generating() == []


@pytest.mark.parametrize("levels", [300, 900])
async def test_a_body_nested_less_deep_passes_and_is_explained(levels: int) -> None:
    body = BODY[:-1] + b', "x": ' + b"[" * levels + b"]" * levels + b"}"
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.post(CHAT, content=body)).status_code == 200
        assert b"[" * levels in stub.generating()[0].body
        answer = await client.post("/prefixproxy/explain", content=b'{"body": ' + body + b"}")
        assert (answer.status_code, b"[" * levels in answer.content) == (200, True)


async def test_zero_bytes_behind_a_body_are_overlooked() -> None:
    """As llama-server does, whose parser takes one for the end."""
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.post(CHAT, content=BODY + b"\0\0")).status_code == 200
        assert stub.generating()[0].json()["seed"] == 1


async def in_pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_a_chunked_upload_is_joined_and_gets_a_length() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post(CHAT, content=in_pieces(BODY[:7], BODY[7:20], BODY[20:]))
        assert answer.status_code == 200
        seen = stub.generating()[0]
    assert seen.json()["messages"][0]["content"] == "hello"
    assert seen.header(b"transfer-encoding") is None
    assert seen.header(b"content-length") == str(len(seen.body)).encode()


LARGE = b'{"messages": [{"role": "user", "content": "' + b"x" * 5000 + b'"}]}'


@pytest.mark.parametrize(
    ("path", "way"),
    [(CHAT, "whole"), (CHAT, "chunked"), (CHAT, "bomb"), ("/tokenize", "whole"), ("/tokenize", "chunked")],
)
async def test_a_body_over_the_limit_is_refused(path: str, way: str) -> None:
    async with (
        proxied_stub(server__max_body_bytes=2048) as (stub, running),
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        before = len(stub.requests)
        if way == "whole":
            answer = await client.post(path, content=LARGE)
        elif way == "chunked":
            answer = await client.post(path, content=in_pieces(LARGE[:1500], LARGE[1500:]))
        else:
            answer = await client.post(path, content=gzip.compress(LARGE), headers={"content-encoding": "gzip"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert [seen for seen in stub.requests[before:] if seen.method == "POST"] == []


async def test_a_body_of_exactly_the_limit_passes() -> None:
    async with (
        proxied_stub(server__max_body_bytes=len(LARGE)) as (_stub, running),
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        assert (await client.post(CHAT, content=LARGE)).status_code == 200
