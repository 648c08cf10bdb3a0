"""What strict templates refuse, folded into the neighbouring user turn: a system message behind the head, and a second
one within it.

Each goes where it stands already, so the order of all text stays: to the end of the user message before it, else to
the front of the one behind it; where there is neither, it becomes a user message. What is decided about a message
depends on its two neighbours only, so a conversation that goes on keeps its bytes. Prompts where there is nothing to
fold are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixproxy.body import Body
from prefixproxy.chat import parse_prompt
from prefixproxy.prompt import (
    HEAD_ROLES,
    AppendItem,
    Edit,
    Message,
    Path,
    Prompt,
    Remove,
    Role,
    SetKey,
    SetText,
    SetValue,
    Text,
)
from prefixproxy.types import Api

OPEN, CLOSE = "<system-reminder>", "</system-reminder>"
"""How agents mark what their program says in a user's turn; models know it."""
_GAP = "\n\n"
_APIS = frozenset({Api.CHAT, Api.MESSAGES, Api.RESPONSES, Api.OLLAMA_CHAT})


def folded(api: Api, body: Body) -> Body:
    """The body as a strict template takes it; `body` itself where there is nothing to fold or the shape is unknown."""
    prompt = parse_prompt(api, body) if api in _APIS else None
    edits = fold(prompt) if prompt is not None else ()
    return Body.parse(body.render(edits)) if edits else body


def fold(prompt: Prompt) -> tuple[Edit, ...]:
    """The edits that do it; none where every system message is the first of its prompt."""
    messages = prompt.messages
    extra = [i for i, message in enumerate(messages) if i and message.role in HEAD_ROLES and _foldable(message)]
    before: dict[int, list[str]] = {}
    behind: dict[int, list[str]] = {}
    edits: list[Edit] = []
    for i in extra:
        last = next((n for n in reversed(range(i)) if n not in extra), None)
        following = next((n for n in range(i + 1, len(messages)) if n not in extra), None)
        if last is not None and _takes_text(prompt, messages[last]):
            behind.setdefault(last, []).append(_marked(messages[i]))
        elif following is not None and _takes_text(prompt, messages[following]):
            # Anthropic's tool results stand first in their message
            ends = behind if messages[following].role is Role.TOOL else before
            ends.setdefault(following, []).append(_marked(messages[i]))
        else:
            edits += [SetKey(messages[i].path, "role", "user")]
            continue
        edits.append(Remove(messages[i].path))
    for n in sorted({*before, *behind}):
        edits.append(_with(prompt, messages[n], before.get(n, []), behind.get(n, [])))
    return tuple(edits)


def _foldable(message: Message) -> bool:
    """Only text is moved, and only a message of its own list."""
    return len(message.path) > 1 and message.form != "none" and len(message.texts) == len(message.parts)


def _takes_text(prompt: Prompt, message: Message) -> bool:
    """A user's message, also one that brings tool results, as Anthropic's do."""
    if message.role not in (Role.USER, Role.TOOL) or message.form == "none" or len(message.path) < 2:
        return False
    raw = _at(prompt, message.path)
    return isinstance(raw, dict) and raw.get("role") == "user"


def _at(prompt: Prompt, place: Path) -> Any:
    found: Any = prompt.data
    for step in place:
        found = found[step]
    return found


def _marked(message: Message) -> str:
    text = "\n".join(part.text for part in message.texts)
    return text if text.lstrip().startswith(OPEN) else f"{OPEN}\n{text}\n{CLOSE}"


def _with(prompt: Prompt, message: Message, before: Sequence[str], behind: Sequence[str]) -> Edit:
    """The user message with more text at its ends; its own parts keep their spelling wherever that can be."""
    place, first = message.content_path, message.parts[0] if message.parts else None
    if message.form == "string":
        text = message.texts[0].text if message.texts else ""
        return SetText(place, _GAP.join([*before, text, *behind]))
    if not before:
        return AppendItem(place, _part(message, behind))
    if not behind and isinstance(first, Text):
        return SetText(first.path, _GAP.join([*before, first.text]))
    return SetValue(place, [_part(message, before), *_at(prompt, place), *([_part(message, behind)] if behind else [])])


def _part(message: Message, texts: Sequence[str]) -> dict[str, str]:
    return {"type": message.part_type, "text": _GAP.join(texts)}
