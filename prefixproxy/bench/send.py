"""Sends one prompt and measures it as its client does: to llama-server, to Ollama's own API, to any OpenAI-compatible
server, or to a proxy before one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from prefixproxy.backends import UpstreamResponse
from prefixproxy.backends.http import HttpUpstream
from prefixproxy.bench.measure import Request
from prefixproxy.bench.prompts import Messages
from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import Api, Usage
from prefixproxy.usage import usage_from

ANSWER_TOKENS = 8
REQUEST_TIMEOUT_S = 1800.0
MAX_LINE_BYTES = 1 << 20
_HEADERS = [(b"content-type", b"application/json")]
_PATHS = {Api.CHAT: "/v1/chat/completions", Api.OLLAMA_CHAT: "/api/chat"}


@dataclass(slots=True, eq=False)
class _Answer:
    text: str = ""
    ttft_s: float | None = None
    counts: list[dict[str, Any]] = field(default_factory=list)


async def send(client: HttpUpstream, api: Api, model: str, messages: Messages) -> tuple[Request, str]:
    """The measured request, and its answer's text. Raises ProxyError for anything but a whole answer."""
    payload = orjson.dumps(_body(api, model, messages))
    headers = [*_HEADERS, (b"content-length", str(len(payload)).encode())]
    answer, started = _Answer(), time.monotonic()
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            response = await client.open("POST", _PATHS[api], headers, payload)
            try:
                await _read(response, api, answer, started)
            finally:
                await response.close()
    except TimeoutError:
        raise UpstreamFailed(f"no end of an answer within {REQUEST_TIMEOUT_S:g} s") from None
    usage = usage_from(api, answer.counts)
    if usage.evaluated_tokens is None and usage.cached_tokens is None and usage.prompt_tokens is None:
        usage = Usage(prompt_ms=usage.prompt_ms)
    return Request(time.monotonic() - started, answer.ttft_s, usage), answer.text


def _body(api: Api, model: str, messages: Messages) -> dict[str, Any]:
    if api is Api.OLLAMA_CHAT:
        options = {"num_predict": ANSWER_TOKENS, "temperature": 0}
        return {"model": model, "messages": list(messages), "stream": True, "options": options}
    return {
        "model": model,
        "messages": list(messages),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _read(response: UpstreamResponse, api: Api, answer: _Answer, started: float) -> None:
    if response.status != 200:
        said = b"".join([chunk async for chunk in response.chunks()])
        raise UpstreamFailed(f"status {response.status}: {said[:300].decode(errors='replace')}")
    async for value in _objects(response):
        if "error" in value:
            raise UpstreamFailed(f"the answer ended in an error: {value['error']}")
        text = _text_of(api, value)
        if answer.ttft_s is None and text is not None:
            answer.ttft_s = time.monotonic() - started
        answer.text += text or ""
        if any(key in value for key in ("usage", "timings", "prompt_eval_count", "eval_count")):
            answer.counts.append(value)
    if not answer.counts:
        raise UpstreamFailed("the answer ended without saying what it cost")


async def _objects(response: UpstreamResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream: one to a line (Ollama), or one behind each `data:` (server-sent events)."""
    rest = b""
    async for chunk in response.chunks():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise UpstreamFailed(f"a line of the answer has more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            if (value := _object(line)) is not None:
                yield value
    if (value := _object(rest)) is not None:
        yield value


def _object(line: bytes) -> dict[str, Any] | None:
    line = line.strip().removeprefix(b"data:").strip()
    if not line.startswith(b"{"):
        return None
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as failure:
        raise UpstreamFailed("the answer broke off in the middle of a line") from failure
    return value if isinstance(value, dict) else None


def _text_of(api: Api, value: dict[str, Any]) -> str | None:
    """The text of one event, "" for one that ends an answer without any, None if it carries no token."""
    if api is Api.OLLAMA_CHAT:
        message = value.get("message") or {}
        text = message.get("content") or message.get("thinking")
        return str(text) if text else "" if value.get("done") else None
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    delta = choice.get("delta") or {}
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return str(text) if text else "" if choice.get("finish_reason") else None
