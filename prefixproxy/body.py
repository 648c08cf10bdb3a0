"""One request body: the client's own bytes, a parsed view of them, and edits spliced into the original text.

Nothing that no edit touches is ever spelled anew: integers beyond 64 bits, floats, escapes, duplicate keys,
white space and lone surrogates leave as they came. What counts as JSON is what llama-server's parser
(nlohmann::json) accepts, which is a little more than orjson: a byte order mark, and escapes of lone surrogates and
numbers beyond a double, which that server refuses in its own words. NaN and Infinity are no JSON to either. Zero bytes
behind the end, which it overlooks, are dropped. It reads any depth; this proxy about 1,000 levels (orjson 1,024, the
lenient reader as many as Python's stack has room for).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import orjson

from prefixproxy.errors import BadRequest
from prefixproxy.prompt import AppendItem, Edit, Path, Remove, SetKey, SetText, SetValue

_BOM = "\ufeff"
_SPACE = re.compile(r"[ \t\n\r]*")
_BYTE_SPACE = b" \t\n\r"
_MAX_INT_DIGITS = 400
"""A double ends at 10^308: longer integers are infinite to the server, and int() refuses those beyond 4300 digits."""


def _refuse(name: str) -> NoReturn:
    raise BadRequest(f"The body is not valid JSON: {name} is no JSON value", code="invalid_json")


def _read_int(digits: str) -> int | float:
    return int(digits) if len(digits) < _MAX_INT_DIGITS else float(digits)


_READER = json.JSONDecoder(parse_constant=_refuse, parse_int=_read_int)
_SKIMMER = json.JSONDecoder(parse_int=str, parse_float=str)
"""Finds the end of a value in C; its numbers stay text, as int() would refuse long ones."""
_DEEP = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]')


class Body:
    """One request body. `raw` is what the client sent, `data` the same parsed (of duplicate keys the last)."""

    __slots__ = ("__weakref__", "_text", "data", "raw")

    def __init__(self, raw: bytes, data: dict[str, Any]) -> None:
        self.raw = raw
        self.data = data
        self._text: str | None = None

    @classmethod
    def parse(cls, raw: bytes) -> Body:
        """Raises BadRequest `invalid_json` with one line that says where, also for a top level that is no object."""
        raw = raw.rstrip(b"\0")
        data = parse_json(raw)
        if not isinstance(data, dict):
            raise BadRequest("The body is not a JSON object", code="invalid_json")
        return cls(raw, data)

    def render(self, edits: Sequence[Edit]) -> bytes:
        """The body with the edits done; without edits the very bytes that came. LookupError: a path leads nowhere."""
        if not edits:
            return self.raw
        root = _tree(edits)
        if not root.children and not root.items and root.keys.keys().isdisjoint(self.data):
            return self._with_new_keys(root.keys)
        if self._text is None:
            self._text = self.raw.decode("utf-8", "surrogatepass")
        text, splices = self._text, list[_Splice]()
        _walk(text, _after_space(text, 1 if text.startswith(_BOM) else 0), root, splices)
        return _splice(text, splices).encode("utf-8", "surrogatepass")

    def member(self, key: str) -> bytes:
        """The value of a top-level key in the client's own bytes, of duplicate keys the last. KeyError: none."""
        text = self.raw.decode("utf-8", "surrogatepass")
        start = _after_space(text, 1 if text.startswith(_BOM) else 0)
        members, _ = _members(text, start, _Node(()), is_object=True)
        found = {member.key: member for member in members}[key]
        return text[found.value : found.end].encode("utf-8", "surrogatepass")

    def _with_new_keys(self, keys: dict[str, Any]) -> bytes:
        """Keys that were not there go behind the last member, which needs no walk through the body."""
        end = self.raw.rindex(b"}")
        members = self.raw[:end].rstrip(_BYTE_SPACE)
        new = ",".join(_member(key, value) for key, value in keys.items()).encode()
        return b"".join((members, b"," if self.data else b"", new, self.raw[len(members) :]))


def edited(data: dict[str, Any], edits: Sequence[Edit]) -> dict[str, Any]:
    """What `Body.render` would parse to; shares every part of `data` that no edit touches, and changes none of it."""
    out = _edited_value(data, _tree(edits)) if edits else data
    assert isinstance(out, dict)
    return out


def parse_json(raw: bytes) -> Any:
    """Any JSON value, read as a body is. Raises BadRequest `invalid_json` with one line that says where."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _parse_leniently(raw)


def json_bytes(value: Any) -> bytes:
    """Compact JSON of a parsed value, key order kept; lone surrogates become the three bytes UTF-8 would give."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _parse_leniently(raw: bytes) -> Any:
    try:
        return _READER.decode(raw.decode("utf-8", "surrogatepass").removeprefix(_BOM))
    except UnicodeDecodeError as error:
        why = f"is not valid UTF-8 (byte {error.start})"
    except json.JSONDecodeError as error:
        why = f"is not valid JSON (line {error.lineno}, column {error.colno}): {error.msg}"
    except RecursionError:
        why = "is nested deeper than this proxy reads (about 1,000 levels)"
    raise BadRequest(f"The body {why}", code="invalid_json")


@dataclass(slots=True)
class _Node:
    """The edits at one place of the body and below it."""

    path: Path
    children: dict[str | int, _Node] = field(default_factory=dict)
    put: SetText | SetValue | None = None
    removed: bool = False
    keys: dict[str, Any] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)

    def check(self, *, is_object: bool, found: set[str | int]) -> None:
        """Every edit must have met what it speaks of: a path that leads nowhere is a mistake of its maker."""
        if not found.issuperset(self.children) or (self.items if is_object else self.keys):
            raise LookupError(f"an edit at or below {self.path} meets nothing it fits")


