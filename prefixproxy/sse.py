"""Server-sent events as bytes: cut them apart, drop the ones only we asked for, keep the last ones for reading.

Bytes are never decoded to find an event's end: llama-server writes U+2028 and U+0085 raw inside JSON strings, and a
splitter of text lines would cut there.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Any

import orjson

from prefixproxy.types import Api

MAX_EVENT_BYTES = 80 << 20
"""The last event of /completion quotes the whole prompt, and a request body may have 64 MiB."""

TAIL_BYTES = 128 << 10
HEAD_BYTES = 8 << 10
"""Anthropic's message_start, the only event that tells the prompt's tokens there, comes first and is short."""

_LF, _CRLF = b"\n\n", b"\r\n\r\n"
_TIMINGS = b'"timings":{'
_PROGRESS = b',"prompt_progress":{'
_TEXT_DELTA = re.compile(rb'"delta":\{"(content|reasoning_content)":"((?:[^"\\]|\\.)*)"')
_ROLE_DELTA = {"role": "assistant", "content": None}
_OLLAMA_COUNTS = b'"total_duration":'
_NO_TOKEN_YET = frozenset({"response.created", "response.in_progress"})
_DONE = b"[DONE]"
_LAST_TYPES = frozenset({"response.completed", "response.incomplete", "message_stop"})
_ERROR_TYPES = frozenset({"error", "response.failed"})
_NATIVE = frozenset({Api.COMPLETION, Api.INFILL})
_LAST_FEW = 4
"""Between the end of an answer and the end of its stream there is at most the usage and "[DONE]"."""


class SSEOverflow(Exception):
    """One event is larger than the reader's bound."""


class SSEReader:
    """Cuts a byte stream into events, blank line included, so that the events joined are the stream."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._buffer = bytearray()
        self._scanned = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes. Raises SSEOverflow when an unfinished one has grown too large."""
        self._buffer += chunk
        events = []
        while (end := self._event_end()) > 0:
            events.append(bytes(self._buffer[:end]))
            del self._buffer[:end]
            self._scanned = 0
        # Events that are whole are handed out first: the next chunk finds the bound.
        if not events and len(self._buffer) > self._max:
            raise SSEOverflow(f"an event of the stream has more than {self._max} bytes")
        # The longest terminator may have all but its last byte here already.
        self._scanned = max(0, len(self._buffer) - len(_CRLF) + 1)
        return events

    def close(self) -> bytes:
        """What is left after the last whole event; the reader is empty afterwards."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._scanned = 0
        return rest

    def _event_end(self) -> int:
        plain = self._buffer.find(_LF, self._scanned)
        limit = len(self._buffer) if plain < 0 else plain + 1
        carriage = self._buffer.find(_CRLF, self._scanned, limit + len(_CRLF) - 1)
        if carriage >= 0 and (plain < 0 or carriage < plain):
            return carriage + len(_CRLF)
        return plain + len(_LF) if plain >= 0 else 0


class WholeEvents:
    """Holds back the end of a stream's bytes until the event it belongs to is whole: nobody can read half an event, and
    one that never comes to its end must not stand before the error that says so.

    `ends`: what closes an event. A part longer than `max_bytes` passes as it is.
    """

    def __init__(self, ends: tuple[bytes, ...] = (_LF, _CRLF), max_bytes: int = HEAD_BYTES * 8) -> None:
        self._ends = ends
        self._max = max_bytes
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that the client gets now."""
        held = self._held + chunk if self._held else chunk
        if held.endswith(self._ends):
            self._held = b""
            return held
        cut = max(held.rfind(end) + len(end) if end in held else 0 for end in self._ends)
        if len(held) - cut > self._max:
            cut = len(held)
        self._held = held[cut:]
        return held[:cut]

    def close(self) -> bytes:
        """What is still held back; nothing is afterwards."""
        rest, self._held = self._held, b""
        return rest


def data_of(event: bytes) -> bytes | None:
    """The event's data, its lines joined by a line feed; None for an event without (a comment, a bare name)."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event) - 2:
        return event[6:].rstrip(b"\r\n")
    lines = [_field_value(line) for line in event.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data")]
    values = [value for value in lines if value is not None]
    return b"\n".join(values) if values else None


def _field_value(line: bytes) -> bytes | None:
    name, _, value = line.partition(b":")
    return value.removeprefix(b" ") if name == b"data" else None


def object_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object in an event's data; None for comments, "[DONE]" and anything else."""
    data = data_of(event)
    return _object(data) if data is not None else None


def _object(data: bytes) -> dict[str, Any] | None:
    if not data.startswith(b"{"):
        return None
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


