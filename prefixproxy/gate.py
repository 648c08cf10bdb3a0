"""Who may use the proxy: keys to tenants, and which credentials travel on to the upstream."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping

from starlette.types import Scope

from prefixproxy.errors import InvalidApiKey
from prefixproxy.intake import OUR_HEADERS

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})


class Gate:
    """`keys` maps each key to its tenant's name ("" for a key without one). Without keys, everybody may in."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = [(key.encode(), name) for key, name in keys.items()]

    def tenant(self, scope: Scope) -> str:
        """The tenant of the request's key. Raises InvalidApiKey."""
        if not self._keys:
            return ""
        given = _key_in(scope)
        found = [name for key, name in self._keys if hmac.compare_digest(key, given)]
        if found:
            return found[0]
        raise InvalidApiKey("a valid API key is needed: send it as 'Authorization: Bearer KEY'")

    def outgoing(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The client's headers as they may go upstream: less our own hints, and less a key that was meant for us."""
        kept = [(name, value) for name, value in headers if not name.startswith(OUR_HEADERS) and name != b"host"]
        return [(n, v) for n, v in kept if n not in _CREDENTIALS] if self._keys else kept


def _key_in(scope: Scope) -> bytes:
    """The key as it was sent, byte for byte; b"" if there is none."""
    headers = dict(reversed(scope["headers"]))
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    return bytes(headers.get(b"x-api-key") or (bearer.strip() if scheme.lower() == b"bearer" else b""))
