"""Reads messages and their parts: what is text, and what is rendered though it is no plain text.

Only what llama-server's converters hand to a template counts (role, content, reasoning, tool calls, names and ids:
common_chat_msgs_parse_oaicompat), and it counts whatever else the message holds or lacks. What never reaches a template
and so leaves no mark: `UNRENDERED`; a message's `refusal`, `audio`, `annotations` and unknown keys; what stands beside
the text of a text part, beside a thought (its signature), beside id, name and arguments of a call, and beside id and
content of a result in a content list (`is_error`). What is unknown as a whole (a part, an item, a value of no sense) is
taken to be rendered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Literal

from prefixproxy.body import json_bytes
from prefixproxy.prompt import Message, Opaque, Path, Role, Text, Tool, ToolCall

FIELD = b"\xfd"
"""Stands between the fields of one opaque part. Bytes above 0xF7 occur in no UTF-8, so no text can imitate them."""
PART = b"\xfe"
"""Stands between the parts of one message, and behind its role."""

UNRENDERED = frozenset(
    {"cache_control", "strict", "index", "defer_loading", "allowed_callers", "eager_input_streaming"}
)
"""Keys of tools and content parts that steer a server and reach no template."""

TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
MEDIA_TYPES = frozenset(
    {"image_url", "input_image", "image", "input_audio", "audio", "audio_url", "video_url", "input_video", "video"}
    | {"input_file", "file", "document"}
)
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_CALL_KEYS = frozenset({"type", "id", "call_id", "status", "index", "name", "arguments"})
_CALL_TYPES = (None, "function", "function_call")
_ROLES = {role.value: role for role in Role} | {"function": Role.TOOL}

Part = Text | Opaque
Form = Literal["string", "parts", "none"]


class NotUnderstood(Exception):
    """The body has a shape that no API we know gives a meaning: it is forwarded as it is."""


def utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def rendered(value: dict[str, Any], *without: str) -> bytes:
    """A part's JSON less the keys that are never rendered."""
    if not UNRENDERED.isdisjoint(value) or not value.keys().isdisjoint(without):
        value = {k: v for k, v in value.items() if k not in UNRENDERED and k not in without}
    return json_bytes(value)


def role_of(raw: Any) -> Role:
    return _ROLES.get(raw, Role.OTHER) if isinstance(raw, str) else Role.OTHER


def _word(raw: Any) -> bytes:
    """An id or a name, as bytes; empty where there is none."""
    return utf8(raw) if isinstance(raw, str) else b"" if raw is None else json_bytes(raw)


