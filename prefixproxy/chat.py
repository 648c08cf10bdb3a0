"""Bodies as prompts, and prompts as canonical bytes: what of a request decides where its KV prefix ends.

Canonical bytes are no template's output. They stand in its order (system text, tools, the rest of the head, the
messages), differ where it could differ, and agree where spelling has no meaning: string or one text part, null or
empty content, white space and escapes of the JSON, keys that are not rendered. Borders are bytes that UTF-8 has not,
so no text imitates one, and nothing earlier depends on what follows: a prompt that goes on keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from prefixproxy.body import Body, edited
from prefixproxy.chat_apis import read_prompt
from prefixproxy.chat_parts import (
    FIELD,
    PART,
    NotUnderstood,
    Part,
    Reader,
    before_byte,
    message_bytes,
    part_bytes,
    placed_parts,
)
from prefixproxy.prompt import AppendItem, Edit, Message, Opaque, Prompt, Role, SetText, Text
from prefixproxy.types import Api, TemplateFacts

MESSAGE = b"\xff"
"""Stands before the role of each message, and before the tools."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """A prompt's canonical bytes, one part for each segment. `head_bytes`: those of the head, tools included.

    `segments` are (label, start, end) in bytes: "system[0]", "tools", "user[3]"; the number is the message's own.
    `opening_bytes`: of the first one those that are the template's.
    """

    parts: tuple[bytes, ...]
    head_bytes: int
    segments: tuple[tuple[str, int, int], ...]
    opening_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        return self.segments[-1][2] if self.segments else 0

    def start_of(self, label: str) -> int:
        """Bytes in front of a segment."""
        return next(start for name, start, _ in self.segments if name == label)

    def locate(self, offset: int) -> tuple[str, int]:
        """The segment a byte belongs to, and its place there; "tail" behind the last one."""
        for label, start, end in self.segments:
            if start <= offset < end:
                return label, offset - start
        return "tail", offset - self.n_bytes


def parse_prompt(api: Api, body: Body) -> Prompt | None:
    """The body's prompt; None where the body has a shape that its API does not know. Never raises."""
    try:
        return read_prompt(api, body.data)
    except (NotUnderstood, RecursionError):
        return None


def apply_edits(prompt: Prompt, edits: Sequence[Edit]) -> Prompt:
    """The prompt of the body with the edits done, its paths numbered as in that new body.

    `prompt` must come from `parse_prompt`, and `edits` refer to its body. ValueError: the edits leave no prompt.
    """
    if not edits:
        return prompt
    if prompt.data is None:
        raise ValueError("the prompt was not read from a body")
    try:
        return read_prompt(prompt.api, edited(prompt.data, edits), prompt)
    except NotUnderstood as error:
        raise ValueError("the edits leave no prompt") from error


_ANY_TEMPLATE = TemplateFacts()


def canonical(prompt: Prompt, template: TemplateFacts = _ANY_TEMPLATE) -> Canonical:
    """The prompt's bytes in the order templates render them, without what this `template` does not render."""
    n_head = len(prompt.head)
    tools = prompt.tools if template.shows_tools else ()
    opening = b"" if tools else _opening_of(prompt, template)
    parts, segments = list[bytes](), list[tuple[str, int, int]]()
    end = head_bytes = 0

    def add(label: str, part: bytes) -> None:
        nonlocal end
        parts.append(part)
        segments.append((label, end, end + len(part)))
        end += len(part)

    def add_tools() -> None:
        if tools:
            add("tools", b"".join((MESSAGE, b"tools", *(PART + tool.canonical for tool in tools))))

    if not n_head:
        add_tools()
        head_bytes = end
    before: Role | None = None
    for i, message in enumerate(prompt.messages):
        role = "prompt" if prompt.raw else message.role.value
        begins = opening if i == 0 else b""
        joined = message.role is before is Role.ASSISTANT and prompt.api is Api.RESPONSES
        add(f"{role}[{i}]", begins + (b"" if joined else MESSAGE + role.encode()) + PART + message_bytes(message))
        before = message.role
        if i == 0 and n_head:
            add_tools()
        if i == n_head - 1:
            head_bytes = end
    return Canonical(tuple(parts), head_bytes, tuple(segments), len(opening))


