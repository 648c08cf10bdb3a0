"""What llama-server says in its three chat dialects, for words of a script: text or a tool call, whole or streamed.

Shapes and order of the events as in server-task.cpp; the counts are the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from prefixproxy.types import Api

Event = dict[str, Any]


@dataclass(frozen=True)
class Words:
    """One answer: `text`, or a call of `tool` with `arguments` (a JSON string)."""

    number: int
    text: str = ""
    tool: str = ""
    arguments: str = ""

    @property
    def call_id(self) -> str:
        return f"call_{self.number:04d}"

    @property
    def pieces(self) -> list[str]:
        """The text or the arguments, as a stream brings them."""
        whole = self.arguments if self.tool else self.text
        return [whole[at : at + 7] for at in range(0, len(whole), 7)]


@dataclass(frozen=True)
class Counts:
    """Tokens of the prompt: found in the slot, and evaluated, and how long that took."""

    cached: int
    evaluated: int
    prompt_ms: float = 1.0

    @property
    def prompt(self) -> int:
        return self.cached + self.evaluated

    @property
    def timings(self) -> Event:
        counted = {"cache_n": self.cached, "prompt_n": self.evaluated, "predicted_n": 1}
        return {**counted, "prompt_ms": self.prompt_ms, "predicted_ms": 1.0}

    @property
    def chat_usage(self) -> Event:
        told = {"prompt_tokens": self.prompt, "completion_tokens": 1, "total_tokens": self.prompt + 1}
        return {**told, "prompt_tokens_details": {"cached_tokens": self.cached}}

    @property
    def responses_usage(self) -> Event:
        told = {"input_tokens": self.prompt, "output_tokens": 1, "total_tokens": self.prompt + 1}
        return {
            **told,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens_details": {"reasoning_tokens": 0},
        }

    @property
    def messages_usage(self) -> Event:
        return {"cache_read_input_tokens": self.cached, "input_tokens": self.evaluated, "output_tokens": 1}


def counts_in(api: Api, answer: Event, took_ms: float) -> Counts:
    """What the engine's whole answer says of its prompt; `took_ms` where it says nothing of the time."""
    if api is Api.CHAT:
        timings = answer["timings"]
        return Counts(timings["cache_n"], timings["prompt_n"], timings["prompt_ms"])
    usage = answer["usage"]
    if api is Api.MESSAGES:
        return Counts(usage["cache_read_input_tokens"], usage["input_tokens"], took_ms)
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Counts(cached, usage["input_tokens"] - cached, took_ms)


def whole(api: Api, words: Words, counts: Counts) -> Event:
    """The JSON answer."""
    match api:
        case Api.CHAT:
            return _chat_answer(words, counts)
        case Api.RESPONSES:
            return _response(words, counts, "completed")
        case _:
            return _message(words, counts)


def stream(api: Api, words: Words, counts: Counts, body: Event) -> Iterator[bytes]:
    """The events of a streamed answer."""
    match api:
        case Api.CHAT:
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            for chunk in _chat_chunks(words, counts, usage):
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"
        case Api.RESPONSES:
            yield from map(_named, _response_events(words, counts))
        case _:
            yield from map(_named, _message_events(words, counts))


def _named(event: Event) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


def _chat_base(words: Words, kind: str) -> Event:
    fixed = {"created": 1, "model": "local", "system_fingerprint": "b11434-acted"}
    return {"id": f"chatcmpl-{words.number}", "object": kind, **fixed}


def _chat_answer(words: Words, counts: Counts) -> Event:
    message: Event = {"role": "assistant", "content": words.text}
    if words.tool:
        call = {"name": words.tool, "arguments": words.arguments}
        message["tool_calls"] = [{"type": "function", "id": words.call_id, "function": call}]
    choice = {"index": 0, "finish_reason": "tool_calls" if words.tool else "stop", "message": message}
    usage = {"usage": counts.chat_usage, "timings": counts.timings}
    return {**_chat_base(words, "chat.completion"), "choices": [choice], **usage}


