"""What a plan tells the scheduler of where its prompt can be cut, where the server takes checkpoints, and its form."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from prefixproxy.answers import AnswerMemory
from prefixproxy.body import Body
from prefixproxy.plan import Plan, Planner
from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.tools import ToolMemory
from prefixproxy.types import Api, Form, TemplateFacts
from prefixproxy.volatile.files import load_rules

CALL = {"id": "1", "type": "function", "function": {"name": "write", "arguments": '{"text": "long"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "rules"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "done"},
    {"role": "user", "content": "last"},
]


def planned(messages: list[dict[str, Any]], opening: str = "", **more: Any) -> Plan:
    return planned_by(TemplateFacts(opening), messages, **more)


def planned_by(template: TemplateFacts, messages: list[dict[str, Any]], **more: Any) -> Plan:
    return planner(template).plan(Api.CHAT, body_of({"messages": messages, **more}), "r", 0.0)


def planner(template: TemplateFacts) -> Planner:
    memories = ToolMemory(99, 1 << 20), AnswerMemory(99, 1 << 20)
    return Planner(Stabiliser(load_rules()), *memories, "off", template_of=lambda model: template)


def body_of(data: dict[str, Any]) -> Body:
    return Body(orjson.dumps(data), data)


def place_of(plan: Plan, label: str) -> tuple[int, int]:
    assert plan.canonical is not None
    return next((start, end) for name, start, end in plan.canonical.segments if name == label)


def test_checkpoints_are_at_the_first_and_the_last_user_message() -> None:
    plan = planned(CHAT)
    where = [plan.chain.ends[digest] for digest in plan.starts]
    assert where == [place_of(plan, "user[1]")[0], place_of(plan, "user[4]")[0]]
    assert len(planned(CHAT[:2]).starts) == 1
    assert planned(CHAT[:1]).starts == ()


def test_messages_that_are_no_text_alone_cannot_be_cut() -> None:
    plan = planned(CHAT)
    assert place_of(plan, "assistant[2]") in plan.solid
    assert not {place_of(plan, "user[1]"), place_of(plan, "user[4]")} & set(plan.solid)


def test_the_next_turn_is_known_by_the_end_of_a_message() -> None:
    assert planned(CHAT).chain.goes_on(planned(CHAT[:4]).chain)
    assert not planned(CHAT).chain.goes_on(planned([*CHAT[:4], {"role": "user", "content": "else"}]).chain)


def test_two_prompts_that_the_user_begins_share_what_the_template_opens_them_with() -> None:
    """A default system text and the like: of the words of the two nothing is the same."""
    one, other = ([{"role": "user", "content": text}] for text in ("first", "second"))
    assert planned(one).chain.common_blocks(planned(other).chain) == 0
    opening = "You are a helpful assistant. " * 5
    assert planned(one, opening).chain.common_blocks(planned(other, opening).chain) == len(opening) // 64
    assert planned(one, opening).chain.common_blocks(planned(CHAT, opening).chain) == 0
    assert planned([*one, *CHAT[2:]], opening).chain.goes_on(planned(one, opening).chain)


@pytest.mark.parametrize(
    ("switches", "apart"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, True),
        ({"chat_template_kwargs": {"unheard_of": 1}}, False),
        ({"chat_template_kwargs": {"date_string": "30 Nov 2026", "unheard_of": 1}}, True),
        ({"chat_template_kwargs": "?"}, True),
        ({"reasoning_effort": "low"}, False),
    ],
)
def test_switches_that_the_template_does_not_heed_keep_no_prompts_apart(
    switches: dict[str, Any], *, apart: bool
) -> None:
    known = TemplateFacts(names=frozenset({"enable_thinking", "date_string"}), late=frozenset({"enable_thinking"}))
    switched, plain = planned_by(known, CHAT, **switches), planned_by(known, CHAT)
    assert (switched.chain != plain.chain) is apart
    assert planned(CHAT, **switches).chain != planned(CHAT).chain, "of an unknown template any switch may be heeded"


@pytest.mark.parametrize(
    ("prompt", "form"),
    [
        ("<|im_start|>system\nrules<|im_end|>", Form.RENDERED),
        ("once upon a time", Form.TEXT),
        ([1, 2, 3], Form.TOKENS),
        (["<|im_start|>", 2], Form.TOKENS),
        (["one", "two"], Form.TEXT),
    ],
)
def test_a_prompt_without_roles_may_be_a_rendered_chat_or_tokens(prompt: Any, form: Form) -> None:
    template = TemplateFacts("<|im_start|>user\n")
    plan = planned_by(template, CHAT)
    assert plan.form is Form.CHAT
    assert planner(template).plan(Api.COMPLETION, body_of({"prompt": prompt}), "r", 0.0).form is form
    unknown = planner(TemplateFacts()).plan(Api.COMPLETION, body_of({"prompt": prompt}), "r", 0.0).form
    assert unknown is (Form.TEXT if form is Form.RENDERED else form)
