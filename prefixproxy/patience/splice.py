"""Joins the upstream's stream to an answer that `signs.opening` has begun: one beginning, one name, blocks in order."""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from prefixproxy.patience.names import ResponseNames
from prefixproxy.patience.signs import event_of, response_id
from prefixproxy.prompt import Edit, Prompt, Remove
from prefixproxy.sse import SSEReader, object_of
from prefixproxy.types import Api


class Splice(Protocol):
    """`feed` returns the bytes the client gets for those the upstream sent; `close` what is left at its end."""

    def feed(self, chunk: bytes) -> bytes: ...

    def close(self) -> bytes: ...


def splice_of(api: Api, ident: str, names: ResponseNames) -> Splice | None:
    """None where the signs of life are nothing that an answer's events refer to. `names` learns what the upstream calls
    a response."""
    if api is Api.RESPONSES:
        return _Spliced(_Responses(response_id(ident), names))
    return _Spliced(_Messages()) if api is Api.MESSAGES else None


def returned(prompt: Prompt) -> tuple[Edit, ...]:
    """Takes the empty text block that an answer in Messages was begun with out of the history its client sends back:
    the model never generated it, and templates render what parts a turn has."""
    if prompt.api is not Api.MESSAGES or not prompt.data:
        return ()
    edits = []
    for i, message in enumerate(prompt.data["messages"]):
        content = message.get("content") if isinstance(message, dict) and message.get("role") == "assistant" else None
        if isinstance(content, list) and content and _is_empty_text(content[0]) and any(map(_is_said, content[1:])):
            edits.append(Remove(("messages", i, "content", 0)))
    return tuple(edits)


def _is_empty_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and block.get("text") == ""


def _is_said(block: Any) -> bool:
    """Whether a turn with this block alone is still a turn."""
    return isinstance(block, dict) and block.get("type") in ("text", "thinking", "tool_use")


class _Events(Protocol):
    def take(self, event: bytes, value: dict[str, Any]) -> bytes:
        """What to send for one event and its object."""
        ...


class _Spliced:
    """Whole events to `events`. Raises SSEOverflow for one that is larger than any answer's."""

    def __init__(self, events: _Events) -> None:
        self._events = events
        self._reader = SSEReader()

    def feed(self, chunk: bytes) -> bytes:
        out = []
        for event in self._reader.feed(chunk):
            value = object_of(event)
            out.append(event if value is None else self._events.take(event, value))
        return b"".join(out)

    def close(self) -> bytes:
        return self._reader.close()


class _Responses:
    """The answer keeps the name it was begun with: clients check that its events agree."""

    def __init__(self, ident: str, names: ResponseNames) -> None:
        self._ident = ident
        self._names = names
        self._ours, self._theirs = b'"%s"' % ident.encode(), b""

    def take(self, event: bytes, value: dict[str, Any]) -> bytes:
        response = value.get("response")
        if not self._theirs and isinstance(response, dict) and isinstance(response.get("id"), str):
            self._theirs = orjson.dumps(response["id"])
            self._names.learn(self._ident, response["id"])
        if value.get("type") == "response.created":
            return b""
        return event.replace(self._theirs, self._ours) if self._theirs else event


class _Messages:
    """The text block that was opened becomes the answer's first one, if that is text; else it is closed empty, and the
    others are numbered behind it. The prompt's tokens, which a beginning tells, come with the end instead."""

    def __init__(self) -> None:
        self._usage: dict[str, Any] = {}
        self._block_open = True
        self._shift = 0

    def take(self, event: bytes, value: dict[str, Any]) -> bytes:
        kind = value.get("type")
        if kind == "message_start":
            message = value.get("message")
            usage = message.get("usage") if isinstance(message, dict) else None
            self._usage = usage if isinstance(usage, dict) else {}
            return b""
        if kind in ("message_delta", "message_stop"):
            return self._closing() + (self._with_usage(event, value) if kind == "message_delta" else event)
        if isinstance(kind, str) and kind.startswith("content_block_"):
            return self._block(event, value, starts=kind == "content_block_start")
        return event

    def _block(self, event: bytes, value: dict[str, Any], *, starts: bool) -> bytes:
        before = b""
        if self._block_open and starts:
            block = value.get("content_block")
            if _is_empty_text(block):
                self._block_open = False
                return b""
            before, self._shift = self._closing(), 1
        index = value.get("index")
        if not self._shift or not isinstance(index, int):
            return before + event
        return before + event_of({**value, "index": index + self._shift})

    def _closing(self) -> bytes:
        """The end of our block, if it is still open and empty."""
        was_open, self._block_open = self._block_open, False
        return event_of({"type": "content_block_stop", "index": 0}) if was_open else b""

    def _with_usage(self, event: bytes, value: dict[str, Any]) -> bytes:
        usage = value.get("usage")
        known = usage if isinstance(usage, dict) else {}
        return event_of({**value, "usage": {**self._usage, **known}}) if self._usage else event
