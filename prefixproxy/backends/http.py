"""The HTTP client under every adapter: aiohttp, errors mapped to ours.

The request target goes out byte for byte as the client wrote it: what was routed is what is asked for. (httpx and yarl
would both resolve dots and decode letters on the way, and turn one path into another.)

No read timeout: a long prefill is silence, and only the client knows how long it will wait. llama-server closes a
connection behind every streamed answer without saying so: requests of clients get a connection of their own, or the
next one would be sent into a socket that is closing. Our small calls share connections that are dropped before the
server's 5 s of keep-alive end (server-http.cpp).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from http import HTTPStatus
from io import BytesIO
from typing import Any

import aiohttp
import orjson
from multidict import CIMultiDict
from yarl import URL

from prefixproxy.backends import Answer, Counted, RawHeaders, Reading, Rendered, UpstreamResponse
from prefixproxy.errors import BadRequest, UpstreamFailed, UpstreamLoading, UpstreamUnavailable
from prefixproxy.prompt import Edit
from prefixproxy.types import Api

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_EXPIRY_S = 4.0
CALL_TIMEOUT_S = 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between questions, and how many of these without an answer (tcp(7))."""
MAX_CONNECTIONS = 1024
MAX_CALL_BYTES = 64 << 20
CHUNK_BYTES = 16 << 10
WRITTEN_AT_ONCE_BYTES = 1 << 20
"""A larger body is written piece by piece, or its copying would hold up everything else."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110 section 7.6.1: these speak about one connection and are never forwarded."""

log = logging.getLogger(__name__)

_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.NonHttpUrlClientError)


def end_to_end(
    headers: Iterable[tuple[bytes, bytes]], drop: frozenset[bytes] = frozenset()
) -> list[tuple[bytes, bytes]]:
    """The headers that may be forwarded: less hop-by-hop ones, those that `Connection` names, and `drop`."""
    headers = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    unwanted = HOP_BY_HOP | named | drop
    return [(name, value) for name, value in headers if name not in unwanted]


def new_session(*, reuse: bool) -> aiohttp.ClientSession:
    """A client that adds no header of its own, keeps no cookies and follows no redirect. `reuse`: whether a connection
    carries more than one request. Needs a running event loop."""
    kept: dict[str, Any] = {"keepalive_timeout": KEEPALIVE_EXPIRY_S} if reuse else {"force_close": True}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, socket_factory=_watched_socket, **kept),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        auto_decompress=False,
    )


def _watched_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that finds out by itself when the other host is gone: a long prefill is silence, and so is that."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if option := getattr(socket, name, None):
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class HttpResponse:
    """An `UpstreamResponse` over aiohttp."""

    def __init__(self, upstream: str, response: aiohttp.ClientResponse) -> None:
        self.upstream = upstream
        self.response = response
        self.status = response.status
        self.headers: RawHeaders = response.raw_headers

    @property
    def counted(self) -> Counted | None:
        return None

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self.response.content.iter_chunked(CHUNK_BYTES):
                yield chunk
        except (aiohttp.ClientError, OSError) as failure:
            raise UpstreamFailed(f"upstream {self.upstream} broke off in the middle of its answer") from failure

    async def read(self, limit: int = MAX_CALL_BYTES) -> bytes:
        """The whole body. Raises UpstreamFailed over `limit` bytes."""
        parts, size = [], 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > limit:
                raise UpstreamFailed(f"upstream {self.upstream} answered with more than {limit} bytes")
            parts.append(chunk)
        return b"".join(parts)

    async def close(self) -> None:
        try:
            self.response.release()
            await self.response.wait_for_close()
        except (aiohttp.ClientError, OSError) as failure:
            log.debug("upstream %s broke off while its answer was closed: %s", self.upstream, failure)


class Peeked:
    """A response whose first bytes were looked at; `chunks` gives them all the same."""

    def __init__(self, response: UpstreamResponse, start: bytes, rest: AsyncIterator[bytes]) -> None:
        self._response = response
        self._rest = rest
        self.status = response.status
        self.headers: RawHeaders = response.headers
        self.start = start

    @property
    def counted(self) -> Counted | None:
        return self._response.counted

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.start
        async for chunk in self._rest:
            yield chunk

    async def close(self) -> None:
        await self._response.close()


async def peek(response: UpstreamResponse, limit: int) -> Peeked:
    """Read the whole body if it has up to `limit` bytes, else a little more than these."""
    start, rest = b"", response.chunks()
    async for chunk in rest:
        start += chunk
        if len(start) > limit:
            break
    return Peeked(response, start, rest)


