"""Every dialect on the real engine: the answer through the proxy is the answer without it, byte for byte in streams,
apart from ids, times and timings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_template import TOOLS_AND_REASONING
from running_engine import RunningEngine, running_engine
from running_proxy import RunningProxy, proxy_in_thread

from prefixproxy.engine import EngineSettings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

Json = dict[str, Any]

LIMIT_S = 120.0
UNLIKE = re.compile(
    rb'("(?:id|item_id|call_id|tool_call_id)":\s?")[^"]*'
    rb'|("(?:created|created_at|completed_at|time_ms|[a-z_]+_ms|[a-z_]+_second)":\s?)[-+.e0-9]+'
)
MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Name three colours."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
FLAT_TOOL = {"type": "function", **FUNCTION}
ANTHROPIC_TOOL = {"name": "get_weather", "description": "Weather of a city", "input_schema": PARAMETERS}
# Random weights never open or end a tool call by themselves.
FORCED = {
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "logit_bias": [["<tool_call>", 60], ["\n", 60], [2, 75]],
    "seed": 1,
}
THOUGHT = {"grammar": 'root ::= "<think>\\nabc def\\n</think>\\n\\nghi jkl"'}
CALLED = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
]
ANTHROPIC_CALLED = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Rain"}]},
]
RESPONSE_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city":"Oslo"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
]
LONG = "word " * 5000
ALOUD = "Think aloud."
THINKS_WHEN_ASKED = TOOLS_AND_REASONING.replace(
    "{%- if add_generation_prompt %}<|im_start|>assistant\n",
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if messages[-1].content == '"
    + ALOUD
    + "' %}<think>\n{% endif %}",
)
"""`/v1/messages` passes no grammar on: there it is the template that opens the thought."""

BODIES: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {}),
    "chat with usage": ("/v1/chat/completions", {"stream_options": {"include_usage": True}}),
    "chat with tools": ("/v1/chat/completions", {"messages": CALLED, "tools": [TOOL]}),
    "chat that calls": ("/v1/chat/completions", {"tools": [TOOL], "max_tokens": 60, "temperature": 3.0, **FORCED}),
    "chat that thinks": ("/v1/chat/completions", THOUGHT),
    "chat that leaves its thought in the text": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": ALOUD}], "reasoning_format": "none"},
    ),
    "responses that leave their thought in the text": ("/v1/responses", {"input": ALOUD, "reasoning_format": "none"}),
    "chat with logprobs": ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 3}),
    "chat of two answers": ("/v1/chat/completions", {"n": 2, "id_slot": None}),
    "chat with a schema": (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PARAMETERS}}},
    ),
    "chat too long": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "chat without messages": ("/v1/chat/completions", {"messages": []}),
    "chat of a wrong type": ("/v1/chat/completions", {"max_tokens": "many"}),
    "completions": ("/v1/completions", {"prompt": "Once upon"}),
    "completions with logprobs": ("/v1/completions", {"prompt": "Once upon", "logprobs": 2}),
    "completions of tokens": ("/v1/completions", {"prompt": [1, 2, 3]}),
    "completions with a bad grammar": ("/v1/completions", {"prompt": "Once", "grammar": "root ::= ("}),
    "completion": ("/completion", {"prompt": "Once upon"}),
    "completion with probabilities": ("/completion", {"prompt": "Once upon", "n_probs": 2, "return_tokens": True}),
    "completion of chosen fields": ("/completion", {"prompt": "Once", "response_fields": ["content", "stop_type"]}),
    "completion of no field": ("/completion", {"prompt": "Once", "response_fields": ["no such one"]}),
    "completion without a prompt": ("/completion", {}),
    "infill": ("/infill", {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "prompt": ""}),
    "infill with files": (
        "/infill",
        {"input_prefix": "x", "input_suffix": "y", "input_extra": [{"filename": "a.py", "text": "z = 1"}]},
    ),
    "infill without a suffix": ("/infill", {"input_prefix": "x"}),
    "responses": ("/v1/responses", {"input": "Name three colours.", "instructions": "You are brief."}),
    "responses with tools": ("/v1/responses", {"input": RESPONSE_ITEMS, "tools": [FLAT_TOOL]}),
    "responses that call": (
        "/v1/responses",
        {"input": "Weather?", "tools": [FLAT_TOOL], "max_output_tokens": 60, "temperature": 3.0, **FORCED},
    ),
    "responses that think": ("/v1/responses", {"input": "Name three colours.", **THOUGHT}),
    "responses too long": ("/v1/responses", {"input": LONG}),
    "responses that refer": ("/v1/responses", {"input": "And?", "previous_response_id": "resp_1"}),
    "messages": ("/v1/messages", {"system": "You are brief.", "messages": MESSAGES[1:]}),
    "messages with tools": (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": ANTHROPIC_CALLED,
            "tools": [ANTHROPIC_TOOL],
            "tool_choice": {"type": "auto"},
        },
    ),
    "messages that stop": ("/v1/messages", {"messages": MESSAGES[1:], "stop_sequences": ["e"]}),
    "messages that think": (
        "/v1/messages",
        {"messages": MESSAGES[1:], "thinking": {"type": "enabled", "budget_tokens": 8}},
    ),
    "messages of thought": ("/v1/messages", {"messages": [{"role": "user", "content": ALOUD}]}),
    "messages of thought and tools": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": ALOUD}], "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}},
    ),
    "messages too long": ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}),
    "messages without any": ("/v1/messages", {}),
}


@pytest.fixture(scope="module")
def thinker(tiny_model: Path) -> Iterator[RunningEngine]:
    """An engine whose template has tools and reasoning."""
    extra: dict[str, int | str] = {"cpuparams.n_threads": 1, "chat_template": THINKS_WHEN_ASKED}
    with running_engine(EngineSettings(tiny_model, parallel=2, ctx=2 * 2048, extra=extra)) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(thinker: RunningEngine) -> Iterator[RunningProxy]:
    """The context guard warns only: what does not fit is the server's to refuse here."""
    with proxy_in_thread(thinker.url, context__on_exceed="warn") as running:
        yield running


