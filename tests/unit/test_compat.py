"""Folding what strict templates refuse: nothing lost, order kept, stable from turn to turn, nothing else touched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.body import Body
from prefixproxy.compat import CLOSE, OPEN, folded
from prefixproxy.types import Api

Json = dict[str, Any]


def sent(api: Api, body: Json) -> Json:
    out = orjson.loads(folded(api, Body.parse(orjson.dumps(body))).raw)
    assert isinstance(out, dict)
    return out


def said(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def told(text: str) -> str:
    return f"{OPEN}\n{text}\n{CLOSE}"


CASES: dict[str, tuple[list[Json], list[Json]]] = {
    "behind a user turn": (
        [said("system", "S"), said("user", "U"), said("system", "R"), said("assistant", "A")],
        [said("system", "S"), said("user", f"U\n\n{told('R')}"), said("assistant", "A")],
    ),
    "before a user turn": (
        [said("user", "U"), said("assistant", "A"), said("system", "R"), said("user", "V")],
        [said("user", "U"), said("assistant", "A"), said("user", f"{told('R')}\n\nV")],
    ),
    "second of the head": (
        [said("developer", "D"), said("developer", "E"), said("user", "U")],
        [said("developer", "D"), said("user", f"{told('E')}\n\nU")],
    ),
    "several": (
        [said("user", "U"), said("system", "R"), said("system", "Q"), said("assistant", "A")],
        [said("user", f"U\n\n{told('R')}\n\n{told('Q')}"), said("assistant", "A")],
    ),
    "parts": (
        [said("user", [{"type": "text", "text": "U"}]), said("system", [{"type": "text", "text": "R"}])],
        [said("user", [{"type": "text", "text": "U"}, {"type": "text", "text": told("R")}])],
    ),
    "before and behind parts": (
        [
            said("system", "S"),
            said("system", "E"),
            said("user", [{"type": "image_url", "image_url": {"url": "x"}}]),
            said("system", "R"),
        ],
        [
            said("system", "S"),
            said(
                "user",
                [
                    {"type": "text", "text": told("E")},
                    {"type": "image_url", "image_url": {"url": "x"}},
                    {"type": "text", "text": told("R")},
                ],
            ),
        ],
    ),
    "without a neighbour": (
        [said("user", "U"), said("assistant", "A"), said("system", "R"), said("assistant", "B")],
        [said("user", "U"), said("assistant", "A"), said("user", "R"), said("assistant", "B")],
    ),
    "marked already": (
        [said("user", "U"), said("system", told("R"))],
        [said("user", f"U\n\n{told('R')}")],
    ),
}


@pytest.mark.parametrize(("messages", "expected"), CASES.values(), ids=CASES)
def test_chat(messages: list[Json], expected: list[Json]) -> None:
    assert sent(Api.CHAT, {"messages": messages, "max_tokens": 3}) == {"messages": expected, "max_tokens": 3}


def test_what_claude_code_puts_between_its_messages() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "ok"}
    messages = [
        said("user", [{"type": "text", "text": "Do it"}]),
        said("system", "Agent types: a, b"),
        said("assistant", [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]),
        said("user", [result]),
        said("system", "The task tools have not been used."),
    ]
    out = sent(Api.MESSAGES, {"system": "You are C.", "messages": messages})
    assert [message["role"] for message in out["messages"]] == ["user", "assistant", "user"]
    assert out["messages"][0]["content"][1]["text"] == told("Agent types: a, b")
    assert out["messages"][2]["content"] == [
        result,
        {"type": "text", "text": told("The task tools have not been used.")},
    ]
    assert out["system"] == "You are C."


def test_codex_and_its_two_developer_messages() -> None:
    def item(role: str, text: str) -> Json:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    out = sent(Api.RESPONSES, {"input": [item("developer", "D"), item("developer", "E"), item("user", "U")]})
    assert out["input"] == [item("developer", "D"), item("user", f"{told('E')}\n\nU")]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"messages": [said("system", "S"), said("user", "U"), said("assistant", "A"), said("user", "V")]}),
        (Api.CHAT, {"messages": [said("user", "U"), said("system", [{"type": "image_url"}])]}),
        (Api.CHAT, {"messages": [said("user", "U"), said("system", None)]}),
        (Api.CHAT, {"messages": "none"}),
        (Api.RESPONSES, {"instructions": "I", "input": "U"}),
        (Api.MESSAGES, {"system": "S", "messages": [said("user", "U")]}),
        (Api.COMPLETION, {"prompt": "S"}),
    ],
)
def test_where_there_is_nothing_to_fold_not_one_byte_changes(api: Api, body: Json) -> None:
    whole = Body.parse(orjson.dumps(body, option=orjson.OPT_INDENT_2))
    assert folded(api, whole) is whole


TURNS = st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=1, max_size=8)


@given(TURNS)
def test_no_text_is_lost_or_moved_past_another(roles: list[str]) -> None:
    messages = [said("system", "text 0.")] + [said(role, f"text {n}.") for n, role in enumerate(roles, 1)]
    out = sent(Api.CHAT, {"messages": messages})["messages"]
    text = "".join(message["content"] for message in out)
    places = [text.index(f"text {n}.") for n in range(len(messages))]
    assert places == sorted(places)
    assert [message["role"] for message in out].count("system") == 1


@given(TURNS)
def test_a_conversation_that_goes_on_keeps_its_bytes(roles: list[str]) -> None:
    """As long as what was sent ended with the user or behind one, which is where agents send."""
    messages = [said("system", "S")] + [said(role, f"text {n}") for n, role in enumerate(roles)]

    def rendered(count: int) -> str:
        out = sent(Api.CHAT, {"messages": messages[:count]})["messages"]
        return "".join(f"<{message['role']}>{message['content']}" for message in out)

    ends = [n for n in range(2, len(messages) + 1) if _sent_here(messages[:n])]
    for earlier, later in pairwise(ends):
        assert rendered(later).startswith(rendered(earlier))


def _sent_here(messages: list[Json]) -> bool:
    """Whether the last message that is no system message is the user's."""
    return next((m["role"] == "user" for m in reversed(messages) if m["role"] != "system"), False)
