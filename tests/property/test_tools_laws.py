"""For any tools, shuffled and respelled in any way: meaning is kept, and what was seen first is what is sent."""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import assume, given
from hypothesis import strategies as st

from prefixproxy.body import Body
from prefixproxy.chat import apply_edits, canonical, parse_prompt
from prefixproxy.prompt import Prompt
from prefixproxy.tool_order import refers_to_positions
from prefixproxy.tools import ToolMemory, meaning_of
from prefixproxy.types import Api

SCALARS = st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats(allow_nan=False) | st.text(max_size=4)
KEYS = st.sampled_from(["type", "properties", "required", "enum", "default", "items", "x"])
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.lists(st.sampled_from(["a", "b", "c"]), max_size=3),
    lambda s: st.lists(s, max_size=2) | st.dictionaries(KEYS, s, max_size=4),
    max_leaves=8,
)
TOOLS = st.lists(
    st.builds(lambda name, schema: {"name": name, "input_schema": schema}, st.sampled_from("abcdefg"), SCHEMAS),
    max_size=5,
    unique_by=lambda t: t["name"],
)


def prompt_of(tools: list[Any], text: str = "Help.") -> Prompt:
    messages = [{"role": "user", "content": text}]
    raw = json.dumps({"messages": messages, "tools": tools}).replace("Infinity", "1e999").encode()
    prompt = parse_prompt(Api.MESSAGES, Body.parse(raw))
    assert prompt is not None
    return prompt


def respelled(draw: st.DrawFn, value: Any, key: str = "") -> Any:
    """The same meaning with keys in another order, and `required` where it is a schema's."""
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        data = key in ("default", "enum")
        return {k: respelled(draw, value[k], "default" if data else k) for k in keys}
    if isinstance(value, list):
        strings = bool(value) and all(isinstance(v, str) for v in value)
        if key == "required" and strings:
            return draw(st.permutations(value))
        return [respelled(draw, v, "default" if key in ("default", "enum") else "") for v in value]
    return value


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """Two lists of the same tools; `properties` keeps its keys' contents, so no `required` below one is respelled."""
    tools = draw(TOOLS.filter(lambda ts: '"properties"' not in json.dumps(ts)))
    return tools, [respelled(draw, t) for t in draw(st.permutations(tools))]


@given(st.lists(TOOLS, max_size=5))
def test_meaning_is_kept_and_a_second_pass_changes_nothing(lists: list[list[Any]]) -> None:
    memory = ToolMemory(max_sets=3, max_bytes=2000)
    for tools in lists:
        prompt = prompt_of(tools)
        out = apply_edits(prompt, memory.apply(prompt))
        assert sorted(map(_spelled, out.tools)) == sorted(map(_spelled, prompt.tools))
        assert memory.n_bytes <= 2000
        assert memory.n_bytes == sum(
            [len(t[2].encode()) for t in memory.export()["tools"]]
            + [len(n) for _, order in memory.export()["orders"] for n in order]
        )
        if memory.n_bytes < 1500:
            assert memory.apply(out) == ()


def _spelled(tool: Any) -> str:
    """What a JSON reader makes of a tool, key order and `required` aside; independent of how meanings are digested."""
    return json.dumps(_sorted(tool.spec), sort_keys=True)


def _sorted(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _sorted(v, k) for k, v in value.items()}
    if isinstance(value, list):
        strings = key == "required" and all(isinstance(v, str) for v in value)
        return sorted(value) if strings else [_sorted(v) for v in value]
    return value


@given(shuffled())
def test_the_same_tools_in_any_spelling_and_order_are_sent_as_first_seen(case: tuple[list[Any], list[Any]]) -> None:
    first, again = case
    seen = prompt_of(first)
    assume(all(meaning_of(tool.spec) for tool in seen.tools))
    memory = ToolMemory(max_sets=4, max_bytes=1_000_000)
    assert memory.apply(seen) == ()
    restarted = ToolMemory(max_sets=4, max_bytes=1_000_000)
    restarted.load(orjson.loads(orjson.dumps(memory.export())))
    for m in (memory, restarted):
        prompt = prompt_of(again)
        assert canonical(apply_edits(prompt, m.apply(prompt))) == canonical(seen)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1), min_size=1, max_size=6))
def test_a_grown_set_starts_with_the_known_ones_and_a_shrunk_one_keeps_their_order(lists: list[list[str]]) -> None:
    memory = ToolMemory(max_sets=100, max_bytes=1_000_000)
    order: list[str] = []
    for added in lists:
        now = sorted({*order, *added}, reverse=len(order) % 2 == 0)
        prompt = prompt_of([{"name": n} for n in now])
        sent = [t.name for t in apply_edits(prompt, memory.apply(prompt)).tools]
        assert sent[: len(order)] == order
        order = sent
        fewer = prompt_of([{"name": n} for n in sorted(order)[1:]])
        if fewer.tools:
            kept = [t.name for t in apply_edits(fewer, memory.apply(fewer)).tools]
            assert sorted(kept) == sorted(order)[1:]


@given(
    st.lists(st.sampled_from(["tool ", "first ", " ", "the ", "#", "1 ", "order of ", "\n", "x", "in "]), max_size=40)
)
def test_no_text_makes_the_search_for_positions_miss_a_plain_reference(words: list[str]) -> None:
    text = "".join(words)
    assert refers_to_positions(prompt_of([], text + " the first tool " + text))
