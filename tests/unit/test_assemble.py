"""How events become one answer, what is never assembled, and what is changed in a body that goes up as a stream."""

from __future__ import annotations

from typing import Any

import pytest

from prefixproxy.assemble import Assembler, can_assemble, stream_body_edits, why_not
from prefixproxy.errors import UpstreamFailed
from prefixproxy.prompt import SetKey
from prefixproxy.types import Api

Json = dict[str, Any]

TOP = {"created": 5, "id": "chatcmpl-1", "model": "m", "system_fingerprint": "b0", "object": "chat.completion.chunk"}
USAGE = {"completion_tokens": 2, "prompt_tokens": 3, "total_tokens": 5}


def delta(finish: str | None = None, /, *, n: int | None = None, **delta: Any) -> Json:
    timings = {} if n is None else {"timings": {"predicted_n": n}}
    return {"choices": [{"finish_reason": finish, "index": 0, "delta": delta}], **TOP, **timings}


ROLE = delta(n=1, role="assistant", content=None)


def last(n: int) -> Json:
    return {"choices": [], **TOP, "usage": USAGE, "timings": {"predicted_n": n}}


def assembled(api: Api, events: list[Json], **body: Any) -> tuple[Json, bool]:
    assembler = Assembler(api, body)
    for event in events:
        assembler.feed(event)
    status, answer = assembler.result()
    assert status == 200
    return answer, assembler.exact


def message_of(*events: Json) -> Json:
    answer, _exact = assembled(Api.CHAT, [ROLE, *events, delta("stop"), last(9)])
    message: Json = answer["choices"][0]["message"]
    return message


# --- chat ---


def test_chat_answer_has_the_servers_fields_in_its_order() -> None:
    events = [ROLE, delta(n=1, content="Hel"), delta(n=2, content="lo"), delta("length"), last(2)]
    answer, exact = assembled(Api.CHAT, events)
    message = {"role": "assistant", "content": "Hello"}
    assert answer == {
        "choices": [{"finish_reason": "length", "index": 0, "message": message}],
        "created": 5,
        "model": "m",
        "system_fingerprint": "b0",
        "object": "chat.completion",
        "usage": USAGE,
        "id": "chatcmpl-1",
        "timings": {"predicted_n": 2},
    }
    order = ["choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings"]
    assert list(answer) == order
    assert exact


def test_unknown_fields_stay() -> None:
    finish = delta("stop")
    finish["choices"][0]["novel"] = 1
    answer, _exact = assembled(Api.CHAT, [ROLE, delta(content="a"), finish, last(2) | {"extra": [2]}])
    assert answer["extra"] == [2]
    assert answer["choices"][0]["novel"] == 1
    assert "delta" not in answer["choices"][0]


def test_unknown_parts_of_a_message_stay() -> None:
    message = message_of(delta(content="a", aside="x"), delta(aside="y", flag=True))
    assert message == {"role": "assistant", "content": "a", "aside": "xy", "flag": True}


def test_reasoning_comes_beside_the_content() -> None:
    message = message_of(delta(reasoning_content="I th"), delta(reasoning_content="ink"), delta(content="so"))
    assert message == {"role": "assistant", "content": "so", "reasoning_content": "I think"}


def test_text_that_came_with_the_progress_is_kept() -> None:
    """What a template opened the answer with, where reasoning stays in the text."""
    early = delta(content="<think>\n") | {"prompt_progress": {"total": 1, "cache": 0, "processed": 0}}
    answer, exact = assembled(Api.CHAT, [ROLE, early, ROLE, delta(n=1, content="a"), delta("length"), last(1)])
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "<think>\na"}
    assert exact


def test_progress_events_carry_nothing() -> None:
    progress = ROLE | {"prompt_progress": {"total": 1, "cache": 0, "processed": 1}}
    answer, exact = assembled(Api.CHAT, [progress, ROLE, delta(n=1, content="a"), delta("length"), last(1)])
    assert answer["choices"][0]["message"]["content"] == "a"
    assert exact


def call(index: int, /, **function: str) -> Json:
    return {"index": index, "function": function}


def test_tool_calls_are_joined_by_index() -> None:
    message = message_of(
        delta(tool_calls=[call(0, name="one", arguments="{") | {"id": "a", "type": "function"}]),
        delta(tool_calls=[call(0, arguments='"x":1')]),
        delta(tool_calls=[call(0, arguments="}")]),
        delta(tool_calls=[call(1, name="two") | {"id": "b", "type": "function"}]),
        delta(tool_calls=[call(1, arguments="{}")]),
    )
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "one", "arguments": '{"x":1}'}, "id": "a"},
            {"type": "function", "function": {"name": "two", "arguments": "{}"}, "id": "b"},
        ],
    }


