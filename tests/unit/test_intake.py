"""Bodies are decoded within the limit, and every way to be wrong has its own code."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.errors import BadRequest, ProxyError
from prefixproxy.intake import ClientGone, decode_body, read_body, unless_gone, until_stopped

LIMIT = 100_000


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


CODERS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", bare_deflate),
    ("zstd", zstandard.compress),
    ("identity", lambda data: data),
    ("gzip, zstd", lambda data: zstandard.compress(gzip.compress(data))),
]


@pytest.mark.parametrize(("coding", "encode"), CODERS)
@given(data=st.binary(max_size=5000))
def test_a_body_comes_out_as_it_was_before_encoding(coding: str, encode: Callable[[bytes], bytes], data: bytes) -> None:
    assert decode_body(encode(data), coding, LIMIT) == data


@pytest.mark.parametrize("encode", [gzip.compress, zstandard.compress])
def test_several_members_in_a_row_are_one_body(encode: Callable[[bytes], bytes]) -> None:
    coding = "gzip" if encode is gzip.compress else "zstd"
    assert decode_body(encode(b"one ") + encode(b"two") * 400, coding, LIMIT) == b"one " + b"two" * 400


@pytest.mark.parametrize(("coding", "encode"), [c for c in CODERS if c[0] in ("gzip", "deflate", "zstd")])
def test_a_bomb_stops_at_the_limit(coding: str, encode: Callable[[bytes], bytes]) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_body(encode(bytes(20_000_000)), coding, LIMIT)
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize(("coding", "encode"), [c for c in CODERS if c[0] in ("gzip", "deflate", "zstd")])
def test_a_body_cut_short_is_no_valid_body(coding: str, encode: Callable[[bytes], bytes]) -> None:
    whole = encode(bytes(range(256)) * 20)
    with pytest.raises(BadRequest) as caught:
        decode_body(whole[:-6], coding, LIMIT)
    assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")


def test_an_unknown_coding_is_named() -> None:
    with pytest.raises(BadRequest, match="'br'") as caught:
        decode_body(b"x", "br", LIMIT)
    assert (caught.value.status, caught.value.code) == (415, "unsupported_encoding")


async def _read(messages: list[dict[str, object]], headers: list[tuple[bytes, bytes]], limit: int) -> bytes:
    feed = iter(messages)

    async def receive() -> dict[str, object]:
        return next(feed)

    return await read_body({"headers": headers}, receive, limit)


def run(messages: list[dict[str, object]], headers: list[tuple[bytes, bytes]], limit: int = 10) -> bytes:
    return asyncio.run(_read(messages, headers, limit))


def test_chunks_without_a_length_are_joined() -> None:
    chunks: list[dict[str, object]] = [
        {"type": "http.request", "body": b"abc", "more_body": True},
        {"type": "http.request", "body": b"def", "more_body": False},
    ]
    assert run(chunks, []) == b"abcdef"


def test_a_length_over_the_limit_is_refused_before_a_byte_is_read() -> None:
    with pytest.raises(BadRequest) as caught:
        run([], [(b"content-length", b"11")])
    assert caught.value.code == "body_too_large"


def test_chunks_over_the_limit_are_refused() -> None:
    chunk: dict[str, object] = {"type": "http.request", "body": b"abcdef", "more_body": True}
    with pytest.raises(BadRequest) as caught:
        run([chunk, chunk], [])
    assert caught.value.status == 413


def test_a_client_that_leaves_while_sending_is_gone() -> None:
    with pytest.raises(ClientGone):
        run([{"type": "http.disconnect"}], [])


async def _never() -> dict[str, object]:
    await asyncio.Event().wait()
    raise AssertionError


async def _disconnect() -> dict[str, object]:
    return {"type": "http.disconnect"}


@pytest.mark.anyio
async def test_work_runs_to_its_end_unless_the_client_leaves_or_is_found_gone() -> None:
    async def done() -> None:
        return

    async def for_ever() -> None:
        await asyncio.Event().wait()

    async def finds_it_gone() -> None:
        raise ClientGone

    assert await unless_gone(_never, done())
    assert not await unless_gone(_disconnect, for_ever())
    assert not await unless_gone(_never, finds_it_gone())


@pytest.mark.anyio
async def test_work_that_is_cancelled_from_outside_is_told_to_the_client() -> None:
    cleaned, started = asyncio.Event(), asyncio.Event()

    async def for_ever() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async def request() -> ProxyError:
        try:
            with until_stopped():
                await unless_gone(_never, for_ever())
        except ProxyError as failure:
            return failure
        raise AssertionError

    async with asyncio.TaskGroup() as group:
        task = group.create_task(request())
        await started.wait()
        task.cancel()
        failure = await task
    assert cleaned.is_set()
    assert (failure.status, failure.code) == (503, "upstream_unavailable")
    assert failure.retry_after_s