class Reader:
    """Reads one body's messages; collects on the way what belongs to the whole prompt.

    `known` holds what was read before, by the id() of the parsed JSON it was read from, and is taken over where it
    still stands in the same place.
    """

    def __init__(self, known: Mapping[int, Message | Tool] = MappingProxyType({})) -> None:
        self.tool_calls: list[ToolCall] = []
        self.multimodal = False
        self._known = known

    def message(self, raw: Any, path: Path, part_type: str = "text") -> Message:
        """One message object of any API: labels, reasoning, content, tool calls, in the order they are rendered."""
        known = self._known.get(id(raw))
        if isinstance(known, Message) and known.path == path:
            return known
        if not isinstance(raw, dict):
            raise NotUnderstood(path)
        role = role_of(raw.get("role"))
        content_path = (*path, "content")
        content, form = self.content(raw.get("content"), content_path)
        if form == "parts" and role is Role.USER and _is_result(content):
            role = Role.TOOL
        if len(raw) > 2 or "content" not in raw or raw.get("role") != role.value:
            content = (*_labels(raw, role, path), *content, *self._calls(raw, path))
            content += self.images(raw.get("images"), (*path, "images"))
        return Message(role, path, content, form, content_path if form != "none" else (), part_type)

    def tool(self, spec: Any, path: Path) -> Tool:
        """One tool: with a `function` object as in chat, flat as in Responses and Messages, or of any other kind."""
        known = self._known.get(id(spec))
        if isinstance(known, Tool) and known.path == path:
            return known
        if not isinstance(spec, dict):
            return Tool(path, "", spec, json_bytes(spec))
        function = spec.get("function")
        inner = function if isinstance(function, dict) else spec
        shown = spec
        if inner is not spec and not UNRENDERED.isdisjoint(inner):
            shown = {**spec, "function": {k: v for k, v in inner.items() if k not in UNRENDERED}}
        name = inner.get("name")
        return Tool(path, name if isinstance(name, str) else "", spec, rendered(shown))

    def content(self, content: Any, path: Path) -> tuple[tuple[Part, ...], Form]:
        """What a message holds, and how; every element of a list gives at least one part."""
        if isinstance(content, str):
            return (Text(path, content),), "string"
        if isinstance(content, list):
            return tuple(self.part(part, (*path, i)) for i, part in enumerate(content)), "parts"
        if content is None:
            return (), "none"
        return (Opaque(path, b"other" + FIELD + json_bytes(content)),), "none"

    def part(self, part: Any, path: Path) -> Part:
        """One element of a content list. What is unknown is opaque, whole."""
        if isinstance(part, str):
            return Text(path, part)
        if not isinstance(part, dict):
            return Opaque(path, b"other" + FIELD + json_bytes(part))
        kind = part.get("type")
        kind = kind if isinstance(kind, str) else ""
        if kind in TEXT_TYPES and isinstance(part.get("text"), str):
            return Text((*path, "text"), part["text"])
        if kind in MEDIA_TYPES:
            return self.media(kind, rendered(part), path)
        if kind == "tool_use":
            fields = _word(part.get("id")), _word(part.get("name")), json_bytes(part.get("input"))
            return Opaque(path, FIELD.join((b"call", *fields)), "call")
        if kind == "tool_result":
            return self._result(part, path)
        if kind == "thinking" and isinstance(part.get("thinking"), str):
            return Opaque(path, reasoning_bytes(part["thinking"]), "reasoning")
        return Opaque(path, b"other" + FIELD + rendered(part))

    def media(self, kind: str, content: bytes, path: Path) -> Opaque:
        """An image or the like: its digest, as its own length says nothing about its tokens."""
        self.multimodal = True
        return Opaque(path, FIELD.join((b"media", utf8(kind), _digest(content))), "media")

    def tool_call(self, raw: Any, path: Path) -> Opaque:
        """One element of `tool_calls`, or a Responses `function_call` item."""
        if not isinstance(raw, dict):
            return Opaque(path, FIELD.join((b"call", b"", b"", json_bytes(raw))), "call")
        function, ident = raw.get("function", raw), raw.get("id" if raw.get("call_id") is None else "call_id")
        flat_but_more = function is raw and not (raw.keys() <= _CALL_KEYS and raw.get("type") in _CALL_TYPES)
        if not isinstance(function, dict) or "arguments" not in function or flat_but_more:
            what = rendered(raw, "id", "call_id", "status")
            return Opaque(path, FIELD.join((b"call", _word(ident), b"", what)), "call")
        arguments, name = function["arguments"], function.get("name")
        if isinstance(arguments, str) and isinstance(ident, str) and isinstance(name, str):
            inner = (*path, "function") if function is not raw else path
            self.tool_calls.append(ToolCall(ident, name, (*inner, "arguments"), arguments))
        spelled = utf8(arguments) if isinstance(arguments, str) else json_bytes(arguments)
        return Opaque(path, FIELD.join((b"call", _word(ident), _word(name), spelled)), "call")

    def _calls(self, raw: dict[str, Any], path: Path) -> tuple[Opaque, ...]:
        calls, legacy = raw.get("tool_calls"), raw.get("function_call")
        out = [self.tool_call(legacy, (*path, "function_call"))] if legacy is not None else []
        if isinstance(calls, list):
            out += [self.tool_call(call, (*path, "tool_calls", i)) for i, call in enumerate(calls)]
        elif calls is not None:
            out.append(Opaque((*path, "tool_calls"), b"other" + FIELD + json_bytes(calls)))
        return tuple(out)

    def _result(self, part: dict[str, Any], path: Path) -> Opaque:
        inner, _ = self.content(part.get("content"), (*path, "content"))
        text = PART.join(part_bytes(p) for p in inner)
        return Opaque(path, FIELD.join((b"result", _word(part.get("tool_use_id")), text)), "result")

    def images(self, images: Any, path: Path) -> tuple[Opaque, ...]:
        """Ollama's own list of images beside the text."""
        if not images:
            return ()
        if not isinstance(images, list):
            return (self.media("image", json_bytes(images), path),)
        return tuple(self.media("image", _word(image), (*path, i)) for i, image in enumerate(images))


def _is_result(content: tuple[Part, ...]) -> bool:
    """Whether a user message is nothing but tool results, as Anthropic's API sends them."""
    return bool(content) and all(isinstance(part, Opaque) and part.kind == "result" for part in content)


def _labels(raw: dict[str, Any], role: Role, path: Path) -> tuple[Opaque, ...]:
    """What templates print beside the content: an unknown role's word, whose result this is, names, reasoning."""
    out = []
    if role is Role.OTHER or raw.get("role") == "function":
        out.append(Opaque((*path, "role"), FIELD.join((b"label", b"role", _word(raw.get("role")))), "label"))
    out += [
        Opaque((*path, key), FIELD.join((b"label", key.encode(), _word(raw[key]))), "label")
        for key in ("tool_call_id", "name", "tool_name")
        if raw.get(key)
    ]
    thoughts = {raw[key]: key for key in reversed(REASONING_KEYS) if isinstance(raw.get(key), str) and raw[key]}
    out += [Opaque((*path, key), reasoning_bytes(text), "reasoning") for text, key in reversed(thoughts.items())]
    return tuple(out)


def reasoning_bytes(text: str) -> bytes:
    return b"reasoning" + FIELD + utf8(text)


def part_bytes(part: Part) -> bytes:
    return utf8(part.text) if isinstance(part, Text) else part.canonical


def message_bytes(message: Message) -> bytes:
    """The message's canonical bytes behind its role. An empty string is the same as no content at all."""
    parts = message.parts
    if len(parts) == 1:
        return part_bytes(parts[0])
    pieces = [part_bytes(part) for part in parts]
    return PART.join(pieces if message.form == "parts" else filter(None, pieces))


def placed_parts(message: Message) -> Iterator[tuple[int, bytes, Part]]:
    """The parts with their bytes, and where those begin in `message_bytes`."""
    start = 0
    for part in message.parts:
        piece = part_bytes(part)
        if piece or message.form == "parts":
            yield start, piece, part
            start += len(piece) + len(PART)


def before_byte(text: bytes, offset: int) -> str:
    """The whole characters in front of it."""
    while offset and text[offset] & 0xC0 == 0x80:
        offset -= 1
    return text[:offset].decode("utf-8", "surrogatepass")


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).hexdigest().encode()