class StreamTail:
    """Watches a stream go by at the price of one append per chunk, and reads its last events once it is over.

    Reads server-sent events and Ollama's lines of JSON alike: an event's data is one line in both.
    """

    def __init__(self, tail_bytes: int = TAIL_BYTES, head_bytes: int = HEAD_BYTES) -> None:
        self._limit = tail_bytes
        self._head_limit = head_bytes
        self._head = b""
        self._chunks: deque[bytes] = deque()
        self._kept = 0
        self.total_bytes = 0

    def feed(self, chunk: bytes) -> None:
        if len(self._head) < self._head_limit:
            self._head += chunk[: self._head_limit - len(self._head)]
        self.total_bytes += len(chunk)
        self._chunks.append(chunk)
        self._kept += len(chunk)
        while self._kept - len(self._chunks[0]) >= self._limit:
            self._kept -= len(self._chunks.popleft())

    def last_events(self, count: int) -> list[bytes]:
        """The data of the last `count` events, oldest first; the oldest lacks its front where the stream was longer
        than the bytes kept."""
        tail = b"".join(self._chunks)[-self._limit :]
        lines = tail.split(b"\n")
        cut = [] if self.total_bytes <= self._limit else lines[:1]
        return ([line.strip() for line in cut] + _data_lines(lines[len(cut) :]))[-count:]

    def ended(self, api: Api) -> bool:
        """Whether the stream had its end: "[DONE]", or the event that closes an answer of this API. Of an event that
        was too long to keep, that it is whole: none but the last is so long."""
        last = self.last_events(_LAST_FEW)
        if self.total_bytes > self._limit and len(last) < _LAST_FEW and last[:1] and last[0].endswith(b"}"):
            return True
        values = [_object(data) for data in last if data != _DONE]
        return _DONE in last or any(value is not None and is_end(api, value) for value in values)

    def last_objects(self, count: int = _LAST_FEW) -> list[dict[str, Any]]:
        """The JSON objects of the first event and of the last `count`, in the order they came; the first may be there
        twice. Of an event that was too long to keep, its `timings`: llama-server writes them behind all that is long.
        """
        found = []
        for data in _data_lines(self._head.split(b"\n"))[:1] + self.last_events(count):
            value = _object(data)
            found += [value] if value is not None else _timings_in(data) or _ollama_counts_in(data)
        return found


def is_error(value: dict[str, Any]) -> bool:
    """Whether an event tells an error, as OpenAI, Anthropic or Ollama spell it."""
    return isinstance(value.get("error"), dict | str) or value.get("type") in _ERROR_TYPES


def is_end(api: Api, value: dict[str, Any]) -> bool:
    """Whether an event closes an answer of this API."""
    if value.get("type") in _LAST_TYPES or value.get("done") is True:
        return True
    if api in _NATIVE:
        # `response_fields` may have taken `stop` out of the last object, never out of the others.
        return value.get("stop") is not False and "prompt_progress" not in value and not is_error(value)
    choices = value.get("choices")
    return any(isinstance(c, dict) and c.get("finish_reason") for c in choices) if isinstance(choices, list) else False


def _data_lines(lines: list[bytes]) -> list[bytes]:
    return [line.removeprefix(b"data:").strip() for line in lines if line.startswith((b"data:", b"{"))]


def _timings_in(cut: bytes) -> list[dict[str, Any]]:
    """The last `timings` object of an event that lacks its front: a flat object of numbers (server-common.cpp)."""
    start = cut.rfind(_TIMINGS)
    end = cut.find(b"}", start)
    timings = _object(cut[start + len(_TIMINGS) - 1 : end + 1]) if 0 <= start < end else None
    return [{"timings": timings}] if timings is not None else []


