"""Tools are sent as first seen: bytes, order, grown and shrunk sets; nothing that differs in meaning is touched."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from prefixproxy.body import Body
from prefixproxy.chat import apply_edits, canonical, parse_prompt
from prefixproxy.prompt import Prompt
from prefixproxy.tool_order import refers_to_positions
from prefixproxy.tools import ToolMemory, meaning_of
from prefixproxy.types import Api


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def body_of(tools: list[Any], system: str = "Help.", user: str = "Go.", model: str = "m") -> Body:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return Body.parse(json.dumps({"model": model, "messages": messages, "tools": tools}).encode())


def prompt_of(tools: list[Any], **more: str) -> Prompt:
    prompt = parse_prompt(Api.CHAT, body_of(tools, **more))
    assert prompt is not None
    return prompt


def sent(memory: ToolMemory, tools: list[Any], key: bytes = b"", **more: str) -> list[Any]:
    """The tools as an upstream would read them, key order kept."""
    body = body_of(tools, **more)
    prompt = prompt_of(tools, **more)
    out = Body.parse(body.render(memory.apply(prompt, key))).data["tools"]
    assert isinstance(out, list)
    return out


def names(tools: list[Any]) -> str:
    return "".join(t["function"]["name"] for t in tools)


def memory() -> ToolMemory:
    return ToolMemory(max_sets=16, max_bytes=100_000)


def test_the_first_sight_of_a_set_changes_nothing() -> None:
    assert memory().apply(prompt_of([tool("b", enum=["low", "high"]), tool("a")])) == ()


@pytest.mark.parametrize(
    ("seen", "now", "want"),
    [
        (["abc"], "cab", "abc"),
        (["abc"], "xcab", "abcx"),
        (["abc"], "ca", "ac"),
        (["abc", "xbac"], "cxab", "abcx"),
        (["abcd"], "dbcx", "bcdx"),
        (["ba", "dcba"], "abcd", "badc"),
        (["abcdef"], "fzyx", "fzyx"),
        (["abc"], "xyz", "xyz"),
    ],
)
def test_known_tools_stand_first_and_in_their_order(seen: list[str], now: str, want: str) -> None:
    m = memory()
    for before in seen:
        sent(m, [tool(n) for n in before])
    assert names(sent(m, [tool(n) for n in now])) == want
    assert names(sent(m, [tool(n) for n in reversed(now)])) == want


def test_key_and_required_order_are_those_first_seen() -> None:
    m = memory()
    first = tool("a", properties={"x": {"type": "string"}, "y": {}}, required=["x", "y"])
    sent(m, [first])
    respelled = {
        "function": {
            "parameters": {"required": ["y", "x"], "properties": {"y": {}, "x": {"type": "string"}}, "type": "object"},
            "name": "a",
        },
        "type": "function",
    }
    assert json.dumps(sent(m, [respelled])) == json.dumps([first])


@pytest.mark.parametrize(
    "other",
    [
        tool("a", properties={"x": {"enum": ["high", "low"]}}),
        tool("a", properties={"x": {"enum": ["low", "high"]}}, additionalProperties=False),
        tool("a", properties={"x": {"enum": ["low", "high"], "default": 1.0}}),
        tool("a", properties={"x": {"enum": ["low", "high"], "default": True}}),
        tool("a", properties={"x": {"enum": ["low", "high"], "default": {"required": [2, 1]}}}),
        {**tool("a", properties={"x": {"enum": ["low", "high"]}}), "cache_control": {"type": "ephemeral"}},
    ],
)
def test_a_tool_that_differs_otherwise_goes_as_its_client_wrote_it(other: dict[str, Any]) -> None:
    m = memory()
    sent(m, [tool("a", properties={"x": {"enum": ["low", "high"]}})])
    sent(m, [tool("a", properties={"x": {"enum": ["low", "high"], "default": 1}})])
    sent(m, [tool("a", properties={"x": {"enum": ["low", "high"], "default": {"required": [1, 2]}}})])
    assert json.dumps(sent(m, [other])) == json.dumps([other])


def test_required_is_a_set_only_where_the_schema_means_it() -> None:
    data = tool("a", properties={"x": {"default": {"required": ["b", "a"]}}})
    swapped = tool("a", properties={"x": {"default": {"required": ["a", "b"]}}})
    assert meaning_of(data) != meaning_of(swapped)
    named_default = tool("a", properties={"default": {"required": ["b", "a"]}})
    swapped = tool("a", properties={"default": {"required": ["a", "b"]}})
    assert meaning_of(named_default) == meaning_of(swapped)


@pytest.mark.parametrize("number", ["18446744073709551616", "1e999", "-9223372036854775809"])
def test_tools_with_numbers_beyond_64_bits_are_left_alone(number: str) -> None:
    def body(names: str) -> Body:
        tools = ",".join('{"name":"%s","input_schema":{"default":%s}}' % (n, number) for n in names)  # noqa: UP031
        return Body.parse(b'{"messages":[],"tools":[%s]}' % tools.encode())

    m = memory()
    for order in ("ab", "ba"):
        prompt = parse_prompt(Api.MESSAGES, body(order))
        assert prompt is not None
        assert m.apply(prompt) == ()


def test_a_name_that_stands_twice_keeps_the_order() -> None:
    m = memory()
    sent(m, [tool("a"), tool("b")])
    assert names(sent(m, [tool("b"), tool("a"), tool("b")])) == "bab"
    assert names(sent(m, [tool("b"), tool("a")])) == "ab"


POSITIONS = [
    "Always try the first tool before the second.",
    "The tools are ordered by priority; try them in turn.",
    "Take the tool at index 0 for reading.",
    "Use the former tool rather than the latter.",
    "Read the tools from left to right.",
    "Use tool 1, then TOOL #2.",
    "If unsure, take the last of these tools.",
    "Prefer the tool listed first.",
    "Call the tools in the order given.",
    "Try tools in this order.",
    "The 2nd tool is slow.",
    "The order of the tools matters.",
    "Tool number two is best.",
    'Take "the very last tool" or (third tool).',
    "Of the tools, take the one at the top of the list.",
    "tool " * 6000,
    "Benutze das erste Werkzeug, ausser es scheitert.",
    "Rufe die Werkzeuge in dieser Reihenfolge auf.",
    "Nimm Werkzeug 2, wenn das 1. Werkzeug nichts findet.",
    "Nimm immer das letzte Tool.",
    "Utilise le premier outil de la liste.",
    "Les outils sont donnés par ordre de priorité.",
    "Usa la segunda herramienta si la primera falla.",
    "Usa il primo strumento.",
    "Use a última ferramenta.",
    "Gebruik het eerste hulpmiddel.",
    "Använd det första verktyget.",
    "Użyj pierwszego narzędzia.",
    "Сначала вызови первый инструмент.",
    "优先使用第一个工具。",
    "最初のツールを使ってください。",
    "첫 번째 도구를 사용하세요.",
    "استخدم الأداة الأولى: الأول هو أداة البحث",
    "Önce ilk araç denenir, sonra ikinci.",
]
NO_POSITIONS = [
    "You have the following tools.",
    "Your first tool call should read the file.",
    "First, use a tool. Then answer.",
    "The last tool result counts.",
    "Use the toolbox. The first drawer holds toolkits.",
    "Tools 'read' and 'write' exist in no particular place.",
    "First mytool, then retool 7.",
    "The top toolmaker of the 1st tooling order.",
    "Order tools from a shop.",
    "The first function of the module is slow.",
    "Du hast Werkzeuge. Benutze sie, wo es hilft. Nenne zuerst die Regel.",
    "Zweite Regel: antworte kurz.\nNutze die Werkzeuge sparsam.",
    "Die erste Funktion des Moduls ist langsam.",
    "Utilise les outils. La première règle vaut toujours.",
    "Use the tools at most 3 times, and the instruments never.",
    "请使用工具回答。第一条规则：简短。",
]


@pytest.mark.parametrize("text", POSITIONS)
@pytest.mark.parametrize("place", ["system", "user"])
def test_an_order_the_text_refers_to_is_left(text: str, place: str) -> None:
    m = memory()
    padding = "word " * 100
    system, user = (padding + text + padding, "Go.") if place == "system" else ("Help.", padding + text + padding)
    assert names(sent(m, [tool("a"), tool("b")], system=system, user=user)) == "ab"
    assert names(sent(m, [tool("b"), tool("a")], system=system, user=user)) == "ba"
    assert names(sent(m, [tool("b"), tool("a")])) == "ab"


@pytest.mark.parametrize("text", NO_POSITIONS)
def test_other_talk_of_tools_does_not_stop_the_ordering(text: str) -> None:
    assert not refers_to_positions(prompt_of([], user=text))


def test_tool_results_and_assistants_are_not_asked_for_positions() -> None:
    said = [{"role": role, "content": "the first tool"} for role in ("assistant", "tool")]
    prompt = parse_prompt(Api.CHAT, Body.parse(orjson.dumps({"messages": said})))
    assert prompt is not None
    assert not refers_to_positions(prompt)


def test_models_and_keys_do_not_learn_from_each_other() -> None:
    m = memory()
    sent(m, [tool("a"), tool("b")])
    assert names(sent(m, [tool("b"), tool("a")], model="other")) == "ba"
    assert names(sent(m, [tool("b"), tool("a")], key=b"head")) == "ba"
    assert names(sent(m, [tool("b"), tool("a")])) == "ab"


def test_memory_is_bounded_in_sets_and_bytes() -> None:
    m = ToolMemory(max_sets=2, max_bytes=1000)
    for i in range(50):
        sent(m, [tool(f"t{i}"), tool(f"u{i}", description="x" * 100)])
        assert m.n_bytes <= 1000
        assert len(m.export()["orders"]) <= 2
    assert names(sent(m, [tool("u49", description="x" * 100), tool("t49")])) == "t49u49"
    assert names(sent(m, [tool("u0", description="x" * 100), tool("t0")])) == "u0t0"
    huge = ToolMemory(max_sets=2, max_bytes=10)
    sent(huge, [tool("a"), tool("b")])
    assert huge.n_bytes <= 10


def test_what_was_exported_is_known_again() -> None:
    m = memory()
    sent(m, [tool("a", required=["x", "y"]), tool("b")])
    restarted = memory()
    restarted.load(json.loads(json.dumps(m.export())))
    assert restarted.n_bytes == m.n_bytes
    out = sent(restarted, [tool("b"), tool("a", required=["y", "x"])])
    assert json.dumps(out) == json.dumps([tool("a", required=["x", "y"]), tool("b")])


@pytest.mark.parametrize("bad", [None, [], {}, {"tools": [1], "orders": []}, {"tools": [["a", "b"]], "orders": []}])
def test_what_is_no_export_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="not an export"):
        memory().load(bad)


def test_lone_surrogates_and_odd_tools_survive_a_reordering() -> None:
    m = memory()
    tools: list[Any] = [{"name": "a", "description": "\ud800"}, "odd", {"type": "web_search"}]
    raw = json.dumps({"messages": [], "tools": tools}).encode()
    assert Body.parse(raw).data["tools"] == tools
    prompt = parse_prompt(Api.CHAT, Body.parse(raw))
    assert prompt is not None
    assert m.apply(prompt) == ()
    two = [tools[0], {"type": "web_search"}]
    sent_first = [prompt_for(two), prompt_for(two[::-1])]
    m.apply(sent_first[0])
    edited = apply_edits(sent_first[1], m.apply(sent_first[1]))
    assert canonical(edited) == canonical(sent_first[0])


def prompt_for(tools: list[Any]) -> Prompt:
    prompt = parse_prompt(Api.CHAT, Body.parse(json.dumps({"messages": [], "tools": tools}).encode()))
    assert prompt is not None
    return prompt


def test_two_thousand_shuffled_tools_come_back_in_order() -> None:
    m = memory()
    tools = [tool(f"t{i}") for i in range(2000)]
    m = ToolMemory(max_sets=16, max_bytes=1_000_000)
    sent(m, tools)
    assert sent(m, tools[::-1]) == tools
