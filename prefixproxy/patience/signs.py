"""What each API's clients take for life while nothing has been generated yet, and errors that come once they got it.

Measured on the agents themselves: bytes of any kind hold all clients of chat and completions; Codex (Responses) and
Claude Code (Messages) count parsed events only, and Claude Code neither comments nor pings among them, but deltas of an
open text block. Parsers of Ollama's lines skip white space before an object.
"""

from __future__ import annotations

from typing import Any

import orjson

from prefixproxy.errors import ProxyError
from prefixproxy.types import Api

_COMMENT = b": keep-alive\n\n"
_KEEPALIVE = b'event: keepalive\ndata: {"type":"keepalive","sequence_number":0}\n\n'
"""OpenAI's own event for it. No client is known to fail on a type it has not heard of."""
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_SPACE = b" "
_LINES = frozenset({Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE})
MAX_QUOTED = 500
_TOO_LONG, _TOO_LONG_UPSTREAM = "context_length_exceeded", "exceed_context_size_error"
"""OpenAI's code, which clients act on, and llama-server's type for the same."""


def content_type(api: Api) -> bytes:
    """Of the head that is sent early."""
    return b"application/x-ndjson" if api in _LINES else b"text/event-stream"


def response_id(ident: str) -> str:
    """What a Responses answer is called from its first event on."""
    return f"resp_{ident}"


def opening(api: Api, ident: str, model: str, created: int) -> bytes:
    """The first sign, behind a head of ours. In Messages and Responses it begins the answer, which `splice` then goes
    on with: their clients insist on the event that names it. `created`: Unix seconds."""
    if api is Api.RESPONSES:
        response: dict[str, Any] = {"id": response_id(ident), "object": "response", "created_at": created}
        response |= {"status": "in_progress", "model": model, "output": []}
        return event_of({"type": "response.created", "response": response})
    if api is Api.MESSAGES:
        usage = {"input_tokens": 0, "output_tokens": 0}
        message: dict[str, Any] = {
            "id": f"msg_{ident}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return event_of({"type": "message_start", "message": message}) + event_of(block) + further(api, opened=True)
    return further(api, opened=True)


def further(api: Api, *, opened: bool) -> bytes:
    """Any later sign. `opened`: whether the answer was begun by `opening`, or by the upstream itself, so that nothing
    is known of what is open in it."""
    if api is Api.RESPONSES:
        return _KEEPALIVE
    if api is Api.MESSAGES and not opened:
        return _PING
    if api is Api.MESSAGES:
        delta = {"type": "text_delta", "text": ""}
        return event_of({"type": "content_block_delta", "index": 0, "delta": delta})
    return _SPACE if api in _LINES else _COMMENT


def event_of(value: dict[str, Any]) -> bytes:
    """A server-sent event with its type as its name, as Anthropic and OpenAI write them."""
    return b"event: %s\ndata: %s\n\n" % (str(value["type"]).encode(), orjson.dumps(value))


def failed_response(error: dict[str, Any], ident: str) -> bytes:
    """An error as the end of a Responses stream: OpenAI's SDKs raise at the `error` event, Codex knows only
    `response.failed`, and gives up at once for one code alone."""
    said = error.get("error")
    details = said if isinstance(said, dict) else {"message": str(said)}
    code = str(details.get("code") or "") if details.get("source") else str(details.get("type") or "")
    code = _TOO_LONG if code == _TOO_LONG_UPSTREAM else code or "server_error"
    message = str(details.get("message") or "")
    failure = {"code": code, "message": message}
    response = {"id": response_id(ident), "object": "response", "status": "failed", "error": failure}
    told = {"type": "error", "sequence_number": 0, **failure, "param": None, **error}
    return event_of({"type": "response.failed", "response": response}) + event_of(told)


def late_error(path: str, status: int, body: bytes) -> dict[str, Any]:
    """An upstream's error answer as the object of this API's error event, for a client that has a 200 already.

    What the upstream said stays as it is; a body that is no error of this kind is quoted in one of ours.
    """
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = None
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, dict | str) and error:
        of_messages = path.startswith("/v1/messages") and "type" not in said and isinstance(error, dict)
        return {"type": "error", **said} if of_messages else said
    quoted = body[:MAX_QUOTED].decode("utf-8", "replace").strip()
    message = f"the upstream answered {status}" + (f": {quoted}" if quoted else "")
    return ProxyError(message, code="upstream_error", status=status).envelope(path)
