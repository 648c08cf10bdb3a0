"""For any JSON object in any spelling and any edits: splicing and editing the parsed view agree."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.body import Body, edited
from prefixproxy.prompt import AppendItem, Edit, Path, Remove, SetKey, SetText, SetValue

KEYS = st.sampled_from(["a", "b", "messages", "é", '"', "\\"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=8
)
OBJECTS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(KEYS, VALUES, max_size=4)
SPACE = st.sampled_from(["", " ", "\n", "\t ", "\r\n"])


def spelled(draw: st.DrawFn, value: Any) -> str:
    """The value as some client may have written it."""
    space = draw(SPACE)
    if isinstance(value, dict):
        members = [f"{space}{spelled(draw, k)}{space}:{space}{spelled(draw, v)}" for k, v in value.items()]
        twice = draw(st.booleans())
        if value and twice:
            key = draw(st.sampled_from(list(value)))
            members.insert(0, f"{json.dumps(key)}:{space}[0, 1.50]")
        return "{" + f"{space},".join(members) + space + "}"
    if isinstance(value, list):
        return "[" + ",".join(f"{space}{spelled(draw, v)}{space}" for v in value) + space + "]"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


def places(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(path, value)] + [place for key, v in inner for place in places(v, (*path, key))]


def edit_of(draw: st.DrawFn, path: Path, value: Any) -> Edit:
    kinds = ["value"] if path else []
    kinds += ["remove"] if path else []
    kinds += ["text"] if isinstance(value, str) else []
    kinds += ["key"] if isinstance(value, dict) else []
    kinds += ["item"] if isinstance(value, list) else []
    match draw(st.sampled_from(kinds)):
        case "remove":
            return Remove(path)
        case "text":
            return SetText(path, draw(st.text(st.characters(exclude_categories=()))))
        case "key":
            return SetKey(path, draw(KEYS), draw(VALUES))
        case "item":
            return AppendItem(path, draw(VALUES))
    return SetValue(path, draw(VALUES))


def overlaps(edit: Edit, other: Edit) -> bool:
    """No two edits of one body may touch the same place, or one what the other replaces."""
    a, b = sorted((edit, other), key=lambda e: len(e.path))
    if a.path != b.path[: len(a.path)]:
        return False
    if isinstance(a, SetKey):
        key = b.path[len(a.path)] if len(b.path) > len(a.path) else getattr(b, "key", None)
        return a.path == b.path or key == a.key
    return not (isinstance(a, AppendItem) and (len(b.path) > len(a.path) or isinstance(b, AppendItem)))


@st.composite
def bodies_and_edits(draw: st.DrawFn) -> tuple[bytes, dict[str, Any], list[Edit]]:
    data = draw(OBJECTS)
    raw = draw(SPACE) + spelled(draw, data) + draw(SPACE)
    edits: list[Edit] = []
    for _ in range(draw(st.integers(0, 6))):
        edit = edit_of(draw, *draw(st.sampled_from(places(data))))
        if not any(overlaps(edit, other) for other in edits):
            edits.append(edit)
    return raw.encode("utf-8", "surrogatepass"), data, edits


@given(bodies_and_edits())
def test_splicing_the_text_equals_editing_the_parsed_view(case: tuple[bytes, dict[str, Any], list[Edit]]) -> None:
    raw, data, edits = case
    body = Body.parse(raw)
    assert body.data == data
    want = edited(data, edits)
    assert Body.parse(body.render(edits)).data == want
    assert Body.parse(raw).data == data


@given(bodies_and_edits())
def test_bytes_outside_the_edited_places_are_kept(case: tuple[bytes, dict[str, Any], list[Edit]]) -> None:
    raw, _, edits = case
    replaced: list[Edit] = [e for e in edits if isinstance(e, SetText)]
    out = Body.parse(raw).render(replaced).decode("utf-8", "surrogatepass")
    undone: list[Edit] = [
        SetValue(e.path, raw=_spelling_at(raw.decode("utf-8", "surrogatepass"), e.path)) for e in replaced
    ]
    assert Body.parse(out.encode("utf-8", "surrogatepass")).render(undone) == raw


def _spelling_at(text: str, path: Path) -> bytes:
    """The client's spelling of the string at `path`, by marking it and looking where the texts part."""
    marked = Body.parse(text.encode("utf-8", "surrogatepass")).render([SetValue(path, raw=b"\x01")])
    start = marked.index(b"\x01")
    tail = len(marked) - start - 1
    raw = text.encode("utf-8", "surrogatepass")
    return raw[start : len(raw) - tail]
