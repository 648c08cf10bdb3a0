"""Who may use the proxy: keys to tenants, and which credentials travel on to the upstream."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping

from starlette.types import Scope

from prefixproxy.errors import InvalidApiKey
from prefixproxy.intake import OUR_HEADERS, header

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})


class Gate:
    """`keys` maps each key to its tenant's name ("" for a key without one). Without keys, everybody may in."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = dict(keys)

    def tenant(self, scope: Scope) -> str:
        """The tenant of the request's key. Raises InvalidApiKey."""
        if not self._keys:
            return ""
        given = header(scope, b"x-api-key") or header(scope, b"authorization").removeprefix("Bearer ").strip()
        for key, name in self._keys.items():
            if hmac.compare_digest(key.encode(), given.encode()):
                return name
        raise InvalidApiKey("a valid API key is needed: send it as 'Authorization: Bearer KEY'")

    def outgoing(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The client's headers as they may go upstream: less our own hints, and less a key that was meant for us."""
        kept = [(name, value) for name, value in headers if not name.startswith(OUR_HEADERS) and name != b"host"]
        return [(n, v) for n, v in kept if n not in _CREDENTIALS] if self._keys else kept