def _tree(edits: Sequence[Edit]) -> _Node:
    root = _Node(())
    for edit in edits:
        node = root
        for step in edit.path:
            if step not in node.children:
                node.children[step] = _Node((*node.path, step))
            node = node.children[step]
        match edit:
            case SetText() | SetValue():
                node.put = edit
            case SetKey():
                node.keys[edit.key] = edit.value
            case Remove():
                node.removed = True
            case AppendItem():
                node.items.append(edit.value)
    return root


_Splice = tuple[int, int, str]
"""Where a stretch of the text starts and ends, and what takes its place."""


@dataclass(slots=True)
class _Member:
    """An element of a list, or a key with its value: `start` is the key's own start where there is one."""

    key: str | int
    start: int
    value: int
    end: int
    splices: list[_Splice]
    wrong: LookupError | None = None


def _walk(text: str, pos: int, node: _Node, out: list[_Splice]) -> int:
    """Collect the splices for the value at `pos`, and return its end."""
    if node.put is not None or node.removed:
        end = _end_of(text, pos)
        if node.put is not None:
            out.append((pos, end, _spelled(node.put)))
        return end
    opening = text[pos]
    if opening not in "{[":
        raise LookupError(f"the value at {node.path} is no object or list")
    members, end = _members(text, pos, node, is_object=opening == "{")
    # of duplicate keys the last one counts, so an earlier one's splices are dropped, and so is what is wrong with it
    last = {m.key: m for m in members}
    node.check(is_object=opening == "{", found=set(last))
    for member in last.values():
        if member.wrong is not None:
            raise member.wrong
        out.extend(member.splices)
    out.extend((last[k].value, last[k].end, json_text(v)) for k, v in node.keys.items() if k in last)
    new = [_member(k, v) for k, v in node.keys.items() if k not in last]
    new += [json_text(value) for value in node.items]
    removed = {key for key, child in node.children.items() if child.removed}
    if removed or new:
        out.extend(_cuts(members, removed, pos + 1, ",".join(new)))
    return end


def _members(text: str, pos: int, node: _Node, *, is_object: bool) -> tuple[list[_Member], int]:
    """Every member of the object or list at `pos`, descending only where an edit waits, and the end of it all."""
    members: list[_Member] = []
    pos = _after_space(text, pos + 1)
    while text[pos] not in "}]":
        start, key = pos, len(members)
        name: str | int = key
        if is_object:
            name, pos = _SKIMMER.raw_decode(text, pos)
            pos = _after_space(text, _after_space(text, pos) + 1)
        member = _Member(name, start, pos, pos, [])
        child = node.children.get(name)
        try:
            pos = _end_of(text, pos) if child is None else _walk(text, pos, child, member.splices)
        except LookupError as error:
            member.wrong, pos = error, _end_of(text, pos)
        member.end = pos
        members.append(member)
        pos = _after_space(text, pos)
        if text[pos] == ",":
            pos = _after_space(text, pos + 1)
    return members, pos + 1


def _cuts(members: list[_Member], removed: set[str | int], inside: int, new: str) -> list[_Splice]:
    """Take members out, each with one comma, and put `new` behind the last; `inside` is just behind the bracket."""
    out: list[_Splice] = []
    kept = False
    for i, member in enumerate(members):
        if member.key not in removed:
            kept = True
        elif kept:
            out.append((members[i - 1].end, member.end, ""))
        else:
            out.append((member.start, members[i + 1].start if i + 1 < len(members) else member.end, ""))
    if new:
        end = members[-1].end if members else inside
        out.append((end, end, "," + new if kept else new))
    return out


def _splice(text: str, splices: list[_Splice]) -> str:
    splices.sort(key=lambda s: s[0])
    pieces: list[str] = []
    pos = 0
    for start, end, new in splices:
        pieces += (text[pos:start], new)
        pos = end
    pieces.append(text[pos:])
    return "".join(pieces)


def _after_space(text: str, pos: int) -> int:
    if text[pos] in " \t\n\r":
        found = _SPACE.match(text, pos)
        assert found is not None
        return found.end()
    return pos


def _end_of(text: str, pos: int) -> int:
    """The end of the JSON value at `pos`."""
    try:
        return _SKIMMER.raw_decode(text, pos)[1]
    except RecursionError:  # deeper than the interpreter's own limit, which orjson does not share
        depth = 0
        for token in _DEEP.finditer(text, pos):
            depth += (token[0] in "[{") - (token[0] in "]}")
            if depth == 0:
                return token.end()
        raise


def _spelled(edit: SetText | SetValue) -> str:
    if isinstance(edit, SetText):
        return json_text(edit.text)
    return json_text(edit.value) if edit.raw is None else edit.raw.decode("utf-8", "surrogatepass")


def _member(key: str, value: Any) -> str:
    return f"{json_text(key)}:{json_text(value)}"


def json_text(value: Any) -> str:
    """A value as JSON that any parser takes: what is no valid Unicode is escaped."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return json.dumps(value, separators=(",", ":"))


def _edited_value(value: Any, node: _Node) -> Any:
    if isinstance(node.put, SetText):
        return node.put.text
    if node.put is not None:
        return node.put.value if node.put.raw is None else _parse_leniently(node.put.raw)
    is_object = isinstance(value, dict)
    if not is_object and not isinstance(value, list):
        raise LookupError(f"the value at {node.path} is no object or list")
    out = dict(value) if is_object else dict(enumerate(value))
    node.check(is_object=is_object, found=out.keys() & node.children.keys())
    for key, child in node.children.items():
        if child.removed:
            del out[key]
        else:
            out[key] = _edited_value(out[key], child)
    return {**out, **node.keys} if is_object else [*out.values(), *node.items]
