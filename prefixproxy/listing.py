"""The lists of models of several upstreams as one: a client that picks its model from it must see them all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import orjson

from prefixproxy.backends import Backend, RawHeaders
from prefixproxy.backends.http import peek
from prefixproxy.errors import ProxyError

LISTS = frozenset({"/v1/models", "/models", "/api/tags"})
MAX_LIST_BYTES = 4 << 20
LIST_TIMEOUT_S = 10.0
_PARTS = {"data": "id", "models": "name"}
"""The lists in such an answer, and what names their entries. llama-server has both, the second as Ollama has it."""

log = logging.getLogger(__name__)


async def listed(backends: Sequence[Backend], target: str, headers: RawHeaders) -> dict[str, Any] | None:
    """Every model that these list, each once, by whoever comes first; None if none of them answers with a list."""
    answers = await asyncio.gather(*(_asked(backend, target, headers) for backend in backends))
    return merged([answer for answer in answers if answer is not None])


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if not answers:
        return None
    out: dict[str, Any] = {}
    for answer in answers:
        out = {**answer, **out}
    for part, name in _PARTS.items():
        if part in out:
            found: dict[str, Any] = {}
            for row in (row for answer in answers for row in answer.get(part) or () if isinstance(row, dict)):
                found.setdefault(str(row.get(name)), row)
            out[part] = list(found.values())
    return out


async def _asked(backend: Backend, target: str, headers: RawHeaders) -> dict[str, Any] | None:
    try:
        async with asyncio.timeout(LIST_TIMEOUT_S):
            response = await backend.open("GET", target, headers, b"")
            try:
                whole = await peek(response, MAX_LIST_BYTES)
            finally:
                await response.close()
        answer = orjson.loads(whole.start) if response.status == 200 else None
    except (ProxyError, TimeoutError, orjson.JSONDecodeError) as failure:
        log.debug("upstream %s does not list its models: %r", backend.name, failure)
        return None
    return answer if isinstance(answer, dict) else None
