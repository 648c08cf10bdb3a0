"""A `/v1` request as the native request that Ollama itself makes of it, so that it can carry `num_ctx`.

Ollama's `/v1/chat/completions` and `/v1/completions` are a layer over `/api/chat` and `/api/generate`: it writes the
body anew, calls the same handler and writes the answer anew (middleware/openai.go; openai/openai.go, FromChatRequest
and FromCompleteRequest). This does the same, for bodies of which every key and type is one that layer has a plain
meaning for in all versions that were read (0.30 to 0.33). Of any other body nothing is known, and None is returned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

import orjson

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
NATIVE_PATHS = {CHAT_PATH: "/api/chat", COMPLETIONS_PATH: "/api/generate"}

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_LABELS = frozenset({"user", "store", "metadata", "prompt_cache_key", "safety_identifier"})
"""They name things, and change no answer."""
_NUMBERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
_COUNTS = {"max_tokens": "num_predict", "seed": "seed"}
_SHARED = frozenset({"model", "stream", "stream_options", "stop", *_NUMBERS, *_COUNTS, *_LABELS})
_CHAT = _SHARED | {"messages", "tools", "response_format", "logprobs", "top_logprobs"}
_COMPLETIONS = _SHARED | {"prompt"}
_DEFAULTS: Mapping[str, Any] = {"n": 1, "best_of": 1, "echo": False, "tool_choice": "auto", "parallel_tool_calls": True}
"""With these values, they ask for what happens without them."""
_MESSAGE = frozenset({"role", "content", "reasoning", "name", "tool_calls", "tool_call_id"})
_SAME = 1.0
"""Temperature and top_p where a `/v1` body has none."""


@dataclass(frozen=True, slots=True)
class Native:
    """`body` is to be sent to `path` as `payload`; the answer belongs to a client of chat, or of completions, that
    wants a stream or not, and its usage in it or not."""

    path: str
    body: Mapping[str, Any]
    payload: bytes
    chat: bool
    streams: bool
    include_usage: bool


class _Unknown(Exception):
    """Something in the body that has no plain meaning here."""


def native_of(path: str, raw: bytes, num_ctx: int) -> Native | None:
    """The native request with `num_ctx`, or None where it may not be the same request."""
    chat = path == CHAT_PATH
    try:
        given = {key: value for key, value in _parsed(raw).items() if value is not None}
        _check_defaults(given)
        _check(not given.keys() - (_CHAT if chat else _COMPLETIONS))
        body = {"model": _text(given["model"]), **(_chat(given) if chat else _completion(given))}
        streams, include_usage = _streaming(given)
        body |= {"stream": streams, "options": {**_options(given, chat), "num_ctx": num_ctx}}
        payload = orjson.dumps(body)
    except (_Unknown, LookupError, ValueError, TypeError, RecursionError):
        return None
    return Native(NATIVE_PATHS[path], body, payload, chat, streams, include_usage)


def _check(known: bool) -> None:
    if not known:
        raise _Unknown


def _refuse(_: str) -> NoReturn:
    raise _Unknown


def _float(digits: str) -> float:
    value = float(digits)
    _check(isfinite(value))
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that is there twice, Ollama merges the values."""
    found = dict(pairs)
    _check(len(found) == len(pairs))
    return found


_READER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse, parse_float=_float)


def _parsed(raw: bytes | str) -> dict[str, Any]:
    value = _READER.decode(raw.decode() if isinstance(raw, bytes) else raw)
    _check(isinstance(value, dict))
    return dict(value)


def _text(value: Any) -> str:
    _check(isinstance(value, str) and value != "")
    return str(value)


def _check_defaults(given: dict[str, Any]) -> None:
    """Take out what asks for nothing else than happens anyway."""
    for key in [key for key, value in given.items() if key in _DEFAULTS and _same(_DEFAULTS[key], value)]:
        del given[key]


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _streaming(given: Mapping[str, Any]) -> tuple[bool, bool]:
    streams, wishes = given.get("stream", False), given.get("stream_options", {})
    _check(isinstance(streams, bool) and isinstance(wishes, dict) and not wishes.keys() - {"include_usage"})
    include = wishes.get("include_usage", False)
    _check(isinstance(include, bool))
    return streams, include


