"""Recognises side requests: titles, tags, follow-up questions, autocomplete that a client sends beside a conversation.

Only signs that no conversation bears: the endpoint for autocomplete, a client's own fixed opening words, or an answer
schema that asks for a title and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prefixproxy.types import Api

OPENINGS = (
    "### Task:",  # Open WebUI: titles, tags, follow-ups, queries, autocomplete (open-webui#6677)
    "You are a title generator",  # OpenCode and its forks
)
_MESSAGES_LOOKED_AT = 2
"""A side request is one instruction, with or without a system text."""


def is_side(api: Api, body: Mapping[str, Any]) -> bool:
    """Whether this body is a side request. Anything malformed is none."""
    if api is Api.INFILL:
        return True
    if body.get("tools"):
        return False
    return any(text.lstrip().startswith(OPENINGS) for text in _openings(body)) or _wants_a_title(body)


def _openings(body: Mapping[str, Any]) -> Iterator[str]:
    """The system text, and the user's if it is the only message besides."""
    if isinstance(system := body.get("system"), str):
        yield system
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    alone = len(messages) <= _MESSAGES_LOOKED_AT
    for message in messages[:_MESSAGES_LOOKED_AT]:
        if not isinstance(message, dict) or not (alone or message.get("role") in ("system", "developer")):
            continue
        content = message.get("content")
        if isinstance(content, list) and content and isinstance(content[0], dict):
            content = content[0].get("text")
        if isinstance(content, str):
            yield content


def _wants_a_title(body: Mapping[str, Any]) -> bool:
    """Claude Code (`output_config.format`), Codex (`text.format`) and the chat API's `response_format`."""
    for holder, key in (("output_config", "format"), ("text", "format"), ("response_format", "json_schema")):
        schema = _inner(_inner(body, holder), key)
        properties = _inner(_inner(schema, "schema"), "properties")
        if set(properties) == {"title"}:
            return True
    return False


def _inner(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}
