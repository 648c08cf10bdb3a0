"""What upstreams allow web pages of other origins, so that answers of the proxy's own can be read there too.

A browser hides an answer from a page that its headers do not allow (fetch standard, CORS): errors of ours, and the
head of a stream that is sent before the upstream's. Nothing is allowed here that the upstream did not allow the same
origin before; browsers ask it first, with the OPTIONS request that precedes any JSON.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MAX_ORIGINS = 64
_ALLOWING = frozenset({b"access-control-allow-origin", b"access-control-allow-credentials"})

Headers = Iterable[tuple[bytes, bytes]]


class Origins:
    """The last answer to each origin; at most `MAX_ORIGINS`, the least recently used one out."""

    def __init__(self) -> None:
        self._allowed: OrderedDict[str, tuple[tuple[bytes, bytes], ...]] = OrderedDict()

    def of(self, name: str) -> Origin:
        """The one that a request's `Origin` header names."""
        return Origin(name, self._allowed)


class Origin:
    """Whose page a request came from; without a name for one that is no page's."""

    def __init__(self, name: str, allowed: OrderedDict[str, tuple[tuple[bytes, bytes], ...]]) -> None:
        self._name = name
        self._allowed = allowed

    def learn(self, headers: Headers) -> None:
        """Take note of what an upstream's answer allows it."""
        allowing = tuple((name.lower(), value) for name, value in headers if name.lower() in _ALLOWING)
        if not self._name or not allowing:
            return
        self._allowed[self._name] = allowing
        self._allowed.move_to_end(self._name)
        if len(self._allowed) > MAX_ORIGINS:
            self._allowed.popitem(last=False)

    @property
    def allowing(self) -> tuple[tuple[bytes, bytes], ...]:
        """The headers for an answer of ours."""
        return self._allowed.get(self._name, ())