def requested(path: str, body: Json, *, stream: bool) -> Json:
    """Reproducible: no reuse, one slot, temperature 0."""
    short: Json = {"max_output_tokens": 8} if path == "/v1/responses" else {"max_tokens": 8}
    messages: Json = {"messages": MESSAGES} if path == "/v1/chat/completions" else {}
    fixed: Json = {"cache_prompt": False, "id_slot": 1, "temperature": 0}
    whole = {**fixed, **short, **messages, **body, "stream": stream}
    return {key: value for key, value in whole.items() if value is not None}


def answer(url: str, path: str, body: Json) -> tuple[int, str, bytes]:
    """Status, content type, and the body without what differs between two runs of one request."""
    got = httpx.post(url + path, json=body, timeout=LIMIT_S)
    return got.status_code, got.headers["content-type"], UNLIKE.sub(rb"\1\2", got.content)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES)
def test_the_answer_is_the_servers_own(
    thinker: RunningEngine, proxy: RunningProxy, path: str, body: Json, stream: bool
) -> None:
    asked = requested(path, body, stream=stream)
    if path == "/v1/messages":
        # It takes no cache_prompt: from the second answer on the prompt is cached, and stays so.
        answer(thinker.url, path, asked)
    expected = answer(thinker.url, path, asked)
    assert answer(proxy.url, path, asked) == expected


def test_what_was_compared_called_thought_and_failed(thinker: RunningEngine) -> None:
    """Else the comparison says less than it seems to."""

    def text(name: str, *, stream: bool) -> str:
        path, body = BODIES[name]
        return answer(thinker.url, path, requested(path, body, stream=stream))[2].decode()

    assert '"tool_calls"' in text("chat that calls", stream=True)
    assert "response.function_call_arguments.delta" in text("responses that call", stream=True)
    assert '"function_call"' in text("responses that call", stream=False)
    assert '"reasoning_content"' in text("chat that thinks", stream=True)
    assert "reasoning" in text("responses that think", stream=True)
    assert '"content":"<think>' in text("chat that leaves its thought in the text", stream=False)
    assert '"thinking_delta"' in text("messages of thought", stream=True)
    assert '"thinking"' in text("messages of thought and tools", stream=False)
    assert '"logprobs"' in text("chat with logprobs", stream=True)
    assert "exceed_context_size_error" in text("messages too long", stream=True)
