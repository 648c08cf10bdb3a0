"""Reads a request's body from the ASGI edge: bounded, decoded, and told apart from a client that left."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import zstandard
from starlette.types import Receive, Scope

from prefixproxy.errors import BadRequest, UpstreamFailed, UpstreamUnavailable

OUR_HEADERS = b"x-prefixproxy-"
"""Hints in requests, facts in answers; none is ever forwarded."""

IDENTITY = frozenset({"", "identity"})
GZIP = frozenset({"gzip", "x-gzip"})
KNOWN = GZIP | {"deflate", "zstd"}
_PIECE_BYTES = 1 << 20
BACK_IN_S = 5.0
"""When to try again at a proxy that is being stopped: a restart takes about so long."""
_ZSTD_BITE_BYTES = 512
_ZSTD_WINDOW = 1 << 27
"""The largest window RFC 8878 section 3.1.1.1.2 asks decoders to support is 8 MB; tools write up to 128 MB."""


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


def header(scope: Scope, name: bytes) -> str:
    """The first header called `name` (lower case), "" if there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body as sent, still encoded.

    Raises BadRequest `body_too_large` (413) over `limit` bytes, before reading where Content-Length already says so,
    and ClientGone when the client leaves half-way.
    """
    announced = header(scope, b"content-length")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


def is_decodable(content_encoding: str) -> bool:
    """Whether `decode_body` knows every coding named, and there is one to undo."""
    codings = {coding.strip().lower() for coding in content_encoding.split(",")}
    return codings <= KNOWN | IDENTITY and not codings <= IDENTITY


async def decoded_body(body: bytes, content_encoding: str, limit: int) -> bytes:
    """`decode_body`, beside the event loop: a few bytes may unfold to `limit`, and decoders leave the lock free."""
    if content_encoding.strip().lower() in IDENTITY:
        return body
    return await asyncio.to_thread(decode_body, body, content_encoding, limit)


def decode_body(body: bytes, content_encoding: str, limit: int) -> bytes:
    """The body with its `Content-Encoding` undone (gzip, deflate, zstd; several in a row).

    Raises BadRequest: `unsupported_encoding` (415), `invalid_encoding` (400) for bytes that do not decode,
    `body_too_large` (413) as soon as the output passes `limit`, so a small bomb costs no more than the limit.
    """
    for coding in reversed([c.strip().lower() for c in content_encoding.split(",")]):
        body = _decode_one(body, coding, limit)
    return body


async def decoded(chunks: AsyncIterator[bytes], coding: str) -> AsyncIterator[bytes]:
    """An answer's chunks with its `Content-Encoding` undone as they come, in pieces of at most 1 MiB.

    Raises UpstreamFailed for a coding other than gzip and deflate (none was asked for), and for bytes that are none.
    """
    if coding not in GZIP | {"deflate"}:
        raise UpstreamFailed(f"the upstream encoded its stream as {coding!r}, which nobody asked for")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        async for chunk in chunks:
            piece = decoder.decompress(chunk, _PIECE_BYTES)
            while piece:
                yield piece
                piece = decoder.decompress(decoder.unconsumed_tail, _PIECE_BYTES)
    except zlib.error as failure:
        raise UpstreamFailed(f"the upstream's stream is no valid {coding} data") from failure


def _decode_one(body: bytes, coding: str, limit: int) -> bytes:
    if coding in IDENTITY:
        return body
    if coding not in KNOWN:
        known = "gzip, deflate and zstd are"
        raise BadRequest(
            f"content-encoding {coding!r}: only {known} understood", code="unsupported_encoding", status=415
        )
    try:
        decoded = _unzstd(body, limit) if coding == "zstd" else _inflate(body, coding, limit)
    except (zlib.error, zstandard.ZstdError, EOFError) as failure:
        raise BadRequest(f"the body is no valid {coding} data", code="invalid_encoding") from failure
    if len(decoded) > limit:
        raise _too_large(limit)
    return decoded


def _inflate(body: bytes, coding: str, limit: int) -> bytes:
    if coding in GZIP:
        return _inflate_members(body, limit)
    # RFC 9110 section 8.4.1.2 means zlib; some clients send bare deflate all the same.
    wrapped = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    decoder = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
    out = decoder.decompress(body, limit + 1)
    _require_end(decoder.eof or len(out) > limit)
    return out


def _inflate_members(body: bytes, limit: int) -> bytes:
    """A gzip file may hold several members one after the other (RFC 1952 section 2.2)."""
    out: list[bytes] = []
    size = 0
    while body and size <= limit:
        decoder = zlib.decompressobj(zlib.MAX_WBITS | 16)
        out.append(decoder.decompress(body, limit + 1 - size))
        size += len(out[-1])
        _require_end(decoder.eof or size > limit)
        body = decoder.unused_data
    return b"".join(out)


def _unzstd(body: bytes, limit: int) -> bytes:
    """Frame after frame (RFC 8878 section 3)."""
    out = b""
    while body and len(out) <= limit:
        frame, body = _unzstd_frame(body, limit - len(out))
        out += frame
    return out


def _unzstd_frame(body: bytes, limit: int) -> tuple[bytes, bytes]:
    """One frame, and what follows it. In small bites, as the decoder has no output limit of its own: 512 bytes of
    zstd unfold to 22 MB at the most."""
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
    out: list[bytes] = []
    size = position = 0
    while position < len(body) and size <= limit and not decoder.eof:
        out.append(decoder.decompress(body[position : position + _ZSTD_BITE_BYTES]))
        size += len(out[-1])
        position += _ZSTD_BITE_BYTES
    _require_end(decoder.eof or size > limit)
    return b"".join(out), decoder.unused_data + body[position:]


def _require_end(ended: bool) -> None:
    if not ended:
        raise EOFError("cut short")


def _too_large(limit: int) -> BadRequest:
    return BadRequest(
        f"the body is larger than {limit} bytes (server.max_body_bytes)", code="body_too_large", status=413
    )


def without(headers: Iterable[tuple[bytes, bytes]], names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers less those called `names` (lower case)."""
    return [(name, value) for name, value in headers if name.lower() not in names]


