"""A prompt, whatever API it was written for: messages and tools that remember where they sit in the body.

`chat` makes these from a body; `stabilise` answers with edits; `body` writes the edits back to exactly those places.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from prefixproxy.types import Api

Path = tuple[str | int, ...]
"""Keys and list positions from the top of the body, in the client's own numbering: ("messages", 0, "content")."""


class Role(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    OTHER = "other"


def holds_tokens(prompt: object) -> bool:
    """Whether a raw `prompt` is one of tokens, or of tokens and texts: one number makes a list that
    (server-common.cpp, tokenize_input_prompts)."""
    return isinstance(prompt, list) and any(isinstance(item, int) and not isinstance(item, bool) for item in prompt)


HEAD_ROLES = frozenset({Role.SYSTEM, Role.DEVELOPER})


@dataclass(frozen=True, slots=True)
class Text:
    """One string of prompt text; `path` is the place of that JSON string in the body."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """Anything in a message that is rendered but is no plain text (image, tool call, reasoning, tool call id):
    `canonical` is the same bytes for the same meaning, key order of objects kept. `kind` says which it is."""

    path: Path
    canonical: bytes
    kind: Literal["media", "call", "result", "reasoning", "label", "other"] = "other"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `path` is the message object's place, or that of the string itself where the API carries the
    text bare (Anthropic `system` string, Responses `instructions` and string `input`, a raw `prompt`).

    `form`: "string" (content is one string), "parts" (a list; `content_path` is the list), "none" (null, absent or
    of a kind we do not know: never edited). `part_type` is the `type` a new text part needs in this API and role.
    """

    role: Role
    path: Path
    parts: tuple[Text | Opaque, ...]
    form: Literal["string", "parts", "none"]
    content_path: Path = ()
    part_type: str = "text"

    @property
    def texts(self) -> tuple[Text, ...]:
        return tuple(part for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool definition. `spec` is the parsed JSON (key order kept); `name` is "" where it has none; `canonical` is
    the JSON of what of it can be rendered."""

    path: Path
    name: str
    spec: Any
    canonical: bytes = b""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call in an assistant message. `arguments_path` leads to the arguments' JSON string; `arguments` is that
    string. APIs that carry arguments as an object have no ToolCall: their spelling is not the client's to keep."""

    id: str
    name: str
    arguments_path: Path
    arguments: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """The whole prompt in reading order. `tools_path` is the place of the tool list, () if there is none.

    `raw` marks a completion without roles: no head, nothing to cut, no note. `data` is the parsed body it was read
    from, which `chat.apply_edits` needs; it takes no part in comparisons.
    """

    api: Api
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tools_path: Path = ()
    tool_calls: tuple[ToolCall, ...] = ()
    raw: bool = False
    multimodal: bool = False
    data: dict[str, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def head(self) -> tuple[Message, ...]:
        """The leading system and developer messages: the only text that is ever cut."""
        if self.raw:
            return ()
        cut = next((i for i, m in enumerate(self.messages) if m.role not in HEAD_ROLES), len(self.messages))
        return self.messages[:cut]


@dataclass(frozen=True, slots=True)
class SetText:
    """Put `text` in place of the JSON string at `path`."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class SetValue:
    """Put `value` in place of the JSON value at `path`; `raw` is its exact JSON spelling where that matters."""

    path: Path
    value: Any = None
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class SetKey:
    """Set `key` of the object at `path`: in place if it is there (the last one, if twice), else behind the others."""

    path: Path
    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Remove:
    """Take the list element (or object key) at `path` out, with its comma."""

    path: Path


@dataclass(frozen=True, slots=True)
class AppendItem:
    """Add `value` behind the last element of the list at `path`."""

    path: Path
    value: Any


Edit = SetText | SetValue | SetKey | Remove | AppendItem
"""Edits of one body refer to the body as the client sent it, never to each other's results; no two overlap."""
