"""The real engine's answer without streaming, against the same request streamed and assembled: field for field.

A random-weight model repeats itself at temperature 0, so most cases sample with a high temperature and a fixed seed:
random tokens cut characters and stop words wherever that can happen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from chat_template import TOOLS_AND_REASONING
from running_engine import RunningEngine, running_engine

from prefixproxy.assemble import Assembler, can_assemble, stream_body_edits
from prefixproxy.engine import EngineSettings
from prefixproxy.prompt import SetKey
from prefixproxy.sse import ProgressFilter, SSEReader, object_of
from prefixproxy.types import API_OF_PATH, Api

pytestmark = pytest.mark.engine

Json = dict[str, Any]

MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Name three colours."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}, "n": {"enum": [1, 2]}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}
MASKED = re.compile(r"^(id|created|.*_ms|.*_per_second)$")


def masked(value: Any) -> Any:
    """The same without what differs between two runs of one request: ids, the clock, and times."""
    if isinstance(value, dict):
        return {k: "masked" if MASKED.match(k) else masked(v) for k, v in value.items()}
    return [masked(item) for item in value] if isinstance(value, list) else value


def requested(path: str, body: Json) -> Json:
    """The body that asks for JSON, reproducible: no reuse, one slot, one seed."""
    messages = {"messages": MESSAGES} if API_OF_PATH[path] is Api.CHAT else {}
    prompt = {"prompt": "Once upon a time"} if path.endswith(("completion", "completions")) and not messages else {}
    return {"cache_prompt": False, "id_slot": 1, "seed": 7, "temperature": 3.0, **messages, **prompt, **body}


def direct(engine: RunningEngine, path: str, body: Json) -> tuple[int, Json]:
    answer = httpx.post(engine.url + path, json=body, timeout=60)
    return answer.status_code, answer.json()


def assembled(engine: RunningEngine, path: str, body: Json) -> tuple[int, Json, bool]:
    """The answer put together from a stream, and whether the assembler calls it exact."""
    api = API_OF_PATH[path]
    streamed = dict(body)
    for edit in stream_body_edits(api, body):
        assert isinstance(edit, SetKey)
        assert edit.path == ()
        streamed[edit.key] = edit.value
    reader, assembler, watcher = SSEReader(), Assembler(api, body), ProgressFilter(api)
    with httpx.stream("POST", engine.url + path, json=streamed, timeout=60) as response:
        if response.status_code != 200:
            return response.status_code, orjson.loads(response.read()), True
        for chunk in response.iter_raw():
            for event in reader.feed(watcher.feed(chunk)):
                value = object_of(event)
                if value is not None:
                    assembler.feed(value)
    assert reader.close() == b""
    return *assembler.result(), assembler.exact


def assert_equal(engine: RunningEngine, path: str, body: Json) -> Json:
    """Both ways give the same, in the same order; returns the answer."""
    assert can_assemble(API_OF_PATH[path], body)
    status, expected = direct(engine, path, body)
    got_status, got, exact = assembled(engine, path, body)
    assert exact
    assert (got_status, masked(got)) == (status, masked(expected))
    assert orjson.dumps(masked(got)) == orjson.dumps(masked(expected))
    return expected


CHAT: dict[str, Json] = {
    "plain": {"max_tokens": 24},
    "greedy": {"max_tokens": 8, "temperature": 0},
    "one token": {"max_tokens": 1},
    "no token": {"max_tokens": 0},
    "unknown fields": {"max_tokens": 4, "foo_bar": {"a": 1}, "user": "someone", "metadata": {"k": "v"}},
    "stream false": {"max_tokens": 4, "stream": False, "stream_options": {"include_usage": False}},
    "nulls": {"max_tokens": 4, "stream": None, "stream_options": None, "n": None, "stop": None},
    "timings per token": {"max_tokens": 6, "timings_per_token": True},
    "progress": {"max_tokens": 6, "return_progress": True},
    "stop string": {"max_tokens": 24, "grammar": 'root ::= "one two three four"', "stop": "three"},
    "whole grammar": {"max_tokens": 24, "grammar": 'root ::= "one two three"'},
    "grammar cut": {"max_tokens": 2, "grammar": 'root ::= "one two three four five six"'},
    "empty": {"max_tokens": 24, "grammar": 'root ::= ""'},
    "json schema": {"max_tokens": 60, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "json object": {"max_tokens": 20, "response_format": {"type": "json_object"}},
    "tools and text": {"max_tokens": 20, "tools": [WEATHER]},
    "tools, none to call": {"max_tokens": 20, "tools": [WEATHER], "tool_choice": "none"},
    "bias": {"max_tokens": 8, "logit_bias": [[15, -100]], "top_k": 5},
}


@pytest.mark.parametrize("body", CHAT.values(), ids=CHAT)
def test_chat(engine: RunningEngine, body: Json) -> None:
    assert_equal(engine, "/v1/chat/completions", requested("/v1/chat/completions", body))


COMPLETIONS: dict[str, Json] = {
    "plain": {"max_tokens": 24},
    "one token": {"max_tokens": 1},
    "no token": {"max_tokens": 0},
    "unknown fields": {"max_tokens": 4, "foo_bar": 1, "echo": False, "best_of": 1},
    "stop": {"max_tokens": 24, "grammar": 'root ::= "one two three four"', "stop": ["three", "x"]},
    "empty": {"max_tokens": 24, "grammar": 'root ::= ""'},
    "tokens as prompt": {"max_tokens": 4, "prompt": [1, 2, 3]},
    "texts and tokens as prompt": {"max_tokens": 4, "prompt": ["one", 2, "three"]},
    "list of one prompt": {"max_tokens": 4, "prompt": ["one"]},
}


@pytest.mark.parametrize("body", COMPLETIONS.values(), ids=COMPLETIONS)
def test_completions(engine: RunningEngine, body: Json) -> None:
    assert_equal(engine, "/v1/completions", requested("/v1/completions", body))


NATIVE: dict[str, Json] = {
    **{name: {**body} for name, body in COMPLETIONS.items()},
    "timings per token": {"n_predict": 5, "timings_per_token": True},
    "response fields": {"n_predict": 5, "response_fields": ["content", "timings", "generation_settings/stream", "no"]},
    "response fields without content": {"n_predict": 5, "response_fields": ["id_slot", "tokens_predicted"]},
    "settings as a whole": {"n_predict": 5, "response_fields": ["generation_settings", "stop_type", "content"]},
    "verbose": {"n_predict": 5, "verbose": True},
    "newline": {"n_predict": 30, "grammar": 'root ::= "one\\ntwo\\n"'},
    "json schema": {"n_predict": 60, "json_schema": SCHEMA},
}


@pytest.mark.parametrize("path", ["/completion", "/completions"])
@pytest.mark.parametrize("body", NATIVE.values(), ids=NATIVE)
def test_completion(engine: RunningEngine, path: str, body: Json) -> None:
    assert_equal(engine, path, requested(path, body))


@pytest.mark.parametrize("body", [{"n_predict": 5}, {"n_predict": 5, "prompt": "more", "input_extra": []}])
def test_infill(engine: RunningEngine, body: Json) -> None:
    parts = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n    return c"}
    assert_equal(engine, "/infill", requested("/infill", parts | body))


@pytest.fixture(scope="module")
def thinker(tiny_model: Path) -> Iterator[RunningEngine]:
    """An engine whose template has tools and reasoning."""
    extra: dict[str, int | str] = {"cpuparams.n_threads": 1, "chat_template": TOOLS_AND_REASONING}
    with running_engine(EngineSettings(tiny_model, parallel=2, ctx=4096, extra=extra)) as running:
        yield running


# The grammar of a required call lets text come first, and the opening tag counts only with its line feed behind it.
CALL = {
    "tools": [WEATHER],
    "tool_choice": "required",
    "logit_bias": [["<tool_call>", 60], ["\n", 60], [2, 75]],
}


@pytest.mark.parametrize("seed", [1, 2])
def test_tool_call(thinker: RunningEngine, seed: int) -> None:
    body = requested("/v1/chat/completions", CALL | {"seed": seed, "max_tokens": 300, "parallel_tool_calls": False})
    [choice] = assert_equal(thinker, "/v1/chat/completions", body)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


def test_tool_calls_that_were_cut_are_equal_too(thinker: RunningEngine) -> None:
    cut = []
    for max_tokens in (15, 40, 60, 90):
        body = requested("/v1/chat/completions", CALL | {"seed": 2, "max_tokens": max_tokens})
        status, expected = direct(thinker, "/v1/chat/completions", body)
        got_status, got, _exact = assembled(thinker, "/v1/chat/completions", body)
        assert (got_status, masked(got)) == (status, masked(expected))
        [choice] = expected["choices"]
        cut.append(choice["finish_reason"] == "length" and "tool_calls" in choice["message"])
    assert any(cut)


THOUGHT = 'root ::= "<think>\\nabc def\\n</think>\\n\\nghi jkl"'
REASONING: dict[str, Json] = {
    "reasoning and text": {"grammar": THOUGHT},
    "left in the text": {"grammar": THOUGHT, "reasoning_format": "none"},
    "switched off": {"grammar": THOUGHT, "chat_template_kwargs": {"enable_thinking": False}},
    "cut in the text": {"grammar": THOUGHT, "stop": ["jkl"]},
    "cut in the reasoning": {"grammar": THOUGHT, "stop": ["def"]},
}


@pytest.mark.parametrize("body", REASONING.values(), ids=REASONING)
def test_reasoning(thinker: RunningEngine, body: Json) -> None:
    answer = assert_equal(thinker, "/v1/chat/completions", requested("/v1/chat/completions", body))
    message = answer["choices"][0]["message"]
    assert ("reasoning_content" in message) == ("reasoning_format" not in body and "chat_template_kwargs" not in body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
@pytest.mark.parametrize("stop", [None, ["e", "in"]])
def test_random_text_is_equal_or_marked(engine: RunningEngine, path: str, stop: list[str] | None) -> None:
    """Random tokens end within characters and stop words: whatever differs is marked, and most does not differ."""
    differ = 0
    for seed in range(8):
        body = requested(path, {"seed": seed, "max_tokens": 1 + seed, "stop": stop})
        status, expected = direct(engine, path, body)
        got_status, got, exact = assembled(engine, path, body)
        same = (got_status, masked(got)) == (status, masked(expected))
        assert same or not exact, body
        differ += not same
    assert differ <= 3


LOST: dict[str, Json] = {
    "within a character": {"grammar": "root ::= [\u4e00-\u4e10]+"},
    "within a stop word": {"grammar": 'root ::= "b" [a]+', "stop": ["c", "a" * 100]},
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
@pytest.mark.parametrize("where", LOST)
def test_text_that_was_held_back_at_the_limit_is_marked(engine: RunningEngine, path: str, where: str) -> None:
    differ = marked = 0
    for seed in range(6):
        body = requested(path, LOST[where] | {"seed": seed, "max_tokens": 2 + seed})
        _, expected = direct(engine, path, body)
        _, got, exact = assembled(engine, path, body)
        same = masked(got) == masked(expected)
        assert same or not exact
        differ += not same
        marked += not exact
    assert marked > 0
    # The parser of chat messages drops half a character itself.
    assert differ > 0 or (where == "within a character" and path == "/v1/chat/completions")


EMPTY: dict[str, tuple[Json, str]] = {
    "taken by a stop word": ({"grammar": 'root ::= "one two"', "stop": ["one"]}, ""),
    "reasoning of nothing": ({"grammar": 'root ::= "<think></think>"'}, "<think></think>"),
}


@pytest.mark.parametrize(("body", "raw"), EMPTY.values(), ids=EMPTY)
def test_a_message_parsed_to_nothing_is_marked(thinker: RunningEngine, body: Json, raw: str) -> None:
    """Without streaming the server quotes the raw text then; a stream does not show whether there was any."""
    body = requested("/v1/chat/completions", body)
    _, expected = direct(thinker, "/v1/chat/completions", body)
    _, got, exact = assembled(thinker, "/v1/chat/completions", body)
    assert expected["choices"][0]["message"]["content"] == raw
    assert got["choices"][0]["message"]["content"] == ""
    assert not exact


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"max_tokens": "many"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 5000}]}),
        ("/v1/completions", {"prompt": "word " * 5000}),
        ("/completion", {"grammar": "root ::= ("}),
    ],
)
def test_an_error_before_the_first_token_is_the_same(engine: RunningEngine, path: str, body: Json) -> None:
    body = requested(path, body)
    status, expected = direct(engine, path, body)
    assert status >= 400
    assert assembled(engine, path, body) == (status, expected, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
def test_an_error_in_mid_stream_is_the_same(engine_factory: Callable[..., RunningEngine], path: str) -> None:
    """Two answers that outgrow a context they share are both ended by an error."""
    shared = engine_factory(parallel=2, ctx=512, extra={"kv_unified": True, "cpuparams.n_threads": 1})
    body = requested(path, {"ignore_eos": True, "max_tokens": 500, "id_slot": -1, "temperature": 1.0})
    with ThreadPoolExecutor(2) as pool:
        plain = list(pool.map(lambda _: direct(shared, path, body), range(2)))
        joined = list(pool.map(lambda _: assembled(shared, path, body), range(2)))
    assert {status for status, _ in plain} == {500}
    assert [(status, answer) for status, answer, _ in joined] == plain


# --- a client's own stream ---

STREAMED_BODIES: dict[str, tuple[str, Json]] = {
    "chat": ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "user", "content": "word " * 3000}]}),
    "chat with usage": ("/v1/chat/completions", {"stream_options": {"include_usage": True}}),
    "continued chat": ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "assistant", "content": "Red,"}]}),
    "echoed chat": (
        "/v1/chat/completions",
        {"messages": [*MESSAGES, {"role": "assistant", "content": "Red,"}], "echo": True},
    ),
    "two answers": ("/v1/chat/completions", {"n": 2}),
    "completions": ("/v1/completions", {"prompt": "word " * 3000}),
    "completion": ("/completion", {"prompt": "word " * 3000}),
    "two prompts": ("/completion", {"prompt": ["word " * 2000, "other " * 2000]}),
    "responses": ("/v1/responses", {"input": "word " * 3000, "max_output_tokens": 6}),
    "asked for progress": ("/v1/chat/completions", {"return_progress": True}),
}
UNLIKE = re.compile(
    rb'("(?:id|item_id)":")[^"]*|("(?:created|created_at|time_ms|[a-z_]+_ms|[a-z_]+_second)":)[-+.e0-9]+'
)


@pytest.mark.parametrize(("path", "body"), STREAMED_BODIES.values(), ids=STREAMED_BODIES)
def test_a_stream_keeps_its_bytes_when_we_ask_for_progress(engine: RunningEngine, path: str, body: Json) -> None:
    api = API_OF_PATH[path]
    body = requested(path, {"stream": True, "max_tokens": 6, "temperature": 0} | body)
    if api is Api.COMPLETION and isinstance(body["prompt"], list):
        body["id_slot"] = -1
    asking = dict(body)
    for edit in stream_body_edits(api, body):
        assert isinstance(edit, SetKey)
        asking[edit.key] = edit.value
    watcher = ProgressFilter(api, remove=not body.get("return_progress"))
    expected = raw_stream(engine, path, body)
    filtered = b"".join(watcher.feed(chunk) for chunk in raw_chunks(engine, path, asking)) + watcher.close()
    assert UNLIKE.sub(rb"\1\2", filtered) == UNLIKE.sub(rb"\1\2", expected)
    assert watcher.first_token_seen
    if "return_progress" in asking:
        assert watcher.progress is not None
        assert watcher.progress.processed == watcher.progress.total > 0


def raw_chunks(engine: RunningEngine, path: str, body: Json) -> Iterator[bytes]:
    with httpx.stream("POST", engine.url + path, json=body, timeout=60) as response:
        assert response.status_code == 200
        yield from response.iter_raw()


def raw_stream(engine: RunningEngine, path: str, body: Json) -> bytes:
    return b"".join(raw_chunks(engine, path, body))
