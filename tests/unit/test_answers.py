"""Tool-call arguments go back as they were produced, and only where id, name and value are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.answers import AnswerMemory, value_of
from prefixproxy.body import Body
from prefixproxy.chat import parse_prompt
from prefixproxy.prompt import Prompt, SetText
from prefixproxy.types import Api

PRODUCED = '{"path": "plan.py", "max_lines": 20}'


def prompt_of(arguments: str, ident: str = "call_9", name: str = "read") -> Prompt:
    call = {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = parse_prompt(Api.CHAT, Body.parse(json.dumps({"messages": [message]}).encode()))
    assert prompt is not None
    return prompt


def memory(*produced: str, max_calls: int = 10, max_bytes: int = 10_000) -> AnswerMemory:
    out = AnswerMemory(max_calls, max_bytes)
    for arguments in produced or (PRODUCED,):
        out.learn("call_9", "read", arguments)
    return out


@pytest.mark.parametrize(
    "spelled", ['{"max_lines":20,"path":"plan.py"}', '{"path": "\\u0070lan.py",\n"max_lines": 20}']
)
def test_the_produced_string_is_put_back(spelled: str) -> None:
    path = ("messages", 0, "tool_calls", 0, "function", "arguments")
    assert memory().apply(prompt_of(spelled)) == (SetText(path, PRODUCED),)


def test_an_exact_echo_needs_no_edit() -> None:
    assert memory().apply(prompt_of(PRODUCED)) == ()


@pytest.mark.parametrize(
    "other",
    [
        '{"path": "plan.py", "max_lines": 200}',
        '{"path": "plan.py", "max_lines": 20.0}',
        '{"path": "plan.py", "max_lines": true}',
        '{"path": "plan.py", "max_lines": 20, "max_lines": 20}',
        '{"path": "plan.py"}',
        '{"path": "plan.py", "max_lines": 20',
        "",
    ],
)
def test_other_values_are_another_clients(other: str) -> None:
    assert memory().apply(prompt_of(other)) == ()


def test_another_id_or_name_is_another_call() -> None:
    spelled = '{"max_lines":20,"path":"plan.py"}'
    assert memory().apply(prompt_of(spelled, ident="call_8")) == ()
    assert memory().apply(prompt_of(spelled, name="write")) == ()


@pytest.mark.parametrize("produced", ['{"a": 1, "a": 1}', '{"a": NaN}', '{"a": 1e999}', "not json", "[" * 5000])
def test_what_cannot_be_compared_is_not_remembered(produced: str) -> None:
    assert memory(produced).n_bytes == 0
    assert memory(produced).apply(prompt_of(produced)) == ()


def test_an_id_used_again_keeps_each_value_its_own_spelling() -> None:
    m = memory('{"a": 1}', '{"a":  2}')
    assert [e.text for e in map(_text_edit, m.apply(prompt_of('{"a":1}')))] == ['{"a": 1}']
    assert [e.text for e in map(_text_edit, m.apply(prompt_of('{"a":2}')))] == ['{"a":  2}']


def _text_edit(edit: Any) -> SetText:
    assert isinstance(edit, SetText)
    return edit


def test_the_newest_spelling_of_a_value_counts() -> None:
    m = memory('{"a": 1}', '{"a":  1}')
    assert [e.text for e in map(_text_edit, m.apply(prompt_of('{"a":1}')))] == ['{"a":  1}']


def test_the_least_recently_used_is_forgotten_first() -> None:
    m = memory('{"a": 1}', '{"a": 2}', max_calls=2)
    assert m.apply(prompt_of('{"a":1}'))
    m.learn("call_9", "read", '{"a": 3}')
    assert m.apply(prompt_of('{"a":2}')) == ()
    assert m.apply(prompt_of('{"a":1}'))
    assert len(m.export()) == 2


def test_bytes_are_bounded_and_counted_back() -> None:
    m = memory(*(json.dumps({"a": "é" * i}) for i in range(100)), max_calls=1000, max_bytes=3000)
    assert 2000 < m.n_bytes <= 3000
    tiny = memory(max_bytes=10)
    assert (tiny.n_bytes, tiny.export()) == (0, [])
    assert tiny.apply(prompt_of('{"max_lines":20,"path":"plan.py"}')) == ()


def test_what_was_exported_is_known_again() -> None:
    restarted = AnswerMemory(10, 10_000)
    restarted.load(json.loads(json.dumps(memory().export())))
    assert restarted.n_bytes == memory().n_bytes
    assert restarted.apply(prompt_of('{"max_lines":20,"path":"plan.py"}'))


@pytest.mark.parametrize("bad", [None, 1, ["a"], [["a", "b"]]])
def test_what_is_no_export_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="not an export"):
        AnswerMemory(10, 100).load(bad)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=2), v, max_size=3), max_leaves=8
)


def _typed(value: Any) -> Any:
    """The value with every type spelled out: 1, 1.0 and true stay apart where Python's own equality joins them."""
    if isinstance(value, dict):
        return {k: _typed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_typed(v) for v in value]
    return type(value).__name__, repr(value)


@given(VALUES, VALUES)
def test_digests_are_equal_exactly_where_typed_values_are(a: Any, b: Any) -> None:
    compact = json.dumps(a, separators=(",", ":"), sort_keys=True)
    assert value_of(json.dumps(a, ensure_ascii=False, indent=1)) == value_of(compact)
    assert (value_of(json.dumps(a)) == value_of(json.dumps(b))) == (_typed(a) == _typed(b))


@pytest.mark.parametrize("without", [{}, {"content": None}])
def test_also_where_the_message_has_no_content_or_none(without: dict[str, Any]) -> None:
    call = {
        "id": "call_9",
        "type": "function",
        "function": {"name": "read", "arguments": '{"max_lines":20,"path":"plan.py"}'},
    }
    message = {"role": "assistant", "tool_calls": [call], **without}
    prompt = parse_prompt(Api.CHAT, Body.parse(json.dumps({"messages": [message]}).encode()))
    assert prompt is not None
    path = ("messages", 0, "tool_calls", 0, "function", "arguments")
    assert memory().apply(prompt) == (SetText(path, PRODUCED),)
