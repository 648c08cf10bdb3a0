"""Chat prompts in a line, for the tests of the stabiliser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prefixproxy.body import Body
from prefixproxy.chat import MESSAGE, answer_message, canonical, parse_prompt
from prefixproxy.chat_parts import PART, message_bytes
from prefixproxy.prompt import Prompt, Role
from prefixproxy.types import Api

ROLES = {"u": "user", "a": "assistant", "t": "tool", "s": "system", "d": "developer"}


def body_of(head: str | list[str], turns: list[str | dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A chat body. A turn is "u:text", "a:text", "t:text", "s:text", or a whole message."""
    heads = [head] if isinstance(head, str) else head
    messages: list[dict[str, Any]] = [{"role": "system", "content": text} for text in heads]
    for turn in turns:
        if isinstance(turn, str):
            role, _, text = turn.partition(":")
            messages.append({"role": ROLES[role], "content": text})
        else:
            messages.append(turn)
    return {"model": "m", "messages": messages, **more}


def prompt_of(head: str | list[str], *turns: str | dict[str, Any], **more: Any) -> Prompt:
    return parsed(body_of(head, list(turns), **more))


def parsed(body: dict[str, Any], api: Api = Api.CHAT) -> Prompt:
    prompt = parse_prompt(api, Body.parse(json.dumps(body).encode()))
    assert prompt is not None
    return prompt


def texts(prompt: Prompt) -> list[str]:
    """The text of each message."""
    return ["\n".join(t.text for t in m.texts) for m in prompt.messages]


def head_text(prompt: Prompt) -> str:
    return "\n".join(t.text for m in prompt.head for t in m.texts)


def rendered(prompt: Prompt) -> bytes:
    return b"".join(canonical(prompt).parts)


def answer_bytes(answer: Mapping[str, Any]) -> bytes:
    """What an answer adds to the canonical bytes of its prompt, as long as the client sends it back as it was."""
    return MESSAGE + Role.ASSISTANT.value.encode() + PART + message_bytes(answer_message(answer))
