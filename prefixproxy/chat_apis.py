"""Where each API keeps its prompt: one reader per wire format, all giving the same `Prompt`.

A body whose prompt is not where its API puts it raises NotUnderstood.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefixproxy.body import json_bytes
from prefixproxy.chat_parts import FIELD, NotUnderstood, Part, Reader, reasoning_bytes, rendered, utf8
from prefixproxy.prompt import Message, Opaque, Path, Prompt, Role, Text, Tool
from prefixproxy.types import Api

_Data = dict[str, Any]
_OUTPUT_KEYS = frozenset({"type", "id", "call_id", "status", "output"})


def read_prompt(api: Api, data: _Data, known: Prompt | None = None) -> Prompt:
    """Raises NotUnderstood; RecursionError where a value is nested deeper than JSON can be written again.

    `known` is the prompt of an earlier view that `data` shares values with: what is the same is not read again.
    """
    reader = Reader(_by_identity(known)) if known is not None else Reader()
    messages, raw = _READERS[api](reader, data)
    tools, tools_path = _tools(reader, api, data)
    model = data.get("model")
    return Prompt(
        api=api,
        model=model if isinstance(model, str) else "",
        messages=tuple(messages),
        tools=tools,
        tools_path=tools_path,
        tool_calls=tuple(reader.tool_calls),
        raw=raw,
        multimodal=reader.multimodal,
        data=data,
    )


def _by_identity(prompt: Prompt) -> dict[int, Message | Tool]:
    """Messages and tools by the identity of their JSON; not those that a reader must collect something from."""
    data: Any = prompt.data
    known: dict[int, Message | Tool] = {}
    for message in prompt.messages:
        if len(message.path) == 2 and all(type(part) is Text for part in message.parts):
            known[id(data[message.path[0]][message.path[1]])] = message
    known.update((id(tool.spec), tool) for tool in prompt.tools)
    return known


def _tools(reader: Reader, api: Api, data: _Data) -> tuple[tuple[Tool, ...], Path]:
    if api in (Api.COMPLETION, Api.COMPLETIONS, Api.INFILL, Api.OLLAMA_GENERATE):
        return (), ()
    key = "tools" if data.get("tools") or api is not Api.CHAT or not data.get("functions") else "functions"
    specs = data.get(key)
    if specs is None:
        return (), ()
    if not isinstance(specs, list):
        raise NotUnderstood(key)
    return tuple(reader.tool(spec, (key, i)) for i, spec in enumerate(specs)), (key,)


def _chat(reader: Reader, data: _Data) -> tuple[list[Message], bool]:
    raw = data.get("messages")
    if not isinstance(raw, list):
        raise NotUnderstood("messages")
    return [reader.message(message, ("messages", i)) for i, message in enumerate(raw)], False


def _messages(reader: Reader, data: _Data) -> tuple[list[Message], bool]:
    """Anthropic: the system text has a place of its own, and comes first."""
    messages, _ = _chat(reader, data)
    return _bare(reader, data, "system", Role.SYSTEM) + messages, False


def _bare(reader: Reader, data: _Data, key: str, role: Role, part_type: str = "text") -> list[Message]:
    """A message whose text stands bare under a top-level key; none if it is empty."""
    value = data.get(key)
    if not value:
        return []
    if not isinstance(value, str | list):
        raise NotUnderstood(key)
    parts, form = reader.content(value, (key,))
    return [Message(role, (key,), parts, form, (key,), part_type)]


def _responses(reader: Reader, data: _Data) -> tuple[list[Message], bool]:
    if not isinstance(data.get("instructions") or "", str):
        raise NotUnderstood("instructions")
    messages, items = _bare(reader, data, "instructions", Role.SYSTEM, "input_text"), data.get("input")
    if isinstance(items, str):
        return messages + _bare(reader, data, "input", Role.USER, "input_text"), False
    if not isinstance(items, list | None):
        raise NotUnderstood("input")
    return messages + [_item(reader, item, ("input", i)) for i, item in enumerate(items or ())], False


def _item(reader: Reader, item: Any, path: Path) -> Message:
    """One element of a Responses input: a message, or a call, a result or a thought, which stand by themselves."""
    if not isinstance(item, dict):
        raise NotUnderstood(path)
    kind = item.get("type")
    kind = kind if isinstance(kind, str) else ""
    if "role" in item and kind != "reasoning" and not kind.endswith(("_call", "_output")):
        return reader.message(item, path, "output_text" if item["role"] == "assistant" else "input_text")
    if kind.endswith("_output"):
        parts, form = reader.content(item.get("output"), (*path, "output"))
        ident = item.get("call_id")
        label = Opaque((*path, "call_id"), FIELD.join((b"label", b"tool_call_id", utf8(str(ident or "")))), "label")
        parts = (label, *_beside(item, path), *parts)
        return Message(Role.TOOL, path, parts, form, (*path, "output") if form != "none" else (), "input_text")
    if kind.endswith("_call"):
        return Message(Role.ASSISTANT, path, (reader.tool_call(item, path),), "none")
    if kind == "reasoning":
        return Message(Role.ASSISTANT, path, (_thought(item, path),), "none")
    # only a reference says all it says by its id
    unsaid = ("status",) if kind in ("", "item_reference") else ("id", "status")
    other = Opaque(path, FIELD.join((b"other", utf8(kind), rendered(item, *unsaid))))
    return Message(Role.OTHER, path, (other,), "none")


def _beside(item: _Data, path: Path) -> tuple[Opaque, ...]:
    """What an output item of an unusual kind tells beside its output."""
    more = {key: value for key, value in item.items() if key not in _OUTPUT_KEYS}
    return (Opaque(path, b"other" + FIELD + rendered(more)),) if more else ()


def _thought(item: _Data, path: Path) -> Opaque:
    """A reasoning item: its text, what stands for it where the client was not shown it, or its summary. The first of
    these that it has counts, the others say the same again."""
    for key in ("content", "encrypted_content", "summary"):
        value = item.get(key)
        if isinstance(value, list):
            value = "\n".join(p["text"] for p in value if isinstance(p, dict) and isinstance(p.get("text"), str))
        if isinstance(value, str) and value:
            return Opaque(path, reasoning_bytes(value), "reasoning")
    return Opaque(path, reasoning_bytes(""), "reasoning")


def _generate(reader: Reader, data: _Data) -> tuple[list[Message], bool]:
    """Ollama /api/generate: system text, the tokens of an earlier answer, the prompt, its images."""
    if any(not isinstance(data.get(key) or "", str) for key in ("system", "prompt", "suffix")):
        raise NotUnderstood("system, prompt or suffix")
    prompt = data.get("prompt") or ""
    parts: list[Part] = []
    if data.get("context"):
        parts.append(Opaque(("context",), b"other" + FIELD + json_bytes(data["context"])))
    if prompt:
        parts.append(Text(("prompt",), prompt))
    if data.get("suffix"):
        parts.append(Opaque(("suffix",), b"other" + FIELD + utf8(data["suffix"])))
    parts += reader.images(data.get("images"), ("images",))
    if data.get("raw") is True:
        return [Message(Role.OTHER, ("prompt",), tuple(parts), "none")] if parts else [], True
    user = Message(Role.USER, ("prompt",), tuple(parts), "string" if prompt else "none", ("prompt",) if prompt else ())
    return _bare(reader, data, "system", Role.SYSTEM) + ([user] if parts else []), False


def _completion(reader: Reader, data: _Data) -> tuple[list[Message], bool]:
    """One text, several (each a prompt of its own), tokens, or text with media (server-common.cpp tokenize_input)."""
    if data.get("prompt") is None:
        raise NotUnderstood("prompt")
    return _raw(reader, data["prompt"], ("prompt",)), True


def _raw(reader: Reader, prompt: Any, path: Path) -> list[Message]:
    if isinstance(prompt, str):
        return [Message(Role.OTHER, path, (Text(path, prompt),), "string", path)]
    if isinstance(prompt, list) and prompt and all(isinstance(p, str) for p in prompt):
        return [message for i, p in enumerate(prompt) for message in _raw(reader, p, (*path, i))]
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_string"), str):
        text = Text((*path, "prompt_string"), prompt["prompt_string"])
        media = reader.images(prompt.get("multimodal_data"), (*path, "multimodal_data"))
        return [Message(Role.OTHER, path, (text, *media), "none")]
    if isinstance(prompt, list | dict):
        return [Message(Role.OTHER, path, (Opaque(path, b"other" + FIELD + json_bytes(prompt)),), "none")]
    raise NotUnderstood(path)


def _infill(reader: Reader, data: _Data) -> tuple[list[Message], bool]:
    """Extra files, then the text before the gap with the prompt behind it, then the text after it
    (server-common.cpp format_prompt_infill)."""
    out: list[Message] = []
    for key in ("input_extra", "input_prefix", "prompt", "input_suffix"):
        value = data.get(key)
        if value and key == "input_extra":
            out.append(Message(Role.OTHER, (key,), (Opaque((key,), b"other" + FIELD + json_bytes(value)),), "none"))
        elif value:
            out += _raw(reader, value, (key,))
    return out, True


_READERS: dict[Api, Callable[[Reader, _Data], tuple[list[Message], bool]]] = {
    Api.CHAT: _chat,
    Api.COMPLETIONS: _completion,
    Api.COMPLETION: _completion,
    Api.INFILL: _infill,
    Api.RESPONSES: _responses,
    Api.MESSAGES: _messages,
    Api.OLLAMA_CHAT: _chat,
    Api.OLLAMA_GENERATE: _generate,
}
