"""The openai SDK, unchanged but for its base URL, on the proxy before the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_template import TOOLS_AND_REASONING
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from running_engine import RunningEngine, running_engine
from running_proxy import proxy_in_thread

from prefixproxy.engine import EngineSettings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Name three colours."},
]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FORCED: dict[str, Any] = {"logit_bias": [["<tool_call>", 60], ["\n", 60], [2, 75]]}
"""Random weights never open or end a tool call by themselves."""


@contextmanager
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(tiny_model: Path) -> Iterator[RunningEngine]:
    """An engine whose template knows tools."""
    extra: dict[str, int | str] = {"cpuparams.n_threads": 1, "chat_template": TOOLS_AND_REASONING}
    with running_engine(EngineSettings(tiny_model, parallel=2, ctx=2 * 2048, extra=extra)) as one:
        yield one


@pytest.fixture(scope="module")
def client(thinker: RunningEngine) -> Iterator[openai.OpenAI]:
    with proxy_in_thread(thinker.url) as proxy, sdk(proxy.url) as client:
        yield client


@pytest.fixture(scope="module")
def straight(thinker: RunningEngine) -> Iterator[openai.OpenAI]:
    with sdk(thinker.url) as client:
        yield client


def test_chat(client: openai.OpenAI, straight: openai.OpenAI) -> None:
    answer, same = (
        c.chat.completions.create(model="any", messages=MESSAGES, max_tokens=8, temperature=0)
        for c in (client, straight)
    )
    assert answer.choices[0].message == same.choices[0].message
    assert answer.choices[0].finish_reason == same.choices[0].finish_reason
    assert answer.usage is not None
    assert same.usage is not None
    assert answer.usage.completion_tokens == same.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens == same.usage.prompt_tokens


def test_streamed_chat(client: openai.OpenAI, straight: openai.OpenAI) -> None:
    whole = straight.chat.completions.create(model="any", messages=MESSAGES, max_tokens=8, temperature=0)
    chunks = list(
        client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=8, temperature=0, stream=True)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == (whole.choices[0].message.content or "")
    assert len(chunks) > 2
    assert [chunk.usage for chunk in chunks if chunk.usage] == []


def test_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="any", messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert [usage.completion_tokens for usage in usages] == [4]
    assert chunks[-1].choices == []


def test_the_raw_answer_carries_the_proxys_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="any", messages=MESSAGES, max_tokens=2)
    usage = raw.parse().usage
    assert usage is not None
    cached, evaluated = (int(raw.headers[f"x-prefixproxy-{name}"]) for name in ("cache-n", "prompt-n"))
    assert cached + evaluated == usage.prompt_tokens
    assert raw.headers["x-prefixproxy-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": "any",
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 300,
        "seed": 1,
        "temperature": 3.0,
        "parallel_tool_calls": False,
        "extra_body": FORCED,
    }
    if stream:
        with client.chat.completions.stream(**asked) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    assert message.tool_calls
    call = message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_models(client: openai.OpenAI, straight: openai.OpenAI) -> None:
    assert client.models.list().data == straight.models.list().data
    assert len(client.models.list().data) == 1


def test_completions(client: openai.OpenAI, straight: openai.OpenAI) -> None:
    prompt = "Once upon a time"
    answer, same = (
        c.completions.create(model="any", prompt=prompt, max_tokens=6, temperature=0) for c in (client, straight)
    )
    assert answer.choices[0].text == same.choices[0].text
    chunks = list(client.completions.create(model="any", prompt=prompt, max_tokens=6, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == same.choices[0].text


def test_embeddings_fail_as_the_upstream_says(client: openai.OpenAI, straight: openai.OpenAI) -> None:
    told = []
    for one in (client, straight):
        with pytest.raises(openai.InternalServerError) as caught:
            one.embeddings.create(model="any", input="text")
        told.append((caught.value.status_code, caught.value.body))
    assert told[0] == told[1]
    assert told[0][0] == 501


def test_wrong_input_fails_as_the_upstream_says(client: openai.OpenAI, straight: openai.OpenAI) -> None:
    told = []
    for one in (client, straight):
        with pytest.raises(openai.APIStatusError) as caught:
            one.chat.completions.create(model="any", messages="no list")  # type: ignore[arg-type]
        told.append((caught.value.status_code, caught.value.body))
    assert told[0] == told[1]


@pytest.mark.anyio
async def test_async_client(client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="unused", max_retries=0) as asynchronous:
        answer = await asynchronous.chat.completions.create(model="any", messages=MESSAGES, max_tokens=2)
        assert answer.usage is not None
        stream = await asynchronous.chat.completions.create(model="any", messages=MESSAGES, max_tokens=2, stream=True)
        assert [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices][-1] == "length"
