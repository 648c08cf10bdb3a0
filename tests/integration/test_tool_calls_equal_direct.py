"""Tool calls that the real engine generates, asked for or forced: through the proxy as without it, in every API."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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
    rb'("(?:id|item_id|call_id|response_id)":\s?")[^"]*'
    rb'|("(?:created|created_at|completed_at|[a-z_]+_ms|[a-z_]+_second)":\s?)[-+.e0-9]+'
)
TEMPLATE = TOOLS_AND_REASONING.replace("<tool_call>\n", "<tool_call>").replace("\n</tool_call>", "</tool_call>")
"""Calls are spelled as the model spells them."""
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOK = {"name": "look", "description": "Looks at a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": LOOK}
BODIES: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "Look at Rome."}], "tools": [TOOL], "max_tokens": 60},
    MESSAGES: {
        "messages": [{"role": "user", "content": "Look at Rome."}],
        "tools": [{"name": "look", "description": "Looks at a city", "input_schema": PARAMETERS}],
        "max_tokens": 60,
    },
    RESPONSES: {"input": "Look at Rome.", "tools": [{"type": "function", **LOOK}], "max_output_tokens": 60},
}
# In Messages, the server knows no "none".
CHOICES: dict[str, list[Any]] = {
    CHAT: [None, "auto", "required", "none", {"type": "function", "function": {"name": "look"}}],
    MESSAGES: [None, {"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "look"}],
    RESPONSES: [None, "auto", "required", "none"],
}
CALLED = {CHAT: b'"tool_calls"', MESSAGES: b'"tool_use"', RESPONSES: b'"function_call"'}


@pytest.fixture(scope="module")
def caller(tiny_models: Callable[[str], Path]) -> Iterator[RunningEngine]:
    extra: dict[str, int | str] = {"cpuparams.n_threads": 1, "chat_template": TEMPLATE}
    with running_engine(EngineSettings(tiny_models("calling"), parallel=2, ctx=2 * 2048, extra=extra)) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(caller: RunningEngine) -> Iterator[RunningProxy]:
    with proxy_in_thread(caller.url) as running:
        yield running


def answer(url: str, path: str, body: Json) -> tuple[int, str, bytes]:
    """Status, content type, and the body without what differs between two runs of one request."""
    got = httpx.post(url + path, json=body, timeout=LIMIT_S)
    return got.status_code, got.headers["content-type"], UNLIKE.sub(rb"\1\2", got.content)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize(("path", "choice"), [(path, each) for path, choices in CHOICES.items() for each in choices])
def test_a_call_is_the_servers_own(
    caller: RunningEngine, proxy: RunningProxy, path: str, choice: Any, stream: bool
) -> None:
    body = {**BODIES[path], "temperature": 0, "stream": stream}
    if choice is not None:
        body["tool_choice"] = choice
    for url in (caller.url, proxy.url):
        answer(url, path, body)  # the next one finds the prompt in a slot, whichever that is
    expected = answer(caller.url, path, body)
    assert answer(proxy.url, path, body) == expected
    assert (CALLED[path] in expected[2]) == (choice != "none")


@pytest.mark.parametrize("path", CHOICES)
def test_a_call_behind_signs_of_life_is_whole(caller: RunningEngine, path: str) -> None:
    with proxy_in_thread(caller.url, patience__after=0.001, patience__every=0.001) as running:
        body = {**BODIES[path], "temperature": 0, "stream": True, "tool_choice": CHOICES[path][2]}
        status, _, got = answer(running.url, path, body)
    assert status == 200
    assert CALLED[path] in got
    assert got.count(b"Rome") >= 1