class HttpUpstream:
    """Requests to one base URL. `api_key`, if set, replaces whatever credentials the client sent."""

    def __init__(self, name: str, url: str, api_key: str = "") -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.marker = ""
        self._base = URL(self.url)
        self._key = api_key
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    @property
    def has_key(self) -> bool:
        """Whether a key of our own goes with every request; else the client's does."""
        return bool(self._key)

    async def open(
        self,
        method: str,
        target: str,
        headers: RawHeaders = (),
        body: bytes | AsyncIterator[bytes] = b"",
        read_timeout_s: float | None = None,
    ) -> HttpResponse:
        return await self._send(False, method, target, headers, body, read_timeout_s)

    async def call(self, method: str, target: str, body: Any = None, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """One small JSON exchange. Raises UpstreamLoading on 503, UpstreamFailed on any other error status, in words of
        its own where a key is missing or wrong (401, 403)."""
        payload = b"" if body is None else orjson.dumps(body)
        headers = [] if body is None else [(b"content-type", b"application/json")]
        response = await self._send(True, method, target, headers, payload, timeout_s)
        try:
            answer = await response.read()
        finally:
            await response.close()
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise UpstreamLoading(f"upstream {self.name} is not ready: {_reason(answer)}", retry_after_s=2)
        if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise UpstreamFailed(self._wants_another_key(answer), upstream_status=response.status)
        if response.status >= HTTPStatus.BAD_REQUEST:
            refused = f"upstream {self.name} refused {method} {target}: {response.status} {_reason(answer)}"
            raise UpstreamFailed(refused, upstream_status=response.status)
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as failure:
            raise UpstreamFailed(f"upstream {self.name} answered {method} {target} with no JSON") from failure

    async def status_of(self, method: str, target: str, body: Any = None) -> int:
        """The status code of one small exchange, its body ignored."""
        payload = b"" if body is None else orjson.dumps(body)
        headers = [(b"content-type", b"application/json")]
        response = await self._send(True, method, target, headers, payload, CALL_TIMEOUT_S)
        await response.close()
        return response.status

    def shown(self, api: Api, path: str, body: Mapping[str, Any], rendered: Rendered) -> tuple[str, bytes]:
        return path, rendered(self.control(api, body))

    def control(self, api: Api, body: Mapping[str, Any]) -> Sequence[Edit]:
        return ()

    def forwards(self, model: str) -> bool:
        return False

    def interpret(self, answer: Answer) -> Reading:
        return Reading(answer.usage)

    def report(self) -> Mapping[str, Any]:
        return {}

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def _send(
        self,
        reuse: bool,
        method: str,
        target: str,
        headers: RawHeaders,
        body: bytes | AsyncIterator[bytes],
        read_timeout_s: float | None,
    ) -> HttpResponse:
        if reuse not in self._sessions:
            self._sessions[reuse] = new_session(reuse=reuse)
        if isinstance(body, bytes) and len(body) > WRITTEN_AT_ONCE_BYTES:
            data: BytesIO | bytes | AsyncIterator[bytes] | None = BytesIO(body)
        else:
            data = body or None
        try:
            response = await self._sessions[reuse].request(
                method,
                self._url(target),
                headers=CIMultiDict((_text(name), _text(value)) for name, value in self._outgoing(headers)),
                data=data,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=read_timeout_s),
            )
        except _NEVER_SENT as failure:
            raise UpstreamUnavailable(f"upstream {self.name} cannot be reached", retry_after_s=2) from failure
        except ValueError as failure:
            raise BadRequest(f"this request cannot be forwarded: {failure}", code="invalid_target") from failure
        except (aiohttp.ClientError, OSError) as failure:
            raise UpstreamFailed(f"upstream {self.name} broke off before it answered") from failure
        return HttpResponse(self.name, response)

    def _url(self, target: str) -> URL:
        """`encoded`: nothing in the target is read, decoded or resolved."""
        path, _, query = target.partition("?")
        path = self._base.raw_path.rstrip("/") + path
        authority = self._base.raw_authority
        return URL.build(scheme=self._base.scheme, authority=authority, path=path, query_string=query, encoded=True)

    def _outgoing(self, headers: RawHeaders) -> list[tuple[bytes, bytes]]:
        kept = list(headers)
        if self._key:
            kept = [(name, value) for name, value in kept if name.lower() not in (b"authorization", b"x-api-key")]
            kept.append((b"authorization", b"Bearer " + self._key.encode()))
        if self.marker:
            kept.append((b"via", b"1.1 " + self.marker.encode()))
        return kept

    def _wants_another_key(self, answer: bytes) -> str:
        found = "refused our key (upstreams[].api_key)" if self._key else "wants a key (upstreams[].api_key is not set)"
        return f"upstream {self.name} {found}: {_reason(answer)}"


def _text(raw: bytes) -> str:
    """aiohttp takes text and writes UTF-8; what is none of it can only be Latin-1."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _reason(answer: bytes) -> str:
    try:
        error = orjson.loads(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
