"""What Ollama's `/v1` makes of a request and of an answer, for the scripted one (openai/openai.go: FromChatRequest,
FromCompleteRequest, ToChatCompletion, ToChunks, ToCompletion, ToCompleteChunk)."""

from __future__ import annotations

import json
from typing import Any

IDENT, CREATED = "chatcmpl-7", 1_787_306_400


class Refused(Exception):
    """A 400 with this text."""


def go_json(value: object) -> bytes:
    """encoding/json: compact, UTF-8, five characters escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()


def from_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The api.ChatRequest of a chat body; a field with its zero value is left out, as `omitempty` does."""
    messages: list[dict[str, Any]] = []
    for given in body["messages"]:
        messages += _messages(given, body["messages"])
    options = _options(body)
    for key in ("frequency_penalty", "presence_penalty"):
        if body.get(key) is not None:
            options[key] = body[key]
    if body.get("top_p") is not None:
        options["top_p"] = body["top_p"]
    request = {
        "model": body["model"],
        "messages": messages,
        "format": _format(body.get("response_format")),
        "options": options,
        "stream": bool(body.get("stream")),
        "tools": body.get("tools"),
        "logprobs": bool(body.get("logprobs")),
        "top_logprobs": body.get("top_logprobs") or 0,
    }
    return meant(request)


def from_completion(body: dict[str, Any]) -> dict[str, Any]:
    """The api.GenerateRequest of a completion body."""
    options = _options(body)
    options |= {key: body.get(key) or 0.0 for key in ("frequency_penalty", "presence_penalty")}
    options["top_p"] = body.get("top_p") or 1.0
    stream = bool(body.get("stream"))
    return meant({"model": body["model"], "prompt": body["prompt"], "options": options, "stream": stream})


def meant(request: dict[str, Any]) -> dict[str, Any]:
    """A native request without fields that say nothing."""
    kept = {key: value for key, value in request.items() if value not in (None, "", [], 0) or key == "stream"}
    if "messages" in kept:
        kept["messages"] = [{k: v for k, v in each.items() if v not in (None, "", [])} for each in kept["messages"]]
    return kept


def _options(body: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"top_p": 1.0, "temperature": 1.0}
    stop = body.get("stop")
    if stop is not None:
        options["stop"] = [stop] if isinstance(stop, str) else [each for each in stop if isinstance(each, str)]
    for key, name in (("max_tokens", "num_predict"), ("temperature", "temperature"), ("seed", "seed")):
        if body.get(key) is not None:
            options[name] = body[key]
    return options


def _format(asked: dict[str, Any] | None) -> Any:
    kind = str(asked["type"]).strip().lower() if asked else ""
    if kind == "json_object":
        return "json"
    return asked["json_schema"]["schema"] if asked and kind == "json_schema" and asked.get("json_schema") else None


def _messages(given: dict[str, Any], everything: list[dict[str, Any]]) -> list[dict[str, Any]]:
    role, content, calls = given["role"], given.get("content"), given.get("tool_calls")
    if isinstance(content, list):
        assert not calls, "not written here"
        return [{"role": role, "content": part["text"]} for part in content]
    message = {"role": role, "content": content, "thinking": given.get("reasoning"), "tool_calls": _calls(calls)}
    if isinstance(content, str) and role == "tool":
        message["tool_name"] = given.get("name") or _named(given.get("tool_call_id"), everything)
    if content is None and calls is None:
        raise Refused("invalid message content type: <nil>")
    return [message | {"tool_call_id": given.get("tool_call_id")}]


def _calls(calls: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    made = []
    for call in calls or ():
        function = call["function"]
        arguments = json.loads(function["arguments"])
        if not isinstance(arguments, dict):
            raise Refused("invalid tool call arguments")
        one: dict[str, Any] = {"function": {"name": function["name"], "arguments": arguments}}
        made.append({"id": call["id"], **one} if call.get("id") else one)
    return made


def _named(ident: str | None, everything: list[dict[str, Any]]) -> str:
    for message in reversed(everything):
        for call in message.get("tool_calls") or ():
            if ident and call.get("id") == ident:
                return str(call["function"]["name"])
    return ""


def error(status: int, message: str) -> bytes:
    kind = {400: "invalid_request_error", 404: "not_found_error"}.get(status, "api_error")
    return go_json({"error": {"message": message, "type": kind, "param": None, "code": None}}) + b"\n"


def whole(chat: bool, said: dict[str, Any], usage: dict[str, Any]) -> bytes:
    """The answer of a request without a stream. `said`: the native one, counts and all."""
    if chat:
        message = said["message"]
        reason = "tool_calls" if message.get("tool_calls") else said["done_reason"]
        choice = {"index": 0, "message": _spoken(message), "finish_reason": reason, **_logprobs(said)}
    else:
        choice = {"text": said["response"], "index": 0, "finish_reason": said["done_reason"]}
    kind = "chat.completion" if chat else "text_completion"
    answer = {"id": IDENT, "object": kind, "created": CREATED, "model": said["model"]}
    return go_json(answer | {"system_fingerprint": "fp_ollama", "choices": [choice], "usage": usage}) + b"\n"


def chunks(chat: bool, said: dict[str, Any], called: bool, include_usage: bool) -> list[dict[str, Any]]:
    """The events of one line of the native stream. `called`: a tool was called in an earlier one."""
    reason = said.get("done_reason")
    if not chat:
        choice = {"text": said["response"], "index": 0, "finish_reason": reason}
        empty = {"usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}} if include_usage else {}
        chunk = {"id": IDENT, "object": "text_completion", "created": CREATED, "choices": [choice]}
        return [chunk | {"model": said["model"], "system_fingerprint": "fp_ollama"} | empty]
    message = _spoken({**said["message"], "role": "assistant"})
    if reason and (called or "tool_calls" in message):
        reason = "tool_calls"
    head = {"id": IDENT, "object": "chat.completion.chunk", "created": CREATED, "model": said["model"]}
    head["system_fingerprint"] = "fp_ollama"
    plain = {"index": 0, "delta": message, "finish_reason": reason, **_logprobs(said)}
    if not ("reasoning" in message and (message["content"] or "tool_calls" in message)):
        return [head | {"choices": [plain]}]
    thought = {"role": "assistant", "content": "", "reasoning": message["reasoning"]}
    rest = {key: value for key, value in message.items() if key != "reasoning"}
    first = {"index": 0, "delta": thought, "finish_reason": None, **_logprobs(said)}
    return [head | {"choices": [first]}, head | {"choices": [{"index": 0, "delta": rest, "finish_reason": reason}]}]


def _spoken(message: dict[str, Any]) -> dict[str, Any]:
    spoken: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if message.get("thinking"):
        spoken["reasoning"] = message["thinking"]
    calls = [
        {
            "id": call.get("id", ""),
            "index": call["function"].get("index", 0),
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": go_json(call["function"]["arguments"]).decode(),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    return spoken | ({"tool_calls": calls} if calls else {})


def _logprobs(said: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": {"content": said["logprobs"]}} if said.get("logprobs") else {}