def test_a_name_that_grew_is_sent_whole() -> None:
    message = message_of(
        delta(tool_calls=[call(0, name="get_w") | {"id": "a"}]),
        delta(tool_calls=[call(0, name="get_weather", arguments="{}") | {"id": "a"}]),
    )
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": "{}"}


def test_a_call_without_an_id_gets_none() -> None:
    [tool_call] = message_of(delta(tool_calls=[call(0, name="one", arguments="{}")]))["tool_calls"]
    assert tool_call == {"type": "function", "function": {"name": "one", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("events", "exact"),
    [
        ([delta(n=2, content="a"), delta("length"), last(2)], True),
        ([delta(n=2, content="a"), delta("length"), last(3)], False),
        ([delta(n=2, content="a"), delta("stop"), last(3)], True),
        ([delta("stop"), last(1)], True),
        ([delta("stop"), last(5)], False),
        ([delta("length"), last(1)], False),
    ],
    ids=["all shown", "held back at the limit", "ended", "ended at once", "parsed to nothing", "nothing at the limit"],
)
def test_chat_is_marked_where_text_may_be_missing(events: list[Json], exact: bool) -> None:
    assert assembled(Api.CHAT, [ROLE, *events])[1] is exact


def test_an_empty_message_with_stop_words_is_marked() -> None:
    assert assembled(Api.CHAT, [ROLE, delta("stop"), last(1)], stop=["x"])[1] is False


# --- completions ---


def text(value: str, finish: str | None = None, n: int = 1) -> Json:
    choice = {"text": value, "index": 0, "logprobs": None, "finish_reason": finish}
    return {"choices": [choice], "created": 5, "id": "c", "timings": {"predicted_n": n}}


def test_completions_keep_the_last_chunk_and_join_the_texts() -> None:
    events = [text("a"), text("b", n=2), text("", "length", n=2) | {"usage": USAGE, "extra": 1}]
    answer, exact = assembled(Api.COMPLETIONS, events)
    assert answer == text("ab", "length", n=2) | {"usage": USAGE, "extra": 1}
    assert exact


@pytest.mark.parametrize(
    ("events", "stop", "exact"),
    [
        ([text("a", n=1), text("", "length", n=2)], None, False),
        ([text("a", n=1), text("", n=2), text("", "length", n=2)], ["bc"], False),
        ([text("a", n=1), text("", n=2), text("", "length", n=2)], None, True),
        ([text("a", n=1), text("", n=2), text("", "stop", n=2)], ["bc"], True),
    ],
    ids=["half a character", "half a stop word", "a silent token", "a whole stop word"],
)
def test_completions_are_marked_where_text_is_missing(events: list[Json], stop: Any, exact: bool) -> None:
    assert assembled(Api.COMPLETIONS, events, stop=stop)[1] is exact


def piece(value: str, n: int) -> Json:
    return {"index": 0, "content": value, "tokens": [7], "stop": False, "id_slot": -1, "tokens_predicted": n}


def native(n: int, stop_type: str = "limit") -> Json:
    settings = {"seed": 1, "stream": True, "n_probs": 0}
    return {
        "index": 0,
        "content": "",
        "tokens": [],
        "stop": True,
        "tokens_predicted": n,
        "generation_settings": settings,
        "stop_type": stop_type,
    }


@pytest.mark.parametrize("api", [Api.COMPLETION, Api.INFILL])
def test_native_answer_joins_the_texts_and_says_it_did_not_stream(api: Api) -> None:
    answer, exact = assembled(api, [piece("a", 1), piece("b", 2), native(2)])
    settings = {"seed": 1, "stream": False, "n_probs": 0}
    assert answer == native(2) | {"content": "ab", "generation_settings": settings}
    assert list(answer["generation_settings"]) == ["seed", "stream", "n_probs"]
    assert exact


def test_response_fields_are_respected() -> None:
    final = {"generation_settings/stream": True, "id_slot": 1}
    assert assembled(Api.COMPLETION, [piece("a", 1), final])[0] == {"generation_settings/stream": False, "id_slot": 1}
    assert assembled(Api.COMPLETION, [piece("a", 1), {"content": ""}])[0] == {"content": "a"}


@pytest.mark.parametrize(
    ("events", "stop", "exact"),
    [
        ([piece("a", 1), native(2)], None, False),
        ([piece("a", 1), piece("", 2), native(2)], ["bc"], False),
        ([piece("a", 1), piece("", 2), native(2)], None, True),
        ([piece("a", 1), piece("", 2), native(2, "word")], ["bc"], True),
        ([piece("a", 1), piece("", 2), native(2, "eos")], ["bc"], True),
    ],
    ids=["half a character", "half a stop word", "a silent token", "a whole stop word", "the end"],
)
def test_native_answers_are_marked_where_text_is_missing(events: list[Json], stop: Any, exact: bool) -> None:
    assert assembled(Api.COMPLETION, events, stop=stop)[1] is exact


# --- errors ---


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.COMPLETION])
@pytest.mark.parametrize(("code", "status"), [(500, 500), (400, 400), (503, 503), (200, 500), ("x", 500), (None, 500)])
def test_an_error_event_is_the_answer(api: Api, code: Any, status: int) -> None:
    error = {"error": {"code": code, "message": "Context size has been exceeded.", "type": "server_error"}}
    assembler = Assembler(api, {})
    assembler.feed({"choices": [], "content": "a", "stop": False})
    assembler.feed(error)
    assembler.feed(last(1))
    assert assembler.result() == (status, error)