def _options(given: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"temperature": _SAME, "top_p": _SAME}
    if not chat:
        options |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
    for key, name in _NUMBERS.items():
        if key in given:
            _check(type(given[key]) in (int, float))
            options[name] = given[key]
    if not chat and options["top_p"] == 0:
        options["top_p"] = _SAME
    for key, name in _COUNTS.items():
        if key in given:
            _check(type(given[key]) is int)
            options[name] = given[key]
    if "stop" in given:
        stop = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
        _check(isinstance(stop, list) and bool(stop) and all(isinstance(each, str) for each in stop))
        options["stop"] = stop
    return options


def _completion(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": _text(given["prompt"])}


def _chat(given: Mapping[str, Any]) -> dict[str, Any]:
    messages = given["messages"]
    _check(isinstance(messages, list) and bool(messages))
    body: dict[str, Any] = {"messages": [_message(each, messages) for each in messages]}
    tools = given.get("tools", [])
    _check(isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))
    if tools:
        body["tools"] = tools
    if "response_format" in given:
        body |= _format(given["response_format"])
    for key, kind in (("logprobs", bool), ("top_logprobs", int)):
        if key in given:
            _check(type(given[key]) is kind)
            body[key] = given[key]
    return body


def _format(asked: Any) -> dict[str, Any]:
    _check(isinstance(asked, dict))
    readers: dict[Any, Callable[[], dict[str, Any]]] = {
        "text": dict,
        "json_object": lambda: {"format": "json"},
        "json_schema": lambda: {"format": _schema(asked["json_schema"])},
    }
    _check(isinstance(asked["type"], str))
    return readers[asked["type"]]()


def _schema(asked: Any) -> dict[str, Any]:
    _check(isinstance(asked, dict) and isinstance(asked["schema"], dict))
    return dict(asked["schema"])


def _message(given: Any, messages: list[Any]) -> dict[str, Any]:
    _check(isinstance(given, dict))
    given = {key: value for key, value in given.items() if value is not None}
    _check(not given.keys() - _MESSAGE and given["role"] in _ROLES)
    _check(all(isinstance(given.get(key, ""), str) for key in ("role", "reasoning", "name", "tool_call_id")))
    message: dict[str, Any] = {"role": given["role"]}
    content = given.get("content")
    if isinstance(content, list):
        # Several parts are joined in one version and separate messages in another.
        _check(len(content) == 1 and given.keys() <= {"role", "content", "name"} and given["role"] != "tool")
        return message | {"content": _only_text(content[0])}
    _check(isinstance(content, str) or (content is None and bool(given.get("tool_calls"))))
    if content is not None:
        message["content"] = content
    if given.get("reasoning"):
        message["thinking"] = given["reasoning"]
    if "tool_calls" in given:
        _check(isinstance(given["tool_calls"], list))
        message["tool_calls"] = [_call(each) for each in given["tool_calls"]]
    if given["role"] == "tool" and content is not None and (name := _tool_name(given, messages)):
        message["tool_name"] = name
    if given.get("tool_call_id"):
        message["tool_call_id"] = given["tool_call_id"]
    return message


def _only_text(part: Any) -> str:
    _check(isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text")
    _check(isinstance(part["text"], str))
    return str(part["text"])


def _call(given: Any) -> dict[str, Any]:
    _check(isinstance(given, dict) and not given.keys() - {"id", "type", "index", "function"})
    function = given["function"]
    _check(isinstance(function, dict) and function.keys() == {"name", "arguments"})
    _check(isinstance(function["name"], str) and isinstance(function["arguments"], str))
    ident = given.get("id") or ""
    _check(isinstance(ident, str))
    call = {"function": {"name": function["name"], "arguments": _parsed(function["arguments"])}}
    return {"id": ident, **call} if ident else call


def _tool_name(given: Mapping[str, Any], messages: list[Any]) -> str:
    """The tool a result is of: by its own name, else by the newest call with its id."""
    ident = given.get("tool_call_id")
    if given.get("name") or not ident:
        return str(given.get("name") or "")
    _check(all(isinstance(each, dict) and isinstance(each.get("tool_calls", []), list) for each in messages))
    calls = [_call(call) for each in reversed(messages) for call in each.get("tool_calls", [])]
    return next((str(call["function"]["name"]) for call in calls if call.get("id") == ident), "")