def _chat_chunks(words: Words, counts: Counts, usage: bool) -> Iterator[Event]:
    base = _chat_base(words, "chat.completion.chunk")

    def chunk(delta: Event, finish: str | None = None) -> Event:
        return {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": None})
    if words.tool:
        named = {"name": words.tool, "arguments": ""}
        yield chunk({"tool_calls": [{"index": 0, "id": words.call_id, "type": "function", "function": named}]})
    for piece in words.pieces:
        part = {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} if words.tool else {"content": piece}
        yield chunk(part)
    last = chunk({}, "tool_calls" if words.tool else "stop")
    yield last if usage else {**last, "timings": counts.timings}
    if usage:
        yield {**base, "choices": [], "usage": counts.chat_usage, "timings": counts.timings}


def _item(words: Words, status: str = "completed") -> Event:
    if words.tool:
        call = {"call_id": words.call_id, "name": words.tool, "arguments": words.arguments}
        return {"type": "function_call", "id": f"fc_{words.number}", "status": status, **call}
    said = [{"type": "output_text", "text": words.text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": f"msg_{words.number}", "role": "assistant", "status": status, "content": said}


def _response(words: Words, counts: Counts, status: str) -> Event:
    done = status == "completed"
    return {
        "id": f"resp_{words.number}",
        "object": "response",
        "created_at": 1,
        "model": "local",
        "status": status,
        "output": [_item(words)] if done else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **({"usage": counts.responses_usage} if done else {}),
    }


def _response_events(words: Words, counts: Counts) -> Iterator[Event]:
    item, at = _item(words), {"output_index": 0}
    place = {"item_id": item["id"], **at}
    inside = {**place, "content_index": 0}
    yield {"type": "response.created", "response": _response(words, counts, "in_progress")}
    yield {"type": "response.in_progress", "response": _response(words, counts, "in_progress")}
    empty: Event = {"arguments": ""} if words.tool else {"content": []}
    started = {**item, "status": "in_progress"} | empty
    yield {"type": "response.output_item.added", **at, "item": started}
    if words.tool:
        for piece in words.pieces:
            yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}
        yield {"type": "response.function_call_arguments.done", **place, "arguments": words.arguments}
    else:
        part = {"type": "output_text", "text": "", "annotations": []}
        yield {"type": "response.content_part.added", **inside, "part": part}
        for piece in words.pieces:
            yield {"type": "response.output_text.delta", **inside, "delta": piece, "logprobs": []}
        yield {"type": "response.output_text.done", **inside, "text": words.text, "logprobs": []}
        yield {"type": "response.content_part.done", **inside, "part": item["content"][0]}
    yield {"type": "response.output_item.done", **at, "item": item}
    ended = _response(words, counts, "completed")
    yield {"type": "response.completed", "response": ended, "timings": counts.timings}


def _block(words: Words) -> Event:
    if words.tool:
        return {"type": "tool_use", "id": words.call_id, "name": words.tool, "input": orjson.loads(words.arguments)}
    return {"type": "text", "text": words.text}


def _message(words: Words, counts: Counts) -> Event:
    base = {"id": f"msg_{words.number}", "type": "message", "role": "assistant", "model": "local"}
    stop = {"stop_reason": "tool_use" if words.tool else "end_turn", "stop_sequence": None}
    return {**base, "content": [_block(words)], **stop, "usage": counts.messages_usage}


def _message_events(words: Words, counts: Counts) -> Iterator[Event]:
    message = _message(words, counts)
    begun: Event = {"content": [], "stop_reason": None, "usage": {**counts.messages_usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": {**message, **begun}}
    nothing: Event = {"input": {}} if words.tool else {"text": ""}
    empty = {**_block(words), **nothing}
    yield {"type": "content_block_start", "index": 0, "content_block": empty}
    for piece in words.pieces:
        part = (
            {"type": "input_json_delta", "partial_json": piece} if words.tool else {"type": "text_delta", "text": piece}
        )
        yield {"type": "content_block_delta", "index": 0, "delta": part}
    yield {"type": "content_block_stop", "index": 0}
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ending, "usage": {"output_tokens": 1}}
    yield {"type": "message_stop"}