def target_of(scope: Scope) -> str:
    """The raw path and query, as the client wrote them.

    Raises BadRequest for a target that is no path: behind the upstream's address, "@host/" would name another host.
    """
    path = str(scope["raw_path"].decode("latin-1")).partition("?")[0]
    if not path.startswith("/"):
        raise BadRequest("the request target must be a path that starts with /", code="invalid_target")
    query = str(scope["query_string"].decode("latin-1"))
    return path + ("?" + query if query else "")


class Meanwhile(Protocol):
    """What is done while some work goes on: `beat` every time `pause_s` seconds have passed; None: never (again)."""

    pause_s: float | None

    async def beat(self) -> None: ...


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None], meanwhile: Meanwhile | None = None) -> bool:
    """Run `work` to its end, or until the client leaves: then it is cancelled, and the answer is False. So it is when
    `work` or `meanwhile` finds the client gone."""
    found_gone = False

    async def working() -> None:
        nonlocal found_gone
        try:
            await work
        except ClientGone:
            found_gone = True

    async with asyncio.TaskGroup() as group:
        job = group.create_task(working())
        watch = group.create_task(_left(receive))
        try:
            while not await _first_of(job, watch, meanwhile.pause_s if meanwhile else None):
                if meanwhile is not None:
                    await meanwhile.beat()
        except ClientGone:
            found_gone = True
        for task in (job, watch):
            task.cancel()
    return not found_gone and not job.cancelled()


async def _first_of(job: asyncio.Task[None], watch: asyncio.Task[None], timeout_s: float | None) -> bool:
    """Whether one of them is done, within the time."""
    done, _ = await asyncio.wait({job, watch}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


@contextmanager
def until_stopped() -> Iterator[None]:
    """Only the server cancels a whole request, and only when it stops. What was under way in here has been cleaned up
    by then, and the client still has to be told: raises UpstreamUnavailable."""
    try:
        yield
    except asyncio.CancelledError:
        raise UpstreamUnavailable("the proxy is being stopped", retry_after_s=BACK_IN_S) from None
