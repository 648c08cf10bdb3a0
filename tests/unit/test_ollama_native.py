"""A `/v1` body becomes the native request that Ollama would make of it, or is left alone."""

from __future__ import annotations

import json
from typing import Any

import ollama_openai
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixproxy.backends.ollama_native import CHAT_PATH, COMPLETIONS_PATH, native_of

N_CTX = 8192
USER = {"role": "user", "content": "x"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"b": 1, "a": "ü<"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}}}

CHATS: list[dict[str, Any]] = [
    {},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": None, "temperature": None, "tools": None, "stop": None, "response_format": None, "n": None},
    {"max_tokens": 5, "seed": 1, "temperature": 0, "top_p": 0.5, "frequency_penalty": 0.1, "presence_penalty": 1},
    {"stop": "a"},
    {"stop": ["a", "b"]},
    {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": []},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": SCHEMA},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 1, "user": "me", "store": False, "metadata": {"a": "b"}, "prompt_cache_key": "k"},
    {"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    {"messages": [USER, {"role": "assistant", "content": "y", "reasoning": "hm", "refusal": None}, USER]},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "tool", "tool_call_id": "none", "content": "4"},
            {"role": "tool", "name": "other", "content": "5"},
        ]
    },
]

UNKNOWN: list[dict[str, Any]] = [
    {"model": ""},
    {"model": 3},
    {"messages": []},
    {"messages": "x"},
    {"messages": None},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": 3}]},
    {"messages": [{"role": "banana", "content": "x"}]},
    {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,AA"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]},
    {"messages": [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
    {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "function", "more": 1}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{bad"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": '{"a":1,"a":2}'}}]}]},
    {"max_completion_tokens": 5},
    {"max_tokens": 5.0},
    {"max_tokens": True},
    {"temperature": "0"},
    {"n": 2},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"parallel_tool_calls": False},
    {"stop": []},
    {"stop": [1]},
    {"stream": "yes"},
    {"stream_options": {"include_usage": True, "more": 1}},
    {"response_format": {"type": "other"}},
    {"response_format": {"type": "json_schema"}},
    {"reasoning_effort": "high"},
    {"options": {"num_ctx": 1}},
    {"keep_alive": 5},
    {"Temperature": 0},
    {"logit_bias": {"5": 1}},
    {"_debug_render_only": True},
    {"tools": [3]},
    {"seed": 10**30},
]


def body_of(more: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **more}


def checked(path: str, body: dict[str, Any], raw: bytes) -> bool:
    """Whether it became a native request; if so, it is the right one."""
    native = native_of(path, raw, N_CTX)
    if native is None:
        return False
    sent = ollama_openai.meant(orjson.loads(native.payload))
    assert sent["options"].pop("num_ctx") == N_CTX
    made = ollama_openai.from_chat if path == CHAT_PATH else ollama_openai.from_completion
    assert json.dumps(sent, sort_keys=True) == json.dumps(made(body), sort_keys=True)
    assert native.path == ("/api/chat" if path == CHAT_PATH else "/api/generate")
    return True


@pytest.mark.parametrize("more", CHATS, ids=str)
def test_a_chat_becomes_what_ollama_makes_of_it(more: dict[str, Any]) -> None:
    body = body_of(more)
    assert checked(CHAT_PATH, body, orjson.dumps(body))


@pytest.mark.parametrize("more", UNKNOWN, ids=str)
def test_what_has_no_plain_meaning_is_left_alone(more: dict[str, Any]) -> None:
    assert native_of(CHAT_PATH, json.dumps(body_of(more)).encode(), N_CTX) is None


def test_arguments_keep_their_order_in_a_native_call() -> None:
    body = body_of({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]})
    native = native_of(CHAT_PATH, orjson.dumps(body), N_CTX)
    assert native is not None
    assert b'"arguments":{"b":1,"a":"\xc3\xbc<"}' in native.payload


@pytest.mark.parametrize(
    "more",
    [{}, {"stream": True, "max_tokens": 3, "stop": "x", "top_p": 0, "frequency_penalty": 1}, {"echo": False, "n": 1}],
    ids=str,
)
def test_a_completion_becomes_what_ollama_makes_of_it(more: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": "Once", **more}
    assert checked(COMPLETIONS_PATH, body, orjson.dumps(body))


@pytest.mark.parametrize(
    "more",
    [{"prompt": ["a"]}, {"prompt": ""}, {"prompt": None}, {"suffix": "x"}, {"echo": True}, {"logprobs": 2}, {"n": 2}],
    ids=str,
)
def test_a_completion_without_a_plain_meaning_is_left_alone(more: dict[str, Any]) -> None:
    assert native_of(COMPLETIONS_PATH, orjson.dumps({"model": "m", "prompt": "x", **more}), N_CTX) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{bad",
        b"[]",
        b'{"model":"m","model":"n","messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x\xff"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x\\ud83d"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
        b'{"model":"m","messages":' + b"[" * 100_000,
    ],
    ids=lambda raw: repr(raw[:60]),
)
def test_a_body_that_cannot_be_read_plainly_is_left_alone(raw: bytes) -> None:
    assert native_of(CHAT_PATH, raw, N_CTX) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(0, 2) | st.sampled_from(["", "x", "auto", "text", "ü<"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text"]), inner, max_size=2),
    max_leaves=4,
)
MESSAGES = st.sampled_from([each for more in (*CHATS, *UNKNOWN) for each in (more.get("messages") or [])])
KEYS = sorted({key for more in (*CHATS, *UNKNOWN) for key in more} - {"messages", "model"})


@given(
    st.lists(MESSAGES, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    st.sampled_from([*CHATS, {}]),
)
@example([{"role": "tool", "tool_call_id": "c1", "content": "3"}, "x"], {}, {})
def test_any_body_is_either_the_same_request_or_left_alone(
    messages: list[Any], wild: dict[str, Any], known: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": messages, **{k: v for k, v in known.items() if k != "messages"}, **wild}
    checked(CHAT_PATH, body, json.dumps(body).encode())
