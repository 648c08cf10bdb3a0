"""For any body of any API and the edits a stabiliser makes: editing the prompt and editing the body agree."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from prefixproxy.body import Body
from prefixproxy.chat import MESSAGE as BORDER
from prefixproxy.chat import append_text, apply_edits, canonical, cut_at, message_digest, parse_prompt
from prefixproxy.chat_parts import PART
from prefixproxy.prefix import shared_bytes
from prefixproxy.prompt import Edit, Prompt, Remove, SetKey, SetText, SetValue, Text
from prefixproxy.types import Api

WORDS = st.sampled_from(["", "a", "Be brief.", "é\u2028", "\ud800", '{"a": 1}', "line\nline"])
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | WORDS
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(WORDS, v, max_size=3), max_leaves=6
)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these keys, each now and then with a value of no sense."""
    return st.fixed_dictionaries({}, optional={key: value | JSON for key, value in fields.items()})


TEXT_PART = st.builds(lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["text", "input_text"]), WORDS)
OTHER_PART = objects(
    type=st.sampled_from(["text", "image_url", "tool_use", "tool_result", "thinking", "odd"]),
    text=WORDS,
    thinking=WORDS,
    content=WORDS | st.lists(TEXT_PART, max_size=2),
    cache_control=JSON,
    input=JSON,
)
CONTENT = WORDS | st.lists(TEXT_PART | OTHER_PART | WORDS, max_size=3) | st.none()
CALL = objects(id=WORDS, function=objects(name=WORDS, arguments=WORDS), index=st.integers(0, 3))
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "critic"])
MESSAGE = objects(
    content=CONTENT,
    name=WORDS,
    reasoning_content=WORDS,
    tool_calls=st.lists(CALL, max_size=2),
    images=st.lists(WORDS, max_size=2),
).flatmap(lambda m: ROLES.map(lambda role: {"role": role, **m}))
ITEM = MESSAGE | objects(
    type=st.sampled_from(["function_call", "function_call_output", "reasoning", "web_search_call", "odd"]),
    call_id=WORDS,
    name=WORDS,
    arguments=WORDS,
    output=CONTENT,
    summary=st.lists(TEXT_PART, max_size=2),
)
TOOL = objects(name=WORDS, function=objects(name=WORDS, parameters=JSON, strict=JSON), cache_control=JSON)
BODY = objects(
    model=WORDS,
    messages=st.lists(MESSAGE, max_size=5),
    input=st.lists(ITEM, max_size=5) | WORDS,
    tools=st.lists(TOOL, max_size=3),
    functions=st.lists(TOOL, max_size=2),
    system=CONTENT,
    instructions=WORDS,
    prompt=WORDS | st.lists(WORDS, max_size=3) | st.lists(st.integers(0, 9), max_size=3),
    images=st.lists(WORDS, max_size=2),
    raw=st.booleans(),
    input_prefix=WORDS,
    input_extra=JSON,
)
WELL_FORMED = st.fixed_dictionaries(
    {
        "messages": st.lists(MESSAGE, max_size=5),
        "input": st.lists(ITEM, max_size=5) | WORDS,
        "prompt": WORDS,
        "system": WORDS | st.lists(TEXT_PART, min_size=1, max_size=2),
    },
    optional={"tools": st.lists(TOOL, max_size=3), "instructions": WORDS, "model": WORDS},
)


@given(st.sampled_from(Api), BODY)
def test_reading_never_raises_and_says_the_same_twice(api: Api, data: dict[str, Any]) -> None:
    prompt = parse_prompt(api, Body(b"", data))
    if prompt is None:
        return
    out = canonical(prompt)
    whole = b"".join(out.parts)
    assert out.parts == tuple(whole[start:end] for _, start, end in out.segments)
    assert out.n_bytes == len(whole)
    assert out.head_bytes <= len(whole)
    assert canonical(apply_edits(prompt, [SetKey((), "stream", True)])) == out
    assert all(len(message_digest(m)) == 16 for m in prompt.messages)


