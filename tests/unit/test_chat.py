"""Every API's body becomes the same kind of prompt, and spelling without meaning leaves no mark in its bytes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from prompting import answer_bytes

from prefixproxy.body import Body
from prefixproxy.chat import (
    append_text,
    apply_edits,
    call_ids,
    canonical,
    cut_at,
    message_digest,
    parse_prompt,
)
from prefixproxy.prompt import AppendItem, Edit, Message, Opaque, Prompt, Remove, Role, SetText, SetValue, Text
from prefixproxy.types import Api, TemplateFacts

TOOL = {"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}}


def prompt_of(data: dict[str, Any], api: Api = Api.CHAT) -> Prompt:
    prompt = parse_prompt(api, Body.parse(orjson.dumps(data)))
    assert prompt is not None
    return prompt


def chat(*messages: dict[str, Any], **more: Any) -> Prompt:
    return prompt_of({"messages": list(messages), **more})


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def canon(prompt: Prompt) -> bytes:
    return b"".join(canonical(prompt).parts)


def texts(prompt: Prompt) -> list[tuple[str, str]]:
    return [(m.role.value, text.text) for m in prompt.messages for text in m.texts]


def test_a_chat_message_remembers_where_each_text_stands() -> None:
    prompt = chat(said("developer", "Be brief."), said("user", [{"type": "text", "text": "Hi"}]), model="m")
    assert prompt.model == "m"
    assert prompt.messages == (
        Message(
            Role.DEVELOPER,
            ("messages", 0),
            (Text(("messages", 0, "content"), "Be brief."),),
            "string",
            ("messages", 0, "content"),
        ),
        Message(
            Role.USER,
            ("messages", 1),
            (Text(("messages", 1, "content", 0, "text"), "Hi"),),
            "parts",
            ("messages", 1, "content"),
        ),
    )
    assert [m.role for m in prompt.head] == [Role.DEVELOPER]


def test_tool_calls_keep_the_place_of_their_arguments() -> None:
    prompt = chat(said("user", "Go"), said("assistant", None, tool_calls=[CALL]))
    (call,) = prompt.tool_calls
    assert (call.id, call.name, call.arguments) == ("c1", "run", '{"a": 1}')
    assert call.arguments_path == ("messages", 1, "tool_calls", 0, "function", "arguments")


@pytest.mark.parametrize(
    "same",
    [
        [said("assistant", "a"), said("assistant", [{"type": "text", "text": "a"}])],
        [said("assistant", ""), said("assistant", None), {"role": "assistant"}],
        [said("assistant", "", tool_calls=[CALL]), said("assistant", None, tool_calls=[{**CALL, "index": 0}])],
        [said("user", "a"), said("user", [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])],
        [said("user", "a"), {"content": "a", "role": "user"}, said("user", "a", tool_call_id="", name=None)],
        [said("assistant", "a", reasoning_content="r"), said("assistant", "a", reasoning="r")],
    ],
)
def test_spellings_of_one_message_have_the_same_bytes(same: list[dict[str, Any]]) -> None:
    prompts = [chat(said("user", "x"), message) for message in same]
    assert len({canon(p) for p in prompts}) == 1
    assert len({message_digest(p.messages[1]) for p in prompts}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (said("user", "a"), said("assistant", "a")),
        (said("assistant", "a"), said("assistant", "", reasoning_content="a")),
        (said("assistant", "", tool_calls=[CALL]), said("assistant", "")),
        (said("tool", "a"), said("function", "a")),
        (said("critic", "a"), said("judge", "a")),
        (said("user", "ab"), said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
        (said("user", ["a"]), said("user", [1])),
        (
            said("user", [{"type": "image_url", "image_url": {"url": "data:a"}}]),
            said("user", [{"type": "image_url", "image_url": {"url": "data:b"}}]),
        ),
    ],
)
def test_what_is_rendered_differently_has_other_bytes(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = chat(one), chat(other)
    assert canon(a) != canon(b)
    assert message_digest(a.messages[0]) != message_digest(b.messages[0])


def test_text_cannot_imitate_a_message_border() -> None:
    honest = chat(said("user", "a"), said("assistant", "b"))
    border = canon(honest).split(b"a", 1)[1].split(b"b")[0]
    forged = chat(said("user", "a" + border.decode("latin-1") + "b"))
    assert canon(forged) != canon(honest)


def test_a_conversation_that_goes_on_extends_its_bytes() -> None:
    first = chat(said("system", "S"), said("user", "U"), tools=[TOOL])
    answer = said("assistant", "", tool_calls=[CALL])
    second = chat(said("system", "S"), said("user", "U"), answer, said("tool", "R", tool_call_id="c1"), tools=[TOOL])
    assert canon(second).startswith(canon(first) + answer_bytes(answer))
    assert canon(second) != canon(first) + answer_bytes(answer)


def test_tools_stand_behind_the_first_system_text_and_count_as_head() -> None:
    out = canonical(chat(said("system", "S"), said("developer", "D"), said("user", "U"), tools=[TOOL]))
    assert [label for label, _, _ in out.segments] == ["system[0]", "tools", "developer[1]", "user[2]"]
    assert out.head_bytes == out.segments[3][1]
    assert b"".join(out.parts)[: out.head_bytes].endswith(b"D")
    alone = canonical(chat(said("user", "U"), tools=[TOOL]))
    assert [label for label, _, _ in alone.segments] == ["tools", "user[0]"]
    assert alone.head_bytes == alone.segments[0][2]


def test_a_byte_is_located_in_its_segment() -> None:
    out = canonical(chat(said("system", "S"), said("user", "Ux")))
    whole = b"".join(out.parts)
    assert out.n_bytes == len(whole)
    assert out.locate(whole.index(b"x")) == ("user[1]", whole.index(b"x") - out.segments[1][1])
    assert out.locate(len(whole) + 3) == ("tail", 3)
    assert canonical(chat()).locate(0) == ("tail", 0)


@pytest.mark.parametrize("key", ["cache_control", "index", "strict"])
def test_keys_of_tools_that_no_template_sees_are_not_counted(key: str) -> None:
    plain = chat(said("user", "U"), tools=[TOOL])
    function = {**TOOL, "function": {**TOOL["function"], key: True}}  # type: ignore[dict-item]
    property_of_that_name: dict[str, Any] = {"name": "run", "parameters": {"properties": {key: {}}}}
    assert canon(chat(said("user", "U"), tools=[{**TOOL, key: True}])) == canon(plain)
    assert canon(chat(said("user", "U"), tools=[function])) == canon(plain)
    assert key.encode() in canon(chat(said("user", "U"), tools=[property_of_that_name]))


def test_legacy_functions_are_tools() -> None:
    prompt = chat(said("user", "U"), functions=[{"name": "f", "parameters": {}}])
    assert [(t.name, t.path) for t in prompt.tools] == [("f", ("functions", 0))]
    assert prompt.tools_path == ("functions",)


def test_anthropic_system_comes_first_and_a_later_system_message_stays_in_place() -> None:
    data = {
        "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B", "cache_control": {}}],
        "messages": [said("user", "U"), said("system", "late")],
        "tools": [{"name": "t", "input_schema": {}}],
    }
    prompt = prompt_of(data, Api.MESSAGES)
    assert texts(prompt) == [("system", "A"), ("system", "B"), ("user", "U"), ("system", "late")]
    assert len(prompt.head) == 1
    assert prompt.head[0].content_path == ("system",)
    assert prompt.head[0].texts[1].path == ("system", 1, "text")
    assert canon(prompt_of({**data, "system": "x"}, Api.MESSAGES)) == canon(
        prompt_of({**data, "system": [{"type": "text", "text": "x"}]}, Api.MESSAGES)
    )


def test_anthropic_blocks() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "T"},
        {"type": "tool_use", "id": "c1", "name": "run", "input": {"a": 1}},
    ]
    image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "R"}, image]}
    prompt = prompt_of(
        {"messages": [said("user", "U"), said("assistant", blocks), said("user", [result])]}, Api.MESSAGES
    )
    assert [m.role for m in prompt.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL]
    assert [p.kind for m in prompt.messages for p in m.parts if isinstance(p, Opaque)] == [
        "reasoning",
        "call",
        "result",
    ]
    assert prompt.multimodal
    assert prompt.tool_calls == ()
    mixed = prompt_of({"messages": [said("user", [result, {"type": "text", "text": "More"}])]}, Api.MESSAGES)
    assert mixed.messages[0].role is Role.USER


def test_responses_items() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"type": "message", "role": "user", "content": "U"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "run",
            "arguments": "{}",
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "R"},
        {"type": "web_search_call", "id": "ws", "action": {}},
        {"type": "item_reference", "id": "x"},
    ]
    prompt = prompt_of({"instructions": "I", "input": items}, Api.RESPONSES)
    roles = ["system", "developer", "user", "assistant", "assistant", "assistant", "tool", "assistant", "other"]
    assert [m.role.value for m in prompt.messages] == roles
    assert texts(prompt) == [("system", "I"), ("developer", "D"), ("user", "U"), ("assistant", "A"), ("tool", "R")]
    assert prompt.messages[0].path == ("instructions",)
    assert [m.part_type for m in prompt.messages[1:5]] == ["input_text", "input_text", "text", "output_text"]
    assert prompt.tool_calls[0].arguments_path == ("input", 4, "arguments")


def test_a_responses_turn_has_the_bytes_of_the_answer_it_came_from() -> None:
    user = {"role": "user", "content": "U"}
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "call_id": "c1", "name": "run", "arguments": '{"a": 1}'},
    ]
    answer = said("assistant", "A", reasoning_content="hm", tool_calls=[CALL])
    before, after = (prompt_of({"input": i}, Api.RESPONSES) for i in ([user], [user, *items]))
    assert canon(after) == canon(before) + answer_bytes(answer)
    assert canon(prompt_of({"input": "U"}, Api.RESPONSES)) == canon(before)


def test_ollama_chat_and_generate() -> None:
    call = {"function": {"name": "run", "arguments": {"a": 1}}}
    prompt = prompt_of(
        {"messages": [said("user", "U", images=["AAAA"]), said("assistant", "", tool_calls=[call], thinking="hm")]},
        Api.OLLAMA_CHAT,
    )
    assert prompt.multimodal
    assert prompt.tool_calls == ()
    assert [p.kind for m in prompt.messages for p in m.parts if isinstance(p, Opaque)] == ["media", "reasoning", "call"]
    generate = prompt_of({"system": "S", "prompt": "P", "images": ["AAAA"], "context": [1, 2]}, Api.OLLAMA_GENERATE)
    assert texts(generate) == [("system", "S"), ("user", "P")]
    assert append_text(generate.messages[1], "!") == SetText(("prompt",), "P!")
    assert prompt_of({"prompt": "P", "raw": True}, Api.OLLAMA_GENERATE).raw


@pytest.mark.parametrize("api", [Api.COMPLETION, Api.COMPLETIONS])
def test_completions_are_raw(api: Api) -> None:
    assert texts(prompt_of({"prompt": "<s>a"}, api)) == [("other", "<s>a")]
    assert len(prompt_of({"prompt": ["a", "b"]}, api).messages) == 2
    assert prompt_of({"prompt": [1, 2, 3]}, api).messages[0].texts == ()
    assert prompt_of({"prompt": {"prompt_string": "a", "multimodal_data": ["AAAA"]}}, api).multimodal
    prompt = prompt_of({"prompt": "<s>a"}, api)
    assert (prompt.raw, prompt.head, canonical(prompt).head_bytes) == (True, (), 0)
    assert canonical(prompt).segments[0][0] == "prompt[0]"


def test_infill_is_read_in_the_order_it_is_rendered() -> None:
    data = {"input_suffix": "after", "prompt": "here", "input_prefix": "before", "input_extra": [{"text": "file"}]}
    out = canon(prompt_of(data, Api.INFILL))
    assert sorted((b"file", b"before", b"here", b"after"), key=out.index) == [b"file", b"before", b"here", b"after"]


@pytest.mark.parametrize(
    ("api", "data"),
    [
        (Api.CHAT, {}),
        (Api.CHAT, {"messages": {}}),
        (Api.CHAT, {"messages": ["hi"]}),
        (Api.CHAT, {"messages": [], "tools": {"a": 1}}),
        (Api.MESSAGES, {"messages": [], "system": {"a": 1}}),
        (Api.RESPONSES, {"input": {"a": 1}}),
        (Api.RESPONSES, {"input": ["a"]}),
        (Api.RESPONSES, {"input": "a", "instructions": ["a"]}),
        (Api.COMPLETION, {}),
        (Api.COMPLETION, {"prompt": 1}),
        (Api.OLLAMA_GENERATE, {"prompt": ["a"]}),
    ],
)
def test_a_shape_no_api_knows_gives_no_prompt(api: Api, data: dict[str, Any]) -> None:
    assert parse_prompt(api, Body(orjson.dumps(data), data)) is None


def test_a_schema_too_deep_to_write_again_gives_no_prompt() -> None:
    deep = b"[" * 1000 + b"]" * 1000
    assert parse_prompt(Api.CHAT, Body.parse(b'{"messages":[],"tools":[' + deep + b"]}")) is None


@pytest.mark.parametrize(
    ("content", "edit"),
    [
        ("a", SetText(("messages", 0, "content"), "a!")),
        ("", SetText(("messages", 0, "content"), "!")),
        ([{"type": "text", "text": "a"}], SetText(("messages", 0, "content", 0, "text"), "a!")),
        (["a"], SetText(("messages", 0, "content", 0), "a!")),
        ([], AppendItem(("messages", 0, "content"), {"type": "text", "text": "!"})),
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:a"}}],
            AppendItem(("messages", 0, "content"), {"type": "text", "text": "!"}),
        ),
    ],
)
def test_text_is_appended_where_the_message_ends(content: Any, edit: Edit) -> None:
    assert append_text(chat(said("user", content, name="n")).messages[0], "!") == edit


def test_a_message_without_content_takes_no_text() -> None:
    with pytest.raises(ValueError, match="takes no text"):
        append_text(chat(said("user", None)).messages[0], "!")


@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES])
def test_a_digest_outlives_renamed_calls_and_nothing_else_about_them(api: Api) -> None:
    def digests(ident: str, name: str = "run", value: int = 1, result: str = "ok") -> list[bytes]:
        if api is Api.CHAT:
            function = {"name": name, "arguments": f'{{"a": {value}}}'}
            call = said("assistant", None, tool_calls=[{"id": ident, "type": "function", "function": function}])
            answer = said("tool", result, tool_call_id=ident)
        else:
            call = said("assistant", [{"type": "tool_use", "id": ident, "name": name, "input": {"a": value}}])
            answer = said("user", [{"type": "tool_result", "tool_use_id": ident, "content": result}])
        prompt = prompt_of({"messages": [said("user", "x"), call, answer], "max_tokens": 1}, api)
        assert [call_ids(message) for message in prompt.messages] == [b"", ident.encode(), ident.encode()]
        return [message_digest(message) for message in prompt.messages[1:]]

    first = digests("c1")
    assert digests("z9") == first
    assert digests("c1", value=2)[0] != first[0]
    assert digests("c1", name="walk")[0] != first[0]
    assert digests("c1", result="no")[1] != first[1]


def test_a_digest_outlives_what_clients_respell() -> None:
    def digest(message: dict[str, Any]) -> bytes:
        return message_digest(chat(message).messages[0])

    def call(arguments: str) -> dict[str, Any]:
        return said("assistant", None, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": arguments}}])

    assert digest(call('{"a": 1, "b": 2}')) == digest(call('{"b":2,"a":1}'))
    assert digest(call('{"a": 1}')) != digest(call('{"a": 1.0}'))
    assert digest(call("{not json")) != digest(call("{not  json"))
    assert digest(said("assistant", "Done.\n")) == digest(said("assistant", "Done."))
    assert digest(said("user", "Done.\n")) != digest(said("user", "Done."))


def test_edits_give_the_prompt_of_the_edited_body() -> None:
    body = Body.parse(
        orjson.dumps({"messages": [said("system", "S"), said("user", "U"), said("assistant", None, tool_calls=[CALL])]})
    )
    prompt = parse_prompt(Api.CHAT, body)
    assert prompt is not None
    edits: list[Edit] = [
        Remove(("messages", 0)),
        append_text(prompt.messages[1], "!"),
        SetText(prompt.tool_calls[0].arguments_path, '{"a":1}'),
        SetValue(("messages", 2, "content"), "A"),
    ]
    out = apply_edits(prompt, edits)
    assert texts(out) == [("user", "U!"), ("assistant", "A")]
    assert out == parse_prompt(Api.CHAT, Body.parse(body.render(edits)))
    assert apply_edits(prompt, []) is prompt


def test_edits_that_leave_no_prompt_are_an_error() -> None:
    with pytest.raises(ValueError, match="no prompt"):
        apply_edits(chat(said("user", "U")), [SetValue(("messages",), 1)])
    with pytest.raises(ValueError, match="not read from a body"):
        apply_edits(Prompt(Api.CHAT, "", ()), [SetText(("messages", 0), "a")])


OPENING = "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\n"


def test_the_templates_own_opening_stands_in_front_of_a_prompt_that_the_user_begins() -> None:
    prompt = chat(said("user", "Hi"), said("assistant", "Hello"), said("user", "Bye"))
    plain, form = canonical(prompt), canonical(prompt, TemplateFacts(OPENING))
    assert b"".join(form.parts) == OPENING.encode() + b"".join(plain.parts)
    assert [label for label, _, _ in form.segments] == [label for label, _, _ in plain.segments]
    assert form.segments[0][1:] == (0, len(OPENING) + plain.segments[0][2])
    assert form.segments[-1][2] == len(OPENING) + plain.n_bytes
    assert form.head_bytes == 0


@pytest.mark.parametrize(
    "prompt",
    [
        chat(said("system", "Be brief."), said("user", "Hi")),
        chat(said("user", "Hi"), tools=[TOOL]),
        chat(said("assistant", "Hello"), said("user", "Hi")),
        prompt_of({"prompt": "Hi"}, Api.COMPLETIONS),
        prompt_of({"model": "m", "system": "Be brief.", "messages": [said("user", "Hi")]}, Api.MESSAGES),
    ],
)
def test_in_front_of_others_stands_none(prompt: Prompt) -> None:
    assert canonical(prompt, TemplateFacts(OPENING)) == canonical(prompt)


@pytest.mark.parametrize("head", [(), (said("system", "Be brief."),)])
def test_tools_that_the_template_does_not_render_are_no_part_of_a_prompt(head: tuple[dict[str, Any], ...]) -> None:
    template = TemplateFacts(OPENING, shows_tools=False)
    turns = (*head, said("user", "Hi"), said("assistant", "Hello"))
    plain, with_tools = chat(*turns), chat(*turns, tools=[TOOL])
    assert canonical(with_tools, template) == canonical(plain, template) == canonical(plain, TemplateFacts(OPENING))
    assert canonical(with_tools) != canonical(plain)


def test_behind_an_opening_a_prompt_is_cut_where_its_text_is() -> None:
    prompt = chat(said("user", "0123456789"), said("assistant", "Hello"))
    for opening in ("", OPENING):
        form = canonical(prompt, TemplateFacts(opening))
        found = cut_at(prompt, form, form.segments[0][2] - 4)
        assert found is not None
        assert found[0]["messages"][0]["content"] == "012345A"
