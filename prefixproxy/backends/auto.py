"""An upstream of a kind nobody named: asked what it is at every probe, and from then on that kind's adapter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from prefixproxy.backends import (
    Answer,
    Backend,
    CopyResult,
    RawHeaders,
    Reading,
    Rendered,
    SlotReading,
    UpstreamResponse,
    WarmCost,
)
from prefixproxy.errors import OtherKind, UpstreamFailed, UpstreamUnavailable
from prefixproxy.prompt import Edit
from prefixproxy.types import Api, SlotId, UpstreamFacts, Usage

_KEY_WANTED = frozenset({401, 403})


class AutoUpstream:
    """A `Backend` that is one of `candidates`: the first that the server answers like."""

    def __init__(self, candidates: Sequence[Backend]) -> None:
        self._candidates = candidates
        self._found = candidates[-1]
        self.name = self._found.name
        self.url = self._found.url

    @property
    def marker(self) -> str:
        return self._found.marker

    @marker.setter
    def marker(self, marker: str) -> None:
        for candidate in self._candidates:
            candidate.marker = marker

    async def probe(self) -> UpstreamFacts:
        """Only an answer decides: a server that breaks off while it restarts is not taken for another kind."""
        for candidate in self._candidates:
            try:
                facts = await candidate.probe()
            except OtherKind:
                continue
            except UpstreamFailed as failure:
                status = failure.details.get("upstream_status", 0)
                if status in _KEY_WANTED:
                    raise UpstreamUnavailable(f"{failure.message}; or name its kind", retry_after_s=5) from failure
                if not 400 <= status < 500:
                    raise
            else:
                self._found = candidate
                return facts
        raise UpstreamUnavailable(f"upstream {self.name} answers like no server known here", retry_after_s=5)

    async def health(self) -> object:
        return await self._found.health()

    async def open(
        self, method: str, target: str, headers: RawHeaders, body: bytes | AsyncIterator[bytes]
    ) -> UpstreamResponse:
        return await self._found.open(method, target, headers, body)

    async def slots(self) -> Mapping[int, SlotReading]:
        return await self._found.slots()

    async def tokens(self, path: str, body: Mapping[str, Any]) -> list[int]:
        return await self._found.tokens(path, body)

    async def count_tokens(self, api: Api, body: Mapping[str, Any], sent: bytes) -> int | None:
        return await self._found.count_tokens(api, body, sent)

    async def warm(self, slot: SlotId, tokens: Sequence[int]) -> WarmCost:
        return await self._found.warm(slot, tokens)

    async def decode_one(self, slot: SlotId | None) -> Usage:
        return await self._found.decode_one(slot)

    async def save(self, slot: SlotId, file: str) -> CopyResult:
        return await self._found.save(slot, file)

    async def restore(self, slot: SlotId, file: str) -> CopyResult:
        return await self._found.restore(slot, file)

    def control(self, api: Api, body: Mapping[str, Any]) -> Sequence[Edit]:
        return self._found.control(api, body)

    def shown(self, api: Api, path: str, body: Mapping[str, Any], rendered: Rendered) -> tuple[str, bytes]:
        return self._found.shown(api, path, body, rendered)

    def forwards(self, model: str) -> bool:
        return self._found.forwards(model)

    def interpret(self, answer: Answer) -> Reading:
        return self._found.interpret(answer)

    def report(self) -> Mapping[str, Any]:
        return self._found.report()

    async def close(self) -> None:
        for candidate in self._candidates:
            await candidate.close()