@pytest.mark.parametrize(
    ("api", "events"),
    [
        (Api.CHAT, []),
        (Api.CHAT, [ROLE, delta(content="a")]),
        (Api.CHAT, [last(1)]),
        (Api.COMPLETIONS, [text("a")]),
        (Api.COMPLETION, [piece("a", 1)]),
    ],
)
def test_a_stream_without_its_end_is_no_answer(api: Api, events: list[Json]) -> None:
    assembler = Assembler(api, {})
    for event in events:
        assembler.feed(event)
    with pytest.raises(UpstreamFailed, match="ended its stream before"):
        assembler.result()


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (Api.CHAT, delta(tool_calls=3)),
        (Api.CHAT, delta(tool_calls=[{"function": {"name": "x"}}])),
        (Api.CHAT, delta(tool_calls=[{"index": 0, "function": "f"}])),
        (Api.CHAT, {"choices": [{"delta": "x"}]}),
    ],
)
def test_a_malformed_event_is_no_answer(api: Api, event: Json) -> None:
    assembler = Assembler(api, {})
    assembler.feed(event)
    assembler.feed(delta("stop"))
    with pytest.raises(UpstreamFailed, match="unknown shape"):
        assembler.result()


@pytest.mark.parametrize("api", [Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE])
def test_other_apis_are_not_assembled(api: Api) -> None:
    assert not can_assemble(api, {})
    with pytest.raises(ValueError, match="not assembled"):
        Assembler(api, {})