def edits_of(draw: st.DrawFn, prompt: Prompt) -> list[Edit]:
    """Some edits of the kinds the proxy makes, no two at one place."""
    edits: list[Edit] = [SetKey((), "stream", True)] if draw(st.booleans()) else []
    gone = set()
    for message in prompt.messages:
        choice = draw(st.sampled_from(["keep", "remove", "append", "text", "part"]))
        if choice == "remove" and len(message.path) > 1 and not prompt.raw:
            edits.append(Remove(message.path))
            gone.add(message.path)
        elif choice == "append" and message.form != "none":
            edits.append(append_text(message, "\n\nnote"))
        elif choice == "text" and message.texts:
            edits.append(SetText(message.texts[0].path, draw(WORDS)))
        elif choice == "part" and message.form == "parts" and len(message.texts) > 1:
            path = message.texts[1].path
            edits.append(Remove(path[:-1] if path[-1] == "text" else path))
    edits += [
        SetText(call.arguments_path, draw(WORDS))
        for call in prompt.tool_calls
        if call.arguments_path[:2] not in gone and draw(st.booleans())
    ]
    choices = st.sampled_from(["keep", "remove", "put"])
    for tool in prompt.tools:
        match draw(choices):
            case "remove":
                edits.append(Remove(tool.path))
            case "put":
                edits.append(SetValue(tool.path, raw=b'{"name": "n", "x": 1.50}'))
    return edits


@st.composite
def edited_prompts(draw: st.DrawFn) -> tuple[Api, Body, Prompt, list[Edit]]:
    api = draw(
        st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES, Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE, Api.COMPLETION])
    )
    data = draw(WELL_FORMED)
    body = Body.parse(json.dumps(data).replace("Infinity", "1e999").encode())
    prompt = parse_prompt(api, body)
    assume(prompt is not None)
    assert prompt is not None
    return api, body, prompt, edits_of(draw, prompt)


@given(edited_prompts())
def test_an_edited_prompt_is_the_prompt_of_the_edited_body(case: tuple[Api, Body, Prompt, list[Edit]]) -> None:
    api, body, prompt, edits = case
    again = parse_prompt(api, Body.parse(body.render(edits)))
    assert again is not None
    out = apply_edits(prompt, edits)
    assert canonical(out) == canonical(again)
    assert out == again


@given(edited_prompts())
def test_messages_behind_an_edit_change_nothing_before_it(case: tuple[Api, Body, Prompt, list[Edit]]) -> None:
    """The bytes of a prompt whose last message grew begin with the bytes of the prompt as it was. What stands behind
    the text of a message (images, or tool calls in a user's) stays behind what is appended to it."""
    _, _, prompt, _ = case
    if (
        not prompt.messages
        or prompt.messages[-1].form != "string"
        or prompt.messages[-1].role.value not in ("user", "other")
    ):
        return
    longer = apply_edits(prompt, [append_text(prompt.messages[-1], " and more")])
    if all(isinstance(part, Text) for part in prompt.messages[-1].parts):
        assert b"".join(canonical(longer).parts).startswith(b"".join(canonical(prompt).parts))


@given(WELL_FORMED, st.data())
def test_the_same_prompt_with_another_text_from_a_byte_on(data: dict[str, Any], given: st.DataObject) -> None:
    prompt = parse_prompt(Api.CHAT, Body(b"", data))
    assume(prompt is not None and prompt.messages)
    assert prompt is not None
    form = canonical(prompt)
    offset = given.draw(st.integers(form.segments[0][1], form.n_bytes + 3))
    cut = cut_at(prompt, form, offset)
    label, within = form.locate(offset)
    if label in ("tail", "tools"):
        assert cut is None
        return
    message = prompt.messages[int(label[label.index("[") + 1 : -1])]
    in_text = all(isinstance(part, Text) for part in message.parts) and within >= len(
        BORDER + message.role.value.encode() + PART
    )
    if cut is None:
        assert message is prompt.messages[0]
        assert not in_text
        return
    other, covered = cut
    changed = parse_prompt(Api.CHAT, Body(b"", other))
    assert changed is not None
    shared = shared_bytes(b"".join(form.parts), b"".join(canonical(changed).parts))
    assert covered == offset or not in_text
    assert covered - 3 <= shared <= covered  # no character is cut in two
