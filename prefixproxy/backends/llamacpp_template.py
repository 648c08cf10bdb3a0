"""What the chat template of a llama-server makes of a prompt beside its messages, found by having it render some."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import TemplateFacts

Render = Callable[[Mapping[str, Any]], Awaitable[str]]
"""The prompt that the template makes of a chat body. UpstreamFailed: it refuses the body."""

_QUESTION = {"role": "user", "content": "the words of the user"}
_CHATS = ([_QUESTION], [{"role": "system", "content": "the words of the system"}, _QUESTION])
_ANSWER = {"role": "assistant", "reasoning_content": "thoughts", "content": "the words of the assistant"}
_LAST_WORDS = "the last words of the user"
_TALK = [*_CHATS[1], _ANSWER, {"role": "user", "content": _LAST_WORDS}]
_SWITCHES = ("enable_thinking", "thinking")
"""What most templates that can think call it. Many of them heed it in what they write behind the last message alone."""
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TOOL = {
    "type": "function",
    "function": {
        "name": "prefixproxy_probe",
        "description": "Never called.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


async def template_facts(render: Render, source: str) -> TemplateFacts:
    """`source`: its text, "" if that is not known. Raises what `render` raises for a chat that the user begins. A
    template that refuses tools, or a system text, is taken to render tools."""
    names = frozenset(_NAME.findall(source)) or None
    begun = await render({"messages": _CHATS[0]})
    return TemplateFacts(
        opening=begun[: max(0, begun.find(_QUESTION["content"]))],
        shows_tools=await _shows_tools(render, begun),
        names=names,
        late=frozenset([name for name in _SWITCHES if name in (names or ()) and await _is_late(render, name)]),
    )


async def _shows_tools(render: Render, begun: str) -> bool:
    """Whether a tool changes the prompt, with a system text or without: some templates define tools in only one.
    `begun`: the chat that the user begins, rendered without."""
    alone, headed = _CHATS
    try:
        if begun != await render({"messages": alone, "tools": [_TOOL]}):
            return True
        return await render({"messages": headed}) != await render({"messages": headed, "tools": [_TOOL]})
    except UpstreamFailed:
        return True


async def _is_late(render: Render, switch: str) -> bool:
    """Whether a conversation is the same prompt up to its last words, with the switch on, off, or left alone."""
    try:
        prompts = [await render({"messages": _TALK})]
        prompts += [await render({"messages": _TALK, "chat_template_kwargs": {switch: on}}) for on in (True, False)]
    except UpstreamFailed:
        return False
    heads = {prompt.partition(_LAST_WORDS)[0] for prompt in prompts if _LAST_WORDS in prompt}
    return len(heads) == 1 and all(_LAST_WORDS in prompt for prompt in prompts)