def _opening_of(prompt: Prompt, template: TemplateFacts) -> bytes:
    """What the template puts in front of a prompt without tools that the user begins."""
    begun = not prompt.raw and not prompt.head and prompt.messages and prompt.messages[0].role is Role.USER
    return template.opening.encode("utf-8", "surrogatepass") if begun else b""


def cut_at(prompt: Prompt, form: Canonical, offset: int) -> tuple[dict[str, Any], int] | None:
    """A chat body that is rendered like the prompt up to this byte of its `form`, and unlike it from there on; and the
    bytes they share. Where no text stands there the prompt ends with the message before, as no template takes half a
    tool call. None where there is none, and for anything but a chat."""
    label, within = form.locate(offset)
    if prompt.api is not Api.CHAT or prompt.data is None or not label.endswith("]"):
        return None
    message = prompt.messages[int(label[label.index("[") + 1 : -1])]
    within -= len(MESSAGE + message.role.value.encode() + PART)
    if form.start_of(label) == 0:
        within -= form.opening_bytes
    for start, piece, part in placed_parts(message):
        if isinstance(part, Text) and start <= within < start + len(piece):
            kept = before_byte(piece, within - start)
            return edited(prompt.data, [SetText(part.path, kept + _unlike(part.text[len(kept) :]))]), offset
    before = prompt.data["messages"][: message.path[1]]
    return ({**prompt.data, "messages": before}, form.start_of(label)) if before else None


def _unlike(text: str) -> str:
    return "Z" if text.startswith("A") else "A"


def answer_message(answer: Mapping[str, Any]) -> Message:
    """An answer (an assistant message in the chat API's shape) as the message its client will send back."""
    return Reader().message({**answer, "role": "assistant"}, ())


def message_digest(message: Message) -> bytes:
    """16 bytes that stand for a message as its client sent it, to recognise conversations by.

    Two spellings of equal tool-call arguments are one message, and so are an assistant's text with and without white
    space at its ends, with and without its reasoning, and calls and results under whatever ids: clients change all of
    these when they go on.
    """
    state = blake2b(message.role.value.encode(), digest_size=16)
    for part in message.parts:
        if isinstance(part, Opaque) and part.kind == "reasoning":
            continue
        content = _identity(part, message.role)
        if content or message.form == "parts":
            state.update(PART + content)
    return state.digest()


def call_ids(message: Message) -> bytes:
    """The ids of a message's tool calls and of the calls it answers, as bytes; empty where it has none."""
    return FIELD.join(fields[_ID_FIELD[fields[0]]] for part in message.parts if (fields := _id_fields(part)))


_ID_FIELD = {b"call": 1, b"result": 1, b"label": 2}
"""Where an id stands among the fields of an opaque part's canonical bytes (see `chat_parts`)."""


def _id_fields(part: Part) -> list[bytes]:
    """The fields of a part that holds an id, else none."""
    if isinstance(part, Text) or part.kind not in ("call", "result", "label"):
        return []
    if part.kind == "label" and not part.canonical.startswith(b"label" + FIELD + b"tool_call_id" + FIELD):
        return []
    return part.canonical.split(FIELD, 3 if part.kind == "call" else 2)


def _identity(part: Part, role: Role) -> bytes:
    if isinstance(part, Text):
        return part_bytes(part).strip() if role is Role.ASSISTANT else part_bytes(part)
    fields = _id_fields(part)
    if not fields:
        return part.canonical
    del fields[_ID_FIELD[fields[0]]]
    if part.kind == "call":
        try:
            fields[-1] = orjson.dumps(orjson.loads(fields[-1]), option=orjson.OPT_SORT_KEYS)
        except (orjson.JSONDecodeError, orjson.JSONEncodeError):
            return FIELD.join(fields)
    return FIELD.join(fields)


def append_text(message: Message, text: str) -> Edit:
    """The edit that puts `text` behind all the message says: in its string, in its last part if that is text, else as
    one more part. ValueError where the message has no such place (form "none")."""
    place = message.content_path
    inside = [p for p in message.parts if p.path[: len(place)] == place]
    if message.form == "string" and isinstance(inside[0], Text):
        return SetText(place, inside[0].text + text)
    if message.form != "parts":
        raise ValueError(f"the message at {message.path} takes no text")
    if inside and isinstance(last := inside[-1], Text):
        return SetText(last.path, last.text + text)
    return AppendItem(place, {"type": message.part_type, "text": text})
