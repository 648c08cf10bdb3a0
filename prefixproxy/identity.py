"""Which conversation a client says a request belongs to, and side requests told by that. Hints: nothing relies on them.

Agents send no header for this proxy, but most send one for somebody: Claude Code, Codex, OpenCode and its forks, and
whoever sets OpenAI's cache key. Requests without a name, or with a name that several conversations share, are found by
their content as ever.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from prefixproxy.prompt import Prompt

HEADERS = (
    b"x-claude-code-agent-id",  # a sub-agent, whose session is its parent's
    b"x-claude-code-session-id",
    b"thread-id",  # Codex; a sub-agent has its own
    b"session-id",
    b"x-session-id",  # OpenCode, Kilo
    b"x-session-affinity",
)
"""The strongest first."""
MAX_NAME = 200
MAX_CONVERSATIONS = 4096
HEAD_CHARS = 256
_IN_USER_ID = re.compile(r"session_([0-9A-Za-z-]{8,64})|\"session_id\"\s*:\s*\"([0-9A-Za-z-]{8,64})\"")
_TITLE = "title-"
"""What Kilo puts before the session's name where it asks for a title."""


def conversation_of(headers: Mapping[bytes, str], body: Mapping[str, Any]) -> str:
    """The client's name for the conversation, "" if it gives none. `headers`: those of `HEADERS` that came."""
    for name in HEADERS:
        if stated := headers.get(name, "").strip():
            return stated[:MAX_NAME]
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if isinstance(user, str) and (found := _IN_USER_ID.search(user)):
        return found[1] or found[2]
    for key in ("prompt_cache_key", "conversation"):
        value = body.get(key)
        named = value.get("id") if isinstance(value, dict) else value
        if isinstance(named, str) and named:
            return named[:MAX_NAME]
    return ""


class NamedConversations:
    """The heads that named conversations were seen with while they had tools; the lately seen are kept."""

    def __init__(self, limit: int = MAX_CONVERSATIONS) -> None:
        self._limit = limit
        self._heads: OrderedDict[str, str] = OrderedDict()

    def is_beside(self, name: str, prompt: Prompt | None) -> bool:
        """Whether a request goes beside its conversation instead of on with it: it asks for a title, or it has no tools
        where the conversation has them, and another system text: a title, a summary, a compaction under other orders.
        A prompt with tools is remembered."""
        if name.startswith(_TITLE):
            return True
        if not name or prompt is None or prompt.raw:
            return False
        head = _head_of(prompt)
        if prompt.tools:
            self._heads[name] = head
            self._heads.move_to_end(name)
            if len(self._heads) > self._limit:
                self._heads.popitem(last=False)
            return False
        return self._heads.get(name, head) != head


def _head_of(prompt: Prompt) -> str:
    texts = (text.text for message in prompt.head for text in message.texts)
    return next(texts, "")[:HEAD_CHARS]