def _ollama_counts_in(cut: bytes) -> list[dict[str, Any]]:
    """The counts of Ollama's last line, if that lacks its front: they stand behind `context`, which has a number for
    every token (api/types.go, GenerateResponse)."""
    start = cut.rfind(_OLLAMA_COUNTS)
    counts = _object(b"{" + cut[start:].strip()) if start >= 0 else None
    return [{**counts, "done": True}] if counts is not None else []


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill of one prompt, in tokens: `total` to do, `cached` of them found resident, `processed` done so far."""

    total: int
    cached: int
    processed: int


class ProgressFilter:
    """Removes the prefill progress that only we asked for, and tells when the first token came.

    llama-server sends progress before anything else, so all reading ends with the first other event. What is dropped
    is exactly what `return_progress` adds: in chat, extra role deltas; in completions, empty texts; in Responses,
    further `response.in_progress` events, and the progress inside the first one (server-task.cpp, to_json_oaicompat*).
    In chat the first progress may also bring text, where a template opens the answer with some: that goes in front of
    the first token's, where the server puts it without progress. With `remove` False (the client asked for progress
    itself) every byte passes.
    """

    def __init__(self, api: Api, *, remove: bool = True, max_event_bytes: int = HEAD_BYTES * 8) -> None:
        self._api = api
        self._remove = remove
        self._reader = SSEReader(max_event_bytes)
        self._in_progress_events = 0
        self._passing = False
        self._role = b""
        """A role delta that belongs to the first progress, or, if there is none, to the first token."""
        self._early = b""
        """The event with the text that came before the first token."""
        self.progress: Progress | None = None
        self.first_token_seen = False

    def feed(self, chunk: bytes) -> bytes:
        """The bytes of `chunk` that the client gets now; an unfinished event is held back until it is whole."""
        if self._passing:
            return chunk
        try:
            events = self._reader.feed(chunk)
        except SSEOverflow:
            self._passing = self.first_token_seen = True
            return self.close()
        for i, event in enumerate(events):
            events[i] = self._filter(event)
            if self._passing:
                return b"".join(events) + self._reader.close()
        return b"".join(events)

    def close(self) -> bytes:
        """The held back rest of a stream that ended within an event, or before its first token."""
        return self._held() + self._reader.close()

    def _held(self) -> bytes:
        """What waits for the first token, let go."""
        role, early, self._role, self._early = self._role, self._early, b"", b""
        return role + _without_progress(early)

    def _filter(self, event: bytes) -> bytes:
        if data_of(event) is None:
            return event
        value = object_of(event) or {}
        progress = _progress_of(value)
        if progress is not None:
            self.progress = progress
        if value.get("type") in _NO_TOKEN_YET:
            return self._filter_response(event, value)
        if self._remove and self._api is Api.CHAT and "error" not in value:
            kept = self._filter_chat(event, value, progress)
            if kept is not None:
                return kept
        if progress is None or not _only_progress(self._api, value):
            self._passing = True
            self.first_token_seen = "error" not in value
            return self._held() + event
        return b"" if self._remove else event

    def _filter_chat(self, event: bytes, value: dict[str, Any], progress: Progress | None) -> bytes | None:
        """None for what is nothing special: progress alone, and a first token without text before it."""
        bare = _only_progress(self._api, value)
        if progress is not None and not bare:
            self._role, self._early = b"", event
            return b""
        if "prompt_progress" not in value and bare and self.progress is None and not self._role:
            self._role = event
            return b""
        if progress is not None or not (self._role or self._early):
            return None
        self.first_token_seen = True
        if bare and self._early:
            return event
        self._passing, early = True, self._early
        self._early = b""
        return self._held() + (_joined(early, event) if early else event)

    def _filter_response(self, event: bytes, value: dict[str, Any]) -> bytes:
        """Of the `response.in_progress` events the first would be there anyway, without its progress."""
        if value["type"] == "response.in_progress":
            self._in_progress_events += 1
        if not self._remove or self._in_progress_events == 0:
            return event
        if self._in_progress_events > 1:
            return b""
        return _without_progress(event)


def _without_progress(event: bytes) -> bytes:
    start = event.rfind(_PROGRESS)
    return event if start < 0 else event[:start] + event[event.index(b"}", start) + 1 :]


def _joined(early: bytes, event: bytes) -> bytes:
    """One event with the text of both; two where they are of different kinds."""
    before, text = _TEXT_DELTA.search(early), _TEXT_DELTA.search(event)
    if before is None or text is None or before[1] != text[1]:
        return _without_progress(early) + event
    return event[: text.start(2)] + before[2] + event[text.start(2) :]


def _progress_of(value: dict[str, Any]) -> Progress | None:
    progress = value.get("prompt_progress")
    if not isinstance(progress, dict):
        return None
    total, cached, processed = (progress.get(key) for key in ("total", "cache", "processed"))
    if not (isinstance(total, int) and isinstance(cached, int) and isinstance(processed, int)):
        return None
    return Progress(total, cached, processed)


def _only_progress(api: Api, value: dict[str, Any]) -> bool:
    """Whether the event carries no text beside its progress."""
    choices: list[dict[str, Any]] = value.get("choices") or []
    if api is Api.CHAT:
        return bool(choices) and all(choice.get("delta") == _ROLE_DELTA for choice in choices)
    if api is Api.COMPLETIONS:
        return bool(choices) and all(choice.get("text") == "" for choice in choices)
    return value.get("content") == ""
