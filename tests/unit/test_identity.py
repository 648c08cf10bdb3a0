"""What clients call their conversations, and what they ask beside them."""

from __future__ import annotations

from typing import Any

import pytest
from prompting import parsed

from prefixproxy.identity import NamedConversations, conversation_of

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


@pytest.mark.parametrize(
    ("headers", "body", "name"),
    [
        ({b"x-claude-code-agent-id": "agent", b"x-claude-code-session-id": "session"}, {}, "agent"),
        ({b"x-claude-code-session-id": "session"}, {"prompt_cache_key": "key"}, "session"),
        ({b"session-id": "root", b"thread-id": "thread"}, {"prompt_cache_key": "root"}, "thread"),
        ({b"x-session-affinity": "ses_1"}, {}, "ses_1"),
        ({}, {"prompt_cache_key": "key"}, "key"),
        ({}, {"conversation": "conv_1"}, "conv_1"),
        ({}, {"conversation": {"id": "conv_1"}}, "conv_1"),
        ({}, {"metadata": {"user_id": "user_ab_account__session_0f1e2d3c-aaaa"}}, "0f1e2d3c-aaaa"),
        ({}, {"metadata": {"user_id": '{"device_id":"d","session_id":"0f1e2d3c-aaaa"}'}}, "0f1e2d3c-aaaa"),
        ({}, {"metadata": {"user_id": "someone"}}, ""),
        ({b"thread-id": "  "}, {"metadata": 3, "prompt_cache_key": 7, "conversation": {"id": None}}, ""),
        ({b"thread-id": "x" * 999}, {}, "x" * 200),
        ({}, {}, ""),
    ],
)
def test_the_strongest_name_counts(headers: dict[bytes, str], body: dict[str, Any], name: str) -> None:
    assert conversation_of(headers, body) == name


def body(system: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "hi"}], **more}


MAIN = parsed(body("You code.", tools=TOOLS))
TITLE = parsed(body("Name this chat."))
COMPACTION = parsed(body("You code.", tools=[]))


def test_another_head_without_tools_goes_beside_its_conversation() -> None:
    known = NamedConversations()
    assert not known.is_beside("a", MAIN)
    assert known.is_beside("a", TITLE)
    assert not known.is_beside("a", MAIN)


def test_the_same_head_without_tools_goes_on_with_it() -> None:
    """Codex compacts so: most of the prompt is what the slot holds."""
    known = NamedConversations()
    known.is_beside("a", MAIN)
    assert not known.is_beside("a", COMPACTION)


@pytest.mark.parametrize("name", ["", "b"])
def test_without_a_known_name_nothing_is_beside(name: str) -> None:
    known = NamedConversations()
    known.is_beside("a", MAIN)
    assert not known.is_beside(name, TITLE)
    assert not known.is_beside(name, None)


def test_a_sub_agent_with_tools_of_its_own_is_a_lane() -> None:
    known = NamedConversations()
    known.is_beside("a", MAIN)
    assert not known.is_beside("a", parsed(body("You explore.", tools=TOOLS)))


def test_a_title_that_says_so_needs_no_memory() -> None:
    assert NamedConversations().is_beside("title-ses_1", TITLE)


def test_what_is_remembered_is_bounded() -> None:
    known = NamedConversations(limit=2)
    for name in "abc":
        known.is_beside(name, MAIN)
    assert not known.is_beside("a", TITLE)
    assert known.is_beside("c", TITLE)
