"""What the chat template of a llama-server makes of a prompt beside its messages, found by having it render some."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import TemplateFacts

Render = Callable[[Mapping[str, Any]], Awaitable[str]]
"""The prompt that the template makes of a chat body. UpstreamFailed: it refuses the body."""

_QUESTION = {"role": "user", "content": "the words of the user"}
_CHATS = ([_QUESTION], [{"role": "system", "content": "the words of the system"}, _QUESTION])
_TOOL = {
    "type": "function",
    "function": {
        "name": "prefixproxy_probe",
        "description": "Never called.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


async def template_facts(render: Render) -> TemplateFacts:
    """Raises what `render` raises for a chat that the user begins. A template that refuses tools, or a system text, is
    taken to render tools."""
    begun = await render({"messages": _CHATS[0]})
    return TemplateFacts(
        opening=begun[: max(0, begun.find(_QUESTION["content"]))],
        shows_tools=await _shows_tools(render),
    )


async def _shows_tools(render: Render) -> bool:
    """Whether a tool changes the prompt, with a system text or without: some templates define tools in only one."""
    try:
        for messages in _CHATS:
            plain = {"messages": messages}
            if await render(plain) != await render({**plain, "tools": [_TOOL]}):
                return True
    except UpstreamFailed:
        return True
    return False
