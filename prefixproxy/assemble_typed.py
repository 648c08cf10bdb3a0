"""JSON answers of Responses and Messages from the typed events of their streams, as llama-server would write them.

Sources: server-task.cpp, to_json_oaicompat_resp and to_json_anthropic with their `_stream` twins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from prefixproxy.types import Api

_ITEM_KEYS = {"message": ("content", "id", "role", "status", "type")}
_BLOCK_ORDER = {"thinking": 0, "text": 1, "tool_use": 2}
_DELTA_KEYS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class Responses:
    """/v1/responses: its last event quotes the whole answer, in another order."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._pieces = 0
        self._response: dict[str, Any] | None = None
        self.timings: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> None:
        kind = event.get("type", "")
        if kind.endswith(".delta"):
            self._pieces += 1
        elif kind == "response.completed":
            self._response = event["response"]
            self.timings = {"timings": event["timings"]} if "timings" in event else {}

    def answer(self) -> tuple[dict[str, Any], bool] | None:
        if self._response is None:
            return None
        said = self._response
        body = {
            "completed_at": said["created_at"],
            "created_at": said["created_at"],
            "id": said["id"],
            "model": said["model"],
            "object": said["object"],
            "output": [_item(item) for item in said["output"]],
            "status": said["status"],
            "usage": said["usage"],
        }
        predicted = said["usage"]["output_tokens"]
        at_limit = self._limit is not None and predicted >= self._limit
        return body, _all_shown(bool(said["output"]), self._pieces, predicted, at_limit)


def _item(item: dict[str, Any]) -> dict[str, Any]:
    keys = _ITEM_KEYS.get(item["type"], tuple(item))
    ordered = {key: item[key] for key in keys}
    return ordered | ({"status": "completed"} if item["type"] == "reasoning" else {})


@dataclass(frozen=True, slots=True)
class StartLeftOut:
    """The event that llama-server would have begun a stream of Messages with, and whether its counts are its own."""

    event: dict[str, Any]
    counted: bool


def start_left_out(ident: str, model: str, total: int | None, reused: int | None, guess: int) -> StartLeftOut:
    """In the server's order of keys (to_json_anthropic). `total` and `reused` prompt tokens as the server tells them
    elsewhere; where it does not, all of the prompt counts as evaluated, and `guess` for its length."""
    counted = total is not None and reused is not None
    whole = guess if total is None else total
    cached = min(reused or 0, whole)
    usage = {"cache_read_input_tokens": cached, "input_tokens": whole - cached, "output_tokens": 0}
    message: dict[str, Any] = {"id": ident, "type": "message", "role": "assistant", "content": [], "model": model}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    return StartLeftOut({"type": "message_start", "message": message}, counted)


def vanishes(message: Mapping[str, Any]) -> bool:
    """Whether a message that is no assistant's may come to nothing when the server makes a chat of it
    (server-chat.cpp, server_chat_convert_anthropic_to_oai): it has parts, and none that is one there."""
    content = message.get("content")
    if not isinstance(content, list):
        return False
    return not any(isinstance(part, dict) and _is_part(part) for part in content)


def _is_part(part: Mapping[str, Any]) -> bool:
    if part.get("type") != "image":
        return part.get("type") in ("text", "tool_use", "tool_result")
    source = part.get("source")
    return isinstance(source, dict) and source.get("type") in ("base64", "url")


def lacks_start(api: Api, events: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a stream, of which these are the first event and the last ones, was begun in the middle."""
    return api is Api.MESSAGES and all(event.get("type") != "message_start" for event in events)


class Messages:
    """/v1/messages: a message without content, its blocks piece by piece, and how it ended.

    The server writes the beginning with the first token, so there is none where that token ends inside a character.
    """

    def __init__(self) -> None:
        self._pieces = 0
        self._message: dict[str, Any] = {}
        self._end: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, str] = {}
        self._ended = False
        self._unopened = False
        """Something was added to a block that had not begun: what it had before is not in the stream."""
        self.timings: dict[str, Any] = {}

    def add(self, event: dict[str, Any]) -> None:
        match event.get("type"):
            case "message_start":
                self._message = dict(event["message"])
            case "content_block_start":
                self._blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                self._pieces += 1
                self._add_delta(event["index"], event["delta"])
            case "message_delta":
                self._end = {**event["delta"], "usage": event["usage"]}
            case "message_stop":
                self._ended = True

    @property
    def lacks_start(self) -> bool:
        """Whether the answer is all there but for the event that begins it."""
        return self._ended and not self._message

    def _add_delta(self, index: int, delta: Mapping[str, Any]) -> None:
        self._unopened = self._unopened or index not in self._blocks
        if delta["type"] == "input_json_delta":
            self._arguments[index] = self._arguments.get(index, "") + delta["partial_json"]
            return
        key = _DELTA_KEYS[delta["type"]]
        self._pieces -= key == "signature"
        block = self._blocks.setdefault(index, _block_of(key))
        block[key] = block.get(key, "") + delta[key]

    def answer(self) -> tuple[dict[str, Any], bool] | None:
        if not self._ended or not self._message:
            return None
        blocks = [self._whole_block(index) for index in sorted(self._blocks)]
        blocks = [block for block in blocks if block.get("text") != ""]
        blocks.sort(key=lambda block: _BLOCK_ORDER[block["type"]])
        usage = {**self._message["usage"], **self._end["usage"]}
        message = {**self._message, **self._end, "content": blocks, "usage": usage}
        at_limit = message["stop_reason"] == "max_tokens"
        shown = _all_shown(bool(blocks), self._pieces, message["usage"]["output_tokens"], at_limit)
        return message, shown and not self._unopened

    def _whole_block(self, index: int) -> dict[str, Any]:
        block = self._blocks[index]
        if block["type"] != "tool_use":
            return block
        try:
            arguments = orjson.loads(self._arguments.get(index) or "{}")
        except orjson.JSONDecodeError:
            arguments = {}
        return {"type": "tool_use", "id": block["id"], "name": block["name"], "input": arguments}


def _block_of(key: str) -> dict[str, Any]:
    return {"type": "text", "text": ""} if key == "text" else {"type": "thinking", "thinking": ""}


def _all_shown(said: bool, pieces: int, predicted: int, at_limit: bool) -> bool:
    """Whether nothing can be missing: what the server held back is lost only at the token limit, and of an answer that
    was parsed to nothing it quotes the raw text elsewhere. As many pieces as tokens are all there is."""
    if not said:
        return predicted <= 1 and not at_limit
    return not at_limit or pieces >= predicted
