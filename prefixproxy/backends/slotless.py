"""What adapters share whose server shows no slots: none can be named, looked at, warmed, saved or restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefixproxy.backends import CopyResult, SlotReading, WarmCost
from prefixproxy.backends.http import HttpUpstream
from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import Api, SlotId, Usage


class SlotlessUpstream(HttpUpstream):
    """A `Backend` less `probe` and `health`. The scheduler asks for capabilities first, so nothing here is called;
    who does so all the same gets an error of ours."""

    async def slots(self) -> Mapping[int, SlotReading]:
        raise self._cannot("show its slots")

    async def tokens(self, path: str, body: Mapping[str, Any]) -> list[int]:
        raise self._cannot("tokenize a prompt")

    async def count_tokens(self, api: Api, body: Mapping[str, Any], sent: bytes) -> int | None:
        return None

    async def warm(self, slot: SlotId, tokens: Sequence[int]) -> WarmCost:
        raise self._cannot("warm a slot")

    async def decode_one(self, slot: SlotId | None) -> Usage:
        raise self._cannot("decode a token by itself")

    async def save(self, slot: SlotId, file: str) -> CopyResult:
        raise self._cannot("save a slot")

    async def restore(self, slot: SlotId, file: str) -> CopyResult:
        raise self._cannot("restore a slot")

    def _cannot(self, what: str) -> UpstreamFailed:
        return UpstreamFailed(f"upstream {self.name} cannot {what}")
