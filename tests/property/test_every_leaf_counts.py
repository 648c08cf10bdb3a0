"""Whatever of a message reaches a template leaves its mark in the canonical bytes, whichever keys stand beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from prefixproxy.body import Body, json_bytes
from prefixproxy.chat import canonical, parse_prompt
from prefixproxy.types import Api

Place = tuple[str | int, ...]

WORD = st.sampled_from(["a", "Be brief.", "é", '{"a": 1}'])
ARGUMENTS = st.sampled_from(['{"path": "a.txt"}', "{}", '{"n": 1}'])


def some(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object with any of these keys: clients leave out what they have no value for, or send null."""
    return st.fixed_dictionaries({}, optional={key: st.none() | value for key, value in keys.items()})


def whole(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(keys)


def one(value: Any) -> st.SearchStrategy[Any]:
    return st.just(value)


TEXT = whole(type=st.sampled_from(["text", "input_text", "output_text"]), text=WORD)
MEDIA = whole(type=one("image_url"), image_url=whole(url=WORD)) | whole(type=one("input_audio"), data=WORD)
ODD = whole(type=st.sampled_from(["refusal", "redacted_thinking", "odd"]), refusal=WORD, data=WORD)
CONTENT = WORD | st.lists(TEXT | MEDIA | ODD | WORD, min_size=1, max_size=3)
TOOL_USE = whole(type=one("tool_use"), id=WORD, name=WORD, input=whole(path=WORD))
RESULT = whole(type=one("tool_result"), tool_use_id=WORD, content=CONTENT)
THINKING = whole(type=one("thinking"), thinking=WORD)
BLOCKS = WORD | st.lists(TEXT | TOOL_USE | RESULT | THINKING | ODD, min_size=1, max_size=3)
FUNCTION = whole(name=WORD, arguments=ARGUMENTS)
CALL = whole(id=WORD, type=one("function"), function=FUNCTION) | whole(id=WORD, custom=whole(name=WORD, input=WORD))
ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "critic"])

CHAT = some(
    content=CONTENT,
    tool_calls=st.lists(CALL, min_size=1, max_size=2) | WORD,
    function_call=FUNCTION | WORD,
    name=WORD,
    tool_call_id=WORD,
    reasoning_content=WORD,
)
OLLAMA = some(
    content=WORD,
    thinking=WORD,
    images=st.lists(WORD, min_size=1, max_size=2) | WORD,
    tool_name=WORD,
    tool_calls=st.lists(whole(function=whole(name=WORD, arguments=whole(path=WORD))), min_size=1, max_size=2),
)


def of_a_role(message: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda role, rest: {"role": role, **rest}, ROLE, message)


OUTPUTS = st.sampled_from(["function_call_output", "custom_tool_call_output", "computer_call_output"])
ITEM = st.one_of(
    of_a_role(some(content=CONTENT)),
    of_a_role(whole(type=one("message"), content=CONTENT)),
    whole(type=one("function_call"), call_id=WORD, name=WORD, arguments=ARGUMENTS),
    of_a_role(whole(type=one("function_call"), call_id=WORD, name=WORD, arguments=ARGUMENTS)),
    whole(type=one("custom_tool_call"), call_id=WORD, name=WORD, input=WORD),
    whole(type=one("mcp_call"), call_id=WORD, name=WORD, arguments=ARGUMENTS, output=WORD, server_label=WORD),
    whole(type=one("local_shell_call"), call_id=WORD, action=whole(command=st.lists(WORD, min_size=1, max_size=2))),
    whole(type=OUTPUTS, call_id=WORD, output=CONTENT | whole(image_url=WORD)),
    whole(type=OUTPUTS, call_id=WORD, output=CONTENT, stderr=WORD),
    whole(type=one("reasoning"), content=st.lists(whole(type=one("reasoning_text"), text=WORD), min_size=1)),
    whole(type=one("reasoning"), encrypted_content=WORD),
    whole(type=one("reasoning"), summary=st.lists(whole(type=one("summary_text"), text=WORD), min_size=1)),
    whole(type=one("compaction"), encrypted_content=WORD),
    whole(type=one("item_reference"), id=WORD),
    whole(id=WORD),
)

MESSAGES: dict[Api, tuple[str, st.SearchStrategy[dict[str, Any]]]] = {
    Api.CHAT: ("messages", of_a_role(CHAT)),
    Api.MESSAGES: ("messages", of_a_role(some(content=BLOCKS))),
    Api.OLLAMA_CHAT: ("messages", of_a_role(OLLAMA)),
    Api.RESPONSES: ("input", ITEM),
}
STRUCTURE = frozenset({"type"})
"""Says of what kind a value is: another kind of text part or call is no other text."""


def leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*place, key))
    elif isinstance(value, str) and place[-1] not in STRUCTURE:
        yield place


def changed(value: Any, place: Place) -> Any:
    if not place:
        return value + "!"
    key, rest = place[0], place[1:]
    copy: Any = value.copy()
    copy[key] = changed(value[key], rest)
    return copy


def canonical_bytes(api: Api, data: dict[str, Any]) -> bytes:
    prompt = parse_prompt(api, Body.parse(json_bytes(data)))
    assert prompt is not None
    return b"".join(canonical(prompt).parts)


@pytest.mark.parametrize("api", MESSAGES)
@given(st.data())
def test_changing_any_leaf_of_a_message_changes_the_bytes(api: Api, data: st.DataObject) -> None:
    key, message = MESSAGES[api]
    messages = data.draw(st.lists(message, min_size=1, max_size=3))
    places = list(leaves(messages))
    assume(places)
    place = data.draw(st.sampled_from(places))
    assert canonical_bytes(api, {key: messages}) != canonical_bytes(api, {key: changed(messages, place)})


@given(of_a_role(CHAT))
def test_no_content_is_the_same_as_null(message: dict[str, Any]) -> None:
    absent = {key: value for key, value in message.items() if key != "content"}
    null = {**message, "content": None}
    assert canonical_bytes(Api.CHAT, {"messages": [absent]}) == canonical_bytes(Api.CHAT, {"messages": [null]})
