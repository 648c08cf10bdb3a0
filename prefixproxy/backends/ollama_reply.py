"""A native answer of Ollama as its `/v1` would have written it (openai/openai.go: ToChatCompletion, ToChunks,
ToCompletion, ToCompleteChunk; middleware/openai.go), key order and escapes included.

One thing is better than there: an error in the middle of a stream, which `/v1` loses, is told.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import orjson

from prefixproxy.backends import Counted
from prefixproxy.backends.http import HttpResponse
from prefixproxy.backends.ollama_native import Native
from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import Api

MAX_LINE_BYTES = 64 << 20
_FINGERPRINT = "fp_ollama"
_GO_ESCAPES = (
    (b"<", b"\\u003c"),
    (b">", b"\\u003e"),
    (b"&", b"\\u0026"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)
"""encoding/json writes these in any string."""
_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_KINDS = {400: "invalid_request_error", 404: "not_found_error"}
_UNKNOWN_ERROR = "something went wrong, please see the ollama server logs for details"


class Spoken:
    """Writes one answer. `ident`: its id, as `/v1` gives one to each."""

    def __init__(self, native: Native, ident: str) -> None:
        self._native = native
        self._ident = ident
        self._called = False
        self.last: dict[str, Any] | None = None
        """The object with the counts, as it came."""

    def whole(self, status: int, body: bytes) -> bytes:
        """An answer that is no stream, or an error. Raises UpstreamFailed if it is none of Ollama's."""
        if status != 200:
            return _dumped(_error(status, _object(body), body)) + b"\n"
        said = _object(body)
        if said is None:
            raise UpstreamFailed("Ollama answered with no JSON object")
        self.last = said
        choice = {"index": 0, **self._said("message", said), "finish_reason": self._reason(said), **_logprobs(said)}
        kind = "chat.completion" if self._native.chat else "text_completion"
        if not self._native.chat:
            choice = {"text": _string(said, "response"), "index": 0, "finish_reason": self._reason(said)}
        head = self._head(kind, said)
        return _dumped({**head, "choices": [choice], "usage": _usage(said)}) + b"\n"

    def line(self, line: bytes) -> bytes:
        """The events of one line of a stream. Raises UpstreamFailed if it is none of Ollama's."""
        said = _object(line)
        if said is None:
            raise UpstreamFailed("Ollama's stream has a line that is no JSON object")
        if "error" in said:
            return _event(_error(500, said, line))
        chunks = self._chat_chunks(said) if self._native.chat else [self._completion_chunk(said)]
        out = b"".join(_event(chunk) for chunk in chunks)
        if said.get("done") is not True:
            return out
        self.last = said
        if self._native.include_usage:
            out += _event({**chunks[-1], "choices": [], "usage": _usage(said)})
        return out + b"data: [DONE]\n\n"

    def _chat_chunks(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Thinking and text of one line are two events."""
        head, message = self._head("chat.completion.chunk", said), self._said("delta", said)["delta"]
        reason, logprobs = self._reason(said), _logprobs(said)
        self._called = self._called or "tool_calls" in message
        mixed = "reasoning" in message and (message["content"] or "tool_calls" in message)
        if not mixed:
            return [{**head, "choices": [{"index": 0, "delta": message, "finish_reason": reason, **logprobs}]}]
        thought = {"role": message["role"], "content": "", "reasoning": message.pop("reasoning")}
        return [
            {**head, "choices": [{"index": 0, "delta": thought, "finish_reason": None, **logprobs}]},
            {**head, "choices": [{"index": 0, "delta": message, "finish_reason": reason}]},
        ]

    def _completion_chunk(self, said: dict[str, Any]) -> dict[str, Any]:
        choice = {"text": _string(said, "response"), "index": 0, "finish_reason": self._reason(said)}
        head = self._head("text_completion", said)
        model, fingerprint = head.pop("model"), head.pop("system_fingerprint")
        usage = {"usage": _NO_USAGE} if self._native.include_usage else {}
        return {**head, "choices": [choice], "model": model, "system_fingerprint": fingerprint, **usage}

    def _head(self, kind: str, said: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._ident,
            "object": kind,
            "created": _created(said),
            "model": _string(said, "model"),
            "system_fingerprint": _FINGERPRINT,
        }

    def _said(self, key: str, said: dict[str, Any]) -> dict[str, Any]:
        given = said.get("message")
        given = given if isinstance(given, dict) else {}
        role = "assistant" if key == "delta" else _string(given, "role")
        message: dict[str, Any] = {"role": role, "content": _string(given, "content")}
        if thinking := _string(given, "thinking"):
            message["reasoning"] = thinking
        calls = given.get("tool_calls")
        if isinstance(calls, list) and calls:
            message["tool_calls"] = [_call(each) for each in calls]
        return {key: message}

    def _reason(self, said: dict[str, Any]) -> str | None:
        message = said.get("message")
        calls = self._called or (isinstance(message, dict) and bool(message.get("tool_calls")))
        reason = _string(said, "done_reason")
        if calls and (reason or not self._native.streams):
            return "tool_calls"
        return reason or None


class SpokenResponse(HttpResponse):
    """One whose body is written anew."""

    def __init__(self, answer: HttpResponse, native: Native, ident: str) -> None:
        super().__init__(answer.upstream, answer.response)
        self._native = native
        self._spoken = Spoken(native, ident)
        self._streams = native.streams and self.status == 200
        kind = b"text/event-stream" if self._streams else b"application/json"
        kept = [each for each in self.headers if each[0].lower() not in (b"content-type", b"content-length")]
        self.headers = [*kept, (b"content-type", kind)]

    @property
    def counted(self) -> Counted | None:
        last = self._spoken.last
        api = Api.OLLAMA_CHAT if self._native.chat else Api.OLLAMA_GENERATE
        return None if last is None else Counted(api, self._native.body, [last])

    async def chunks(self) -> AsyncIterator[bytes]:
        held = b""
        async for chunk in super().chunks():
            held += chunk
            if len(held) > MAX_LINE_BYTES:
                raise UpstreamFailed(f"Ollama's answer has more than {MAX_LINE_BYTES} bytes at a time")
            if not self._streams:
                continue
            *lines, held = held.split(b"\n")
            if events := b"".join(self._spoken.line(line) for line in lines if line.strip()):
                yield events
        if not self._streams:
            yield self._spoken.whole(self.status, held)
        elif held.strip():
            yield self._spoken.line(held)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _dumped(value: dict[str, Any]) -> bytes:
    out = orjson.dumps(value)
    for plain, escaped in _GO_ESCAPES:
        out = out.replace(plain, escaped)
    return out


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _dumped(value) + b"\n\n"


def _error(status: int, said: dict[str, Any] | None, raw: bytes) -> dict[str, Any]:
    message = raw.decode(errors="replace") if said is None else str(said.get("error") or _UNKNOWN_ERROR)
    return {"error": {"message": message, "type": _KINDS.get(status, "api_error"), "param": None, "code": None}}


def _string(holder: dict[str, Any], key: str) -> str:
    value = holder.get(key)
    return value if isinstance(value, str) else ""


def _count(holder: dict[str, Any], key: str) -> int:
    value = holder.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _created(said: dict[str, Any]) -> int:
    """Its `created_at` in Unix seconds."""
    try:
        return int(datetime.fromisoformat(_string(said, "created_at")).timestamp())
    except ValueError:
        return 0


def _usage(said: dict[str, Any]) -> dict[str, Any]:
    """A cached count that is absent is unknown, and so is then the object that would hold it."""
    prompt, predicted = _count(said, "prompt_eval_count"), _count(said, "eval_count")
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": predicted,
        "total_tokens": prompt + predicted,
    }
    if "prompt_eval_cached_count" in said:
        usage["prompt_tokens_details"] = {"cached_tokens": _count(said, "prompt_eval_cached_count")}
    return usage


def _logprobs(said: dict[str, Any]) -> dict[str, Any]:
    given = said.get("logprobs")
    return {"logprobs": {"content": given}} if isinstance(given, list) and given else {}


def _call(given: Any) -> dict[str, Any]:
    given = given if isinstance(given, dict) else {}
    function = given.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = _dumped(function.get("arguments") or {}).decode()
    return {
        "id": _string(given, "id"),
        "index": _count(function, "index"),
        "type": "function",
        "function": {"name": _string(function, "name"), "arguments": arguments},
    }
