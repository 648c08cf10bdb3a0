"""Any other OpenAI-compatible server (vLLM, SGLang, LM Studio, llamafile, mlx): models, and nothing about slots.

How many requests it runs at once is not part of that API: without `upstreams.slots`, `ASSUMED_SLOTS` are taken. More
than the server can run only wait there instead of here.
"""

from __future__ import annotations

import logging
from typing import Any

from prefixproxy.backends.slotless import SlotlessUpstream
from prefixproxy.errors import OtherKind, UpstreamFailed
from prefixproxy.types import Capabilities, UpstreamFacts

ASSUMED_SLOTS = 4
"""LM Studio's default. A server for one request at a time queues the rest itself."""
_UNAUTHORISED = frozenset({401, 403})
_SHARES_BLOCKS = frozenset({"vllm", "sglang"})
"""`owned_by` of servers that keep one cache of blocks for all requests."""

log = logging.getLogger(__name__)


class OpenAIServer(SlotlessUpstream):
    """A `Backend` over `/v1/models` and whatever else the client asks for."""

    async def probe(self) -> UpstreamFacts:
        models = await self._models()
        return UpstreamFacts(
            name=self.name,
            kind="openai",
            n_slots=ASSUMED_SLOTS,
            n_ctx_slot=_context_of(models),
            model=models[0]["id"] if len(models) == 1 else "",
            models=tuple(model["id"] for model in models),
            capabilities=Capabilities(shared_cache=any(model.get("owned_by") in _SHARES_BLOCKS for model in models)),
        )

    async def health(self) -> object:
        """Gone is what cannot be reached. Servers that answer one request at a time let this one wait, or break it off,
        while they work for a client."""
        try:
            models = await self._models()
        except UpstreamFailed as failure:
            log.debug("upstream %s does not tell its models now: %s", self.name, failure.message)
            return None
        return tuple((model["id"], model.get("max_model_len")) for model in models)

    async def _models(self) -> list[dict[str, Any]]:
        """The models it lists. A server that wants a key which only its clients have is up, and lists none."""
        try:
            listed = await self.call("GET", "/v1/models")
        except UpstreamFailed as failure:
            if not self.has_key and failure.details.get("upstream_status") in _UNAUTHORISED:
                return []
            raise
        rows = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(rows, list):
            raise OtherKind(f"upstream {self.name} does not answer like an OpenAI-compatible server", retry_after_s=5)
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]


def _context_of(models: list[dict[str, Any]]) -> int | None:
    """The context of one request, where all models state the same (vLLM: `max_model_len`)."""
    stated = {model.get("max_model_len") for model in models}
    context = stated.pop() if len(stated) == 1 else None
    return context if isinstance(context, int) and context > 0 else None
