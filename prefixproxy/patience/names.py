"""Responses that were given a name of ours, because their client could not wait for the upstream's: a server that keeps
them (vLLM) is asked for them by its own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from prefixproxy.prompt import Edit, SetText
from prefixproxy.types import Api

MAX_NAMES = 1000
_KEY = "previous_response_id"


class ResponseNames:
    """The upstream's name behind each of ours; the oldest of more than `MAX_NAMES` is forgotten."""

    def __init__(self) -> None:
        self._theirs: OrderedDict[str, str] = OrderedDict()

    def learn(self, ours: str, theirs: str) -> None:
        self._theirs[ours] = theirs
        if len(self._theirs) > MAX_NAMES:
            self._theirs.popitem(last=False)

    def edits(self, api: Api, data: dict[str, Any]) -> tuple[Edit, ...]:
        """Puts the upstream's name back where a request goes on from a response."""
        named = data.get(_KEY) if api is Api.RESPONSES else None
        theirs = self._theirs.get(named) if isinstance(named, str) else None
        return () if theirs is None else (SetText((_KEY,), theirs),)
