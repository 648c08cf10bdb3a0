"""What is found out about chat templates by having them render some chats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from prefixproxy.backends.llamacpp_template import template_facts
from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import TemplateFacts

Template = Callable[[Mapping[str, Any]], str]
SOURCE = "{% if enable_thinking is false %}...{{ messages }}{% endif %}"
NAMES = frozenset({"if", "enable_thinking", "is", "false", "messages", "endif"})


def plain(body: Mapping[str, Any]) -> str:
    return "".join(f"<{message['role']}>{message['content']}" for message in body["messages"]) + "<assistant>"


def kwargs(body: Mapping[str, Any]) -> Mapping[str, Any]:
    given: Mapping[str, Any] = body.get("chat_template_kwargs", {})
    return given


def thinks_at_the_end(body: Mapping[str, Any]) -> str:
    return plain(body) + ("" if kwargs(body).get("enable_thinking", True) else "<think></think>")


def thinks_in_front(body: Mapping[str, Any]) -> str:
    return ("/think" if kwargs(body).get("enable_thinking", True) else "/no_think") + plain(body)


def keeps_thoughts(body: Mapping[str, Any]) -> str:
    thoughts = "".join(message.get("reasoning_content", "") for message in body["messages"])
    return (thoughts if kwargs(body).get("enable_thinking") else "") + plain(body)


def with_tools(body: Mapping[str, Any]) -> str:
    return "".join(str(tool) for tool in body.get("tools", ())) + plain(body)


def tools_behind_a_system_text(body: Mapping[str, Any]) -> str:
    return with_tools(body) if body["messages"][0]["role"] == "system" else plain(body)


def refusing(what: str, otherwise: Template = plain) -> Template:
    def render(body: Mapping[str, Any]) -> str:
        if what in body or what in {message["role"] for message in body["messages"]}:
            raise UpstreamFailed(f"no {what}")
        return otherwise(body)

    return render


def found(template: Template, source: str = "") -> TemplateFacts:
    async def render(body: Mapping[str, Any]) -> str:
        return template(body)

    return asyncio.run(template_facts(render, source))


@pytest.mark.parametrize(
    ("template", "shows_tools"),
    [
        (plain, False),
        (with_tools, True),
        (tools_behind_a_system_text, True),
        (refusing("system"), True),
        (refusing("tools"), True),
    ],
)
def test_tools_are_rendered_if_a_tool_changes_a_prompt_or_is_refused(template: Template, *, shows_tools: bool) -> None:
    assert found(template) == TemplateFacts(opening="<user>", shows_tools=shows_tools)


def test_a_template_that_refuses_a_chat_of_the_user_alone_tells_nothing() -> None:
    with pytest.raises(UpstreamFailed, match="no user"):
        found(refusing("user"))


@pytest.mark.parametrize(
    ("template", "late"),
    [
        (plain, True),
        (thinks_at_the_end, True),
        (thinks_in_front, False),
        (keeps_thoughts, False),
        (refusing("chat_template_kwargs"), False),
        (lambda body: "always the same", False),
    ],
)
def test_a_switch_is_late_if_it_changes_nothing_before_the_last_words(template: Template, *, late: bool) -> None:
    facts = found(template, SOURCE)
    assert facts.names == NAMES
    assert facts.late == ({"enable_thinking"} if late else set())


@pytest.mark.parametrize(
    ("facts", "heeds"),
    [
        (TemplateFacts(), [True, True, True]),
        (TemplateFacts(names=NAMES), [True, True, False]),
        (TemplateFacts(names=NAMES, late=frozenset({"enable_thinking"})), [False, True, False]),
    ],
)
def test_of_a_template_that_is_known_only_some_switches_are_heeded(facts: TemplateFacts, heeds: list[bool]) -> None:
    switches = [("enable_thinking", True), ("enable_thinking", "yes"), ("reasoning_effort", "low")]
    assert [facts.heeds(*switch) for switch in switches] == heeds
