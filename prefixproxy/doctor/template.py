"""What a chat template does to prefixes: it prints the date, moves the tools, rewrites earlier turns.

The template is rendered by the server itself, which takes no slot: one user message, then the same conversation one
turn later, with the same tool. Whatever is not the same bytes up to the first user message costs every turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixproxy.doctor.findings import Finding, note, warning

TOOL_NAME = "prefixproxy_probe"
SYSTEM, FIRST, ANSWER, SECOND = "Be brief.", "First probe question?", "First probe answer.", "Second probe question?"
_DATES = re.compile(r"strftime_now|date_string|\bdatetime\b|currentDate|Today Date|Current date", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The same conversation after one user message and after the next; `with_tools` the two with a tool defined."""

    first: str
    second: str
    with_tools: tuple[str, str] | None = None


def bodies(*, tools: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two chat bodies to render."""
    turns = [("system", SYSTEM), ("user", FIRST), ("assistant", ANSWER), ("user", SECOND)]
    messages = [{"role": role, "content": text} for role, text in turns]
    defined = {"tools": [_TOOL]} if tools else {}
    return {"messages": messages[:2], **defined}, {"messages": messages, **defined}


def template_findings(template: str, rendered: Rendered | None, today: Sequence[str]) -> list[Finding]:
    """`today`: the day as a template may spell it, in several ways."""
    found = _dates(template, rendered, today)
    if rendered is None:
        return found
    if rendered.with_tools is not None:
        found += _tools(*rendered.with_tools)
    return found + _turns(rendered.first, rendered.second)


def _dates(template: str, rendered: Rendered | None, today: Sequence[str]) -> list[Finding]:
    shown = next((day for day in today if rendered is not None and day in rendered.first), None)
    written = _DATES.search(template)
    if shown is None and (written is None or rendered is not None):
        return []
    evidence = f"the rendered prompt contains {shown!r}" if shown else f"the template uses {written[0]!r}"  # type: ignore[index]
    return [
        warning(
            "template-date",
            evidence,
            "The date stands in front of everything: once a day, at the server's midnight, every root is evaluated "
            "again.",
            "--chat-template-file with that line taken out, or a fixed chat_template_kwargs.date_string where the "
            "template takes one",
        )
    ]


def _tools(first: str, second: str) -> list[Finding]:
    if TOOL_NAME not in first:
        return [
            note(
                "template-no-tools",
                "a tool that was defined is not in the rendered prompt",
                "The model never sees the tools, whatever the client sends.",
                "--chat-template-file with a template that renders tools",
            )
        ]
    if TOOL_NAME in second and second.index(TOOL_NAME) < second.index(FIRST):
        return []
    return [
        warning(
            "template-moves-tools",
            "with a second user message the tools stand behind the first one",
            "The definitions move with every turn, so the cached prefix ends where they stood and all of them are "
            "evaluated again.",
            "--chat-template-file with a template that renders tools in the system block",
        )
    ]


def _turns(first: str, second: str) -> list[Finding]:
    n_common = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
    if FIRST in first[:n_common] or FIRST not in first:
        return []
    return [
        warning(
            "template-rewrites-turns",
            f"two turns of one conversation part after {n_common} characters, before the end of the first user message",
            "Every turn evaluates the conversation again from there on.",
            "--chat-template-file with a template that leaves earlier turns as they were",
        )
    ]


_TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
