"""The HTTP client under every adapter: httpx with the aiohttp transport, errors mapped to ours.

No read timeout: a long prefill is silence, and only the client knows how long it will wait. llama-server closes a
connection behind every streamed answer without saying so: requests of clients get a connection of their own, or the
next one would be sent into a socket that is closing. Our small calls share connections that are dropped before the
server's 5 s of keep-alive end (server-http.cpp).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from prefixproxy.backends import RawHeaders
from prefixproxy.errors import BadRequest, UpstreamFailed, UpstreamLoading, UpstreamUnavailable

CONNECT_TIMEOUT_S = 5.0
KEEPALIVE_EXPIRY_S = 4.0
CALL_TIMEOUT_S = 30.0
MAX_CONNECTIONS = 1024
MAX_CALL_BYTES = 64 << 20

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

_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)
"""httpx_aiohttp calls every lost connection a ConnectTimeout, one that broke after the request was sent too
(transport.py, AIOHTTP_EXC_MAP): only aiohttp's own exception behind it tells whether the server was ever reached."""


def end_to_end(
    headers: Iterable[tuple[bytes, bytes]], drop: frozenset[bytes] = frozenset()
) -> list[tuple[bytes, bytes]]:
    """The headers that may be forwarded: less hop-by-hop ones, those that `Connection` names, and `drop`."""
    headers = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    unwanted = HOP_BY_HOP | named | drop
    return [(name, value) for name, value in headers if name not in unwanted]


def new_client(*, reuse: bool) -> httpx.AsyncClient:
    """A client that adds no header of its own, keeps no cookies and follows no redirect. `reuse`: whether a connection
    carries more than one request."""
    kept: dict[str, Any] = {"keepalive_timeout": KEEPALIVE_EXPIRY_S} if reuse else {"force_close": True}

    def session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, **kept)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    return httpx.AsyncClient(transport=AiohttpTransport(client=session), trust_env=False)


class HttpResponse:
    """An `UpstreamResponse` over httpx."""

    def __init__(self, upstream: str, response: httpx.Response) -> None:
        self._upstream = upstream
        self._response = response
        self.status = response.status_code
        self.headers: RawHeaders = response.headers.raw

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.aiter_raw():
                yield chunk
        except (httpx.HTTPError, httpx.StreamError, aiohttp.ClientError, OSError) as failure:
            raise UpstreamFailed(f"upstream {self._upstream} broke off in the middle of its answer") from failure

    async def read(self, limit: int = MAX_CALL_BYTES) -> bytes:
        """The whole body. Raises UpstreamFailed over `limit` bytes."""
        parts, size = [], 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > limit:
                raise UpstreamFailed(f"upstream {self._upstream} answered with more than {limit} bytes")
            parts.append(chunk)
        return b"".join(parts)

    async def close(self) -> None:
        try:
            await self._response.aclose()
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as failure:
            log.debug("upstream %s broke off while its answer was closed: %s", self._upstream, failure)


class HttpUpstream:
    """Requests to one base URL. `api_key`, if set, replaces whatever credentials the client sent."""

    def __init__(self, name: str, url: str, api_key: str = "") -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._key = api_key
        self._client = new_client(reuse=False)
        self._calls = new_client(reuse=True)

    async def open(
        self,
        method: str,
        target: str,
        headers: RawHeaders = (),
        body: bytes | AsyncIterator[bytes] = b"",
        read_timeout_s: float | None = None,
    ) -> HttpResponse:
        return await self._send(self._client, method, target, headers, body, read_timeout_s)

    async def call(self, method: str, target: str, body: Any = None, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """One small JSON exchange. Raises UpstreamLoading on 503, UpstreamFailed on any other error status."""
        payload = b"" if body is None else orjson.dumps(body)
        headers = [] if body is None else [(b"content-type", b"application/json")]
        response = await self._send(self._calls, method, target, headers, payload, timeout_s)
        try:
            answer = await response.read()
        finally:
            await response.close()
        if response.status == httpx.codes.SERVICE_UNAVAILABLE:
            raise UpstreamLoading(f"upstream {self.name} is not ready: {_reason(answer)}", retry_after_s=2)
        if response.status >= httpx.codes.BAD_REQUEST:
            raise UpstreamFailed(f"upstream {self.name} refused {method} {target}: {response.status} {_reason(answer)}")
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as failure:
            raise UpstreamFailed(f"upstream {self.name} answered {method} {target} with no JSON") from failure

    async def status_of(self, method: str, target: str, body: Any = None) -> int:
        """The status code of one small exchange, its body ignored."""
        payload = b"" if body is None else orjson.dumps(body)
        headers = [(b"content-type", b"application/json")]
        response = await self._send(self._calls, method, target, headers, payload, CALL_TIMEOUT_S)
        await response.close()
        return response.status

    async def close(self) -> None:
        await self._client.aclose()
        await self._calls.aclose()

    async def _send(
        self,
        client: httpx.AsyncClient,
        method: str,
        target: str,
        headers: RawHeaders,
        body: bytes | AsyncIterator[bytes],
        read_timeout_s: float | None,
    ) -> HttpResponse:
        timeout = {"connect": CONNECT_TIMEOUT_S, "read": read_timeout_s, "write": None, "pool": None}
        try:
            request = httpx.Request(
                method,
                self.url + target,
                headers=self._authorised(headers),
                content=body,
                extensions={"timeout": timeout},
            )
            return HttpResponse(self.name, await client.send(request, stream=True))
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as failure:
            if isinstance(failure, httpx.UnsupportedProtocol) or isinstance(failure.__cause__ or failure, _NEVER_SENT):
                raise UpstreamUnavailable(f"upstream {self.name} cannot be reached", retry_after_s=2) from failure
            raise UpstreamFailed(f"upstream {self.name} broke off before it answered") from failure
        except (httpx.InvalidURL, ValueError) as failure:
            raise BadRequest(f"this request cannot be forwarded: {failure}", code="invalid_target") from failure

    def _authorised(self, headers: RawHeaders) -> list[tuple[bytes, bytes]]:
        if not self._key:
            return list(headers)
        kept = [(name, value) for name, value in headers if name.lower() not in (b"authorization", b"x-api-key")]
        return [*kept, (b"authorization", b"Bearer " + self._key.encode())]


def _reason(answer: bytes) -> str:
    try:
        error = orjson.loads(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:200]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
