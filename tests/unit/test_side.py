"""Side requests are told by signs no conversation bears."""

from __future__ import annotations

from typing import Any

import pytest

from prefixproxy.side import is_side
from prefixproxy.types import Api

TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
ANSWER = {"type": "object", "properties": {"title": {"type": "string"}, "text": {"type": "string"}}}
TASK = "### Task:\nWrite a title of three to five words for the chat below."
TOOL = {"type": "function", "function": {"name": "look"}}


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents], **more}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.INFILL, {"input_prefix": "def f(", "input_suffix": ")"}),
        (Api.CHAT, chat(TASK)),
        (Api.CHAT, chat([{"type": "text", "text": TASK}])),
        (
            Api.CHAT,
            {"messages": [{"role": "system", "content": "You are a title generator. You"}]},
        ),
        (Api.CHAT, chat("hi", response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": TITLE}})),
        (Api.MESSAGES, chat("hi", tools=[], output_config={"format": {"type": "json_schema", "schema": TITLE}})),
        (Api.RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "schema": TITLE}}}),
    ],
)
def test_a_side_request_is_recognised(api: Api, body: dict[str, Any]) -> None:
    assert is_side(api, body)


@pytest.mark.parametrize(
    "body",
    [
        chat("Write a title for my book."),
        chat("first", "second", TASK),
        chat(TASK, tools=[TOOL]),
        chat("hi", response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": ANSWER}}),
        {"messages": "### Task:"},
        {"messages": [None, 3, {"content": 7}], "text": 5, "response_format": []},
        {},
    ],
)
def test_a_conversation_is_not(body: dict[str, Any]) -> None:
    assert not is_side(Api.CHAT, body)
