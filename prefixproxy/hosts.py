"""By which names a browser may call the proxy where nothing else keeps web pages out.

A page of any site can have its own name resolve to 127.0.0.1 once it is loaded (DNS rebinding). To the browser the
proxy is that site then, and the page reads every answer. With keys it gets none. A proxy without keys that listens on
loopback is meant for this machine alone, where a browser uses an address or a name that no public DNS gives out;
whoever has it behind another name says so in the settings. Ollama and Jupyter check the same, for all clients; here
only browsers, which alone can be made to do this, so nothing else that calls a proxy by its name stops working.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from prefixproxy.errors import BadRequest

_ONLY_HERE = frozenset({"localhost", "local", "localdomain", "lan", "home", "internal", "intranet", "test", "arpa"})
"""Top-level domains in which nobody can register a name (RFC 6761, 6762, 8375, 9476), or that routers hand out."""
_OF_BROWSERS = frozenset({b"origin", b"sec-fetch-site"})
"""What they send with every POST, and with all to an address they trust; the rest shows in `user-agent`."""
_MOZILLA = b"mozilla/"


class Hosts:
    """`names`: those that are allowed beside addresses and local names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower() for name in names)

    def require_known(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises BadRequest for a browser's request by a name that may be anybody's."""
        host, browser = b"", False
        for name, value in headers:
            if name == b"host":
                host = value
            elif name in _OF_BROWSERS or (name == b"user-agent" and value[:8].lower() == _MOZILLA):
                browser = True
        if browser and self._may_be_anybodys(named := _name_in(host)):
            raise BadRequest(
                f"a browser calls this proxy {named!r}, which is no name it knows: any web page could (DNS rebinding). "
                "If it is yours, list it in server.hosts, or set server.api_keys",
                code="host_not_allowed",
                status=403,
            )

    def _may_be_anybodys(self, name: str) -> bool:
        return "." in name and not (name in self._names or name.rpartition(".")[2] in _ONLY_HERE or _is_address(name))


def _name_in(host: bytes) -> str:
    """The name in a `Host` header, without its port; "" for an IPv6 address."""
    return "" if host.startswith(b"[") else host.decode("latin-1").partition(":")[0].strip().rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