# --- what is assembled at all ---

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "So"}
PICTURE = {"type": "image", "source": {"type": "base64", "data": ""}}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"messages": [USER]}),
        (Api.CHAT, {"messages": "no list"}),
        (Api.CHAT, {"messages": [USER], "n": 1, "logprobs": False, "stream": False, "verbose": False}),
        (Api.CHAT, {"messages": [USER], "stream_options": {"include_usage": False}, "stop": ["a"], "tools": []}),
        (Api.COMPLETIONS, {"prompt": "a", "logprobs": None, "n_probs": 0}),
        (Api.COMPLETION, {"prompt": [1, 2]}),
        (Api.COMPLETION, {"prompt": ["a", 2]}),
        (Api.MESSAGES, {"messages": [ASSISTANT, USER]}),
        (Api.MESSAGES, {"messages": [ASSISTANT, {"role": "user", "content": [PICTURE]}]}),
        (Api.MESSAGES, {"messages": [ASSISTANT, {"role": "user", "content": [{"type": "tool_result"}]}]}),
        (Api.CHAT, {"messages": [ASSISTANT, {"role": "user", "content": []}]}),
        (Api.COMPLETION, {"prompt": ["a"]}),
        (Api.COMPLETION, {"prompt": {"prompt_string": "a"}, "verbose": True}),
        (Api.INFILL, {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_can_assemble(api: Api, body: Json) -> None:
    assert why_not(api, body) is None
    assert can_assemble(api, body)


@pytest.mark.parametrize(
    ("api", "body", "reason"),
    [
        (Api.CHAT, {"n": 2}, "several answers"),
        (Api.COMPLETIONS, {"n_cmpl": 2}, "several answers"),
        (Api.CHAT, {"n": "1"}, "several answers"),
        (Api.COMPLETION, {"prompt": ["a", "b"]}, "several answers"),
        (Api.COMPLETION, {"prompt": [[1], [2]]}, "several answers"),
        (Api.COMPLETION, {"prompt": []}, "several answers"),
        (Api.CHAT, {"logprobs": True}, "probabilities"),
        (Api.CHAT, {"top_logprobs": 3}, "probabilities"),
        (Api.COMPLETIONS, {"logprobs": 2}, "probabilities"),
        (Api.COMPLETION, {"n_probs": 1}, "probabilities"),
        (Api.COMPLETION, {"return_tokens": True}, "ids"),
        (Api.CHAT, {"verbose": True}, "__verbose"),
        (Api.COMPLETIONS, {"verbose": True}, "__verbose"),
        (Api.COMPLETION, {"n_indent": 4}, "indentation"),
        (Api.CHAT, {"stream": "no"}, "wrong type"),
        (Api.CHAT, {"stream_options": []}, "wrong type"),
        (Api.CHAT, {"stream_options": {"include_usage": "yes"}}, "wrong type"),
        (Api.CHAT, {"return_progress": "yes"}, "wrong type"),
        (Api.CHAT, {"timings_per_token": 1}, "wrong type"),
        (Api.CHAT, {"stream": 0}, "wrong type"),
        (Api.CHAT, {"messages": [USER, {"role": "assistant", "content": "So"}]}, "continued"),
        (Api.CHAT, {"continue_final_message": True}, "continued"),
        (Api.CHAT, {"reasoning_format": "deepseek-legacy"}, "reasoning"),
        (Api.COMPLETION, {"reasoning_format": "deepseek-legacy"}, "reasoning"),
        (Api.RESPONSES, {"input": [USER, {"role": "assistant", "content": "So"}]}, "continued"),
        (Api.MESSAGES, {"messages": [USER, {"role": "assistant", "content": "So"}]}, "continued"),
        (Api.MESSAGES, {"messages": [ASSISTANT, {"role": "user", "content": []}]}, "continued"),
        (
            Api.MESSAGES,
            {"messages": [ASSISTANT, USER | {"content": [{"type": "image", "source": {}}, 5]}]},
            "continued",
        ),
        (Api.OLLAMA_CHAT, {"messages": [USER]}, "API"),
    ],
)
def test_why_not(api: Api, body: Json, reason: str) -> None:
    assert reason in (why_not(api, body) or "")
    assert not can_assemble(api, body)


# --- what is changed in a body ---


def edited(api: Api, body: Json) -> Json:
    changes = {}
    for edit in stream_body_edits(api, body):
        assert isinstance(edit, SetKey)
        assert edit.path == ()
        changes[edit.key] = edit.value
    return changes


def test_json_chat_is_streamed_with_usage_progress_and_timings() -> None:
    assert edited(Api.CHAT, {"messages": [USER]}) == {
        "stream": True,
        "return_progress": True,
        "stream_options": {"include_usage": True},
        "timings_per_token": True,
    }


def test_no_progress_is_asked_for_where_it_could_bring_text() -> None:
    assert "return_progress" not in edited(Api.RESPONSES, {"input": "hi", "reasoning_format": "none"})
    assert edited(Api.CHAT, {"messages": [USER], "reasoning_format": "none"})["return_progress"]
    assert edited(Api.COMPLETION, {"reasoning_format": "none"})["return_progress"]


def test_other_stream_options_stay() -> None:
    options = {"include_usage": False, "other": 1}
    assert edited(Api.CHAT, {"stream_options": options})["stream_options"] == {"include_usage": True, "other": 1}


def test_json_completions_need_no_usage_chunk() -> None:
    expected = {"stream": True, "return_progress": True, "timings_per_token": True}
    assert edited(Api.COMPLETIONS, {"prompt": "a"}) == expected


@pytest.mark.parametrize("api", [Api.COMPLETION, Api.INFILL])
def test_native_settings_are_echoed_so_nothing_more_is_set(api: Api) -> None:
    assert edited(api, {"stream": False}) == {"stream": True, "return_progress": True}


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.COMPLETION, Api.INFILL, Api.RESPONSES])
def test_a_clients_stream_gets_progress_and_nothing_else(api: Api) -> None:
    assert edited(api, {"stream": True, "prompt": "a"}) == {"return_progress": True}
    assert edited(api, {"stream": True, "return_progress": False}) == {"return_progress": True}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"return_progress": True}),
        (Api.CHAT, {"return_progress": "yes"}),
        (Api.CHAT, {"n": 2}),
        (Api.CHAT, {"echo": True}),
        (Api.RESPONSES, {"reasoning_format": "none"}),
        (Api.RESPONSES, {"reasoning_format": "deepseek-legacy"}),
        (Api.COMPLETION, {"prompt": ["a", "b"]}),
        (Api.MESSAGES, {}),
        (Api.OLLAMA_CHAT, {}),
    ],
)
def test_a_clients_stream_that_is_left_alone(api: Api, body: Json) -> None:
    assert stream_body_edits(api, body | {"stream": True}) == ()
