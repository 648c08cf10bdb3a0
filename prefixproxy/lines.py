"""Ollama's streams, one JSON object per line: when the first token came, and what was said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from prefixproxy.sse import Progress
from prefixproxy.types import Api

MAX_LINE_BYTES = 64 << 10
"""Of the first line; a longer one is taken for a token."""


class LineWatch:
    """Tells when the first token came. Nothing is removed: `feed` returns what it is given."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max = max_line_bytes
        self._line = bytearray()
        self._over = False
        self.progress: Progress | None = None
        self.first_token_seen = False

    def feed(self, chunk: bytes) -> bytes:
        if self._over:
            return chunk
        self._line += chunk
        line, newline, _ = self._line.partition(b"\n")
        if newline or len(self._line) > self._max:
            self._over = True
            self.first_token_seen = not newline or "error" not in (object_in(bytes(line)) or {})
            self._line.clear()
        return chunk

    def close(self) -> bytes:
        return b""


def object_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def message_in(api: Api, objects: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The assistant message of an Ollama answer, whole or in lines, as chat's API would have it: text, no tool calls
    (their arguments are objects here, never the text that was generated). None unless it came to its end."""
    if not objects or objects[-1].get("done") is not True:
        return None
    texts = [_text_of(api, each) for each in objects]
    return {"choices": [{"message": {"role": "assistant", "content": "".join(texts)}}]}


def _text_of(api: Api, value: dict[str, Any]) -> str:
    holder, key = (value.get("message"), "content") if api is Api.OLLAMA_CHAT else (value, "response")
    text = holder.get(key) if isinstance(holder, dict) else None
    return text if isinstance(text, str) else ""
