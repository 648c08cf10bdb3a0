"""Signs of life, and the upstream's stream behind them: one beginning, one name, blocks in order."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.body import Body
from prefixproxy.chat import parse_prompt
from prefixproxy.errors import Rejected
from prefixproxy.exchange import Hints, client_streams
from prefixproxy.patience.names import MAX_NAMES, ResponseNames
from prefixproxy.patience.signs import event_of, failed_response, further, late_error, opening, response_id
from prefixproxy.patience.splice import returned, splice_of
from prefixproxy.prompt import SetText
from prefixproxy.sse import SSEReader, data_of, object_of
from prefixproxy.types import Api

Json = dict[str, Any]

START: Json = {
    "type": "message_start",
    "message": {"id": "theirs", "usage": {"input_tokens": 4, "cache_read_input_tokens": 9}},
}
END: list[Json] = [
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
]
MERGED = {"input_tokens": 4, "cache_read_input_tokens": 9, "output_tokens": 3}


def block(index: int, kind: str, *deltas: Json, text: str = "") -> list[Json]:
    content = {"type": kind} | ({"text": text} if kind == "text" else {"id": "call_1", "name": "f", "input": {}})
    return [
        {"type": "content_block_start", "index": index, "content_block": content},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


TEXT = {"type": "text_delta", "text": "Hi"}
ARGUMENTS = {"type": "input_json_delta", "partial_json": "{}"}


def joined(api: Api, events: list[Json], size: int = 1 << 20) -> list[Json]:
    """All that a client reads which was kept waiting and then gets `events`, cut into pieces of `size` bytes."""
    splice = splice_of(api, "r1", ResponseNames())
    assert splice is not None
    raw = b"".join(event_of(event) for event in events)
    out = opening(api, "r1", "m", 1) + further(api, opened=True)
    out += b"".join(splice.feed(raw[i : i + size]) for i in range(0, len(raw), size)) + splice.close()
    found = [object_of(event) for event in SSEReader().feed(out)]
    return [value for value in found if value is not None]


def message_of(events: list[Json]) -> tuple[list[Json], Json]:
    """What an Anthropic client makes of the events: content blocks and usage; fails on events out of order."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[1:]].count("message_start") == 0
    content: list[Json] = []
    usage: Json = dict(events[0]["message"]["usage"])
    open_block: int | None = None
    for event in events[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None
            assert event["index"] == len(content)
            open_block = event["index"]
            content.append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            assert event["index"] == open_block
            for key, value in event["delta"].items():
                if key != "type":
                    content[-1][key] = content[-1].get(key, "") + value
        elif kind == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
        elif kind == "message_delta":
            assert open_block is None
            usage |= event["usage"]
    assert events[-1]["type"] == "message_stop"
    return content, usage


TOOL = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}, "partial_json": "{}"}
EMPTY = {"type": "text", "text": ""}
MESSAGES: dict[str, tuple[list[Json], list[Json]]] = {
    "text": (block(0, "text", TEXT, TEXT), [{"type": "text", "text": "HiHi"}]),
    "text with a beginning": (block(0, "text", TEXT, text="Oh "), [EMPTY, {"type": "text", "text": "Oh Hi"}]),
    "text, then a call": (
        [*block(0, "text", TEXT), *block(1, "tool_use", ARGUMENTS)],
        [{"type": "text", "text": "Hi"}, TOOL],
    ),
    "calls": ([*block(0, "tool_use", ARGUMENTS), *block(1, "tool_use", ARGUMENTS)], [EMPTY, TOOL, TOOL]),
    "nothing": ([], [EMPTY]),
}


@pytest.mark.parametrize(("blocks", "content"), MESSAGES.values(), ids=MESSAGES)
def test_an_anthropic_answer_goes_on_where_it_was_begun(blocks: list[Json], content: list[Json]) -> None:
    events = joined(Api.MESSAGES, [START, *blocks, *END])
    assert events[0]["message"]["id"] == "msg_r1"
    assert message_of(events) == (content, MERGED)


@given(st.integers(1, 200))
def test_cutting_the_stream_changes_nothing(size: int) -> None:
    events = [START, *block(0, "tool_use", ARGUMENTS), *END]
    assert joined(Api.MESSAGES, events, size) == joined(Api.MESSAGES, events)


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ([EMPTY, TOOL], [TOOL]),
        ([EMPTY, {"type": "thinking", "thinking": "Hm"}, TOOL], [{"type": "thinking", "thinking": "Hm"}, TOOL]),
        ([EMPTY], [EMPTY]),
        ([EMPTY, {"type": "unheard"}], [EMPTY, {"type": "unheard"}]),
        ([TOOL, EMPTY], [TOOL, EMPTY]),
        ("", ""),
        ("Hi", "Hi"),
        ([{"type": "text", "text": "Hi"}, TOOL], [{"type": "text", "text": "Hi"}, TOOL]),
    ],
)
def test_a_block_that_was_only_a_sign_of_life_leaves_the_history(content: Any, kept: Any) -> None:
    turns = [{"role": "user", "content": [EMPTY, TEXT]}, {"role": "assistant", "content": content}]
    body = Body.parse(orjson.dumps({"messages": turns}))
    prompt = parse_prompt(Api.MESSAGES, body)
    assert prompt is not None
    sent = orjson.loads(body.render(returned(prompt)))["messages"]
    assert sent == [turns[0], {"role": "assistant", "content": kept}]


def test_an_error_in_an_anthropic_stream_passes() -> None:
    error = {"type": "error", "error": {"type": "api_error", "message": "no"}}
    assert joined(Api.MESSAGES, [START, error])[-1] == error


def lifecycle(kind: str) -> Json:
    return {"type": kind, "response": {"id": "resp_theirs", "object": "response"}}


def test_a_response_keeps_the_name_it_was_begun_with() -> None:
    delta = {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "Hi"}
    kinds = ("response.created", "response.in_progress", "response.completed")
    created, in_progress, completed = (lifecycle(kind) for kind in kinds)
    events = joined(Api.RESPONSES, [created, in_progress, delta, completed])
    assert [event["type"] for event in events] == [
        "response.created",
        "keepalive",
        "response.in_progress",
        "response.output_text.delta",
        "response.completed",
    ]
    assert {event["response"]["id"] for event in events if "response" in event} == {"resp_r1"}
    assert events[3] == delta


def test_only_the_name_itself_is_another() -> None:
    """Ollama's names are short: "resp_7" may stand in a text, or begin another word."""
    says = {"type": "response.output_text.delta", "delta": 'resp_7 "resp_7" resp_77'}
    created = {"type": "response.created", "response": {"id": "resp_7"}}
    assert joined(Api.RESPONSES, [created, says])[-1] == says


def test_a_response_is_asked_for_by_the_name_that_its_server_knows() -> None:
    names = ResponseNames()
    splice = splice_of(Api.RESPONSES, "r1", names)
    assert splice is not None
    splice.feed(event_of(lifecycle("response.created")))
    assert names.edits(Api.RESPONSES, {"previous_response_id": response_id("r1")}) == (
        SetText(("previous_response_id",), "resp_theirs"),
    )
    assert names.edits(Api.CHAT, {"previous_response_id": response_id("r1")}) == ()
    for body in ({}, {"previous_response_id": None}, {"previous_response_id": "resp_other"}):
        assert names.edits(Api.RESPONSES, dict(body)) == ()
    for number in range(MAX_NAMES):
        names.learn(f"resp_{number}", "x")
    assert names.edits(Api.RESPONSES, {"previous_response_id": response_id("r1")}) == ()


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.COMPLETION, Api.INFILL])
def test_elsewhere_a_sign_is_a_comment_and_nothing_has_to_be_joined(api: Api) -> None:
    assert splice_of(api, "r1", ResponseNames()) is None
    for sign in (opening(api, "r1", "m", 1), further(api, opened=True), further(api, opened=False)):
        assert [data_of(event) for event in SSEReader().feed(sign)] == [None]


@pytest.mark.parametrize("api", [Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE])
def test_before_a_line_of_json_it_is_white_space(api: Api) -> None:
    assert orjson.loads(opening(api, "r1", "m", 1) + further(api, opened=True) + b'{"done":true}') == {"done": True}


def test_behind_a_beginning_that_is_not_ours_an_anthropic_sign_is_a_ping() -> None:
    assert object_of(further(Api.MESSAGES, opened=False)) == {"type": "ping"}


SAID = {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error"}}


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/chat/completions", orjson.dumps(SAID), SAID),
        ("/v1/responses", orjson.dumps(SAID), SAID),
        ("/v1/messages", orjson.dumps(SAID), {"type": "error", **SAID}),
        ("/api/chat", b'{"error":"model not found"}', {"error": "model not found"}),
    ],
)
def test_an_upstreams_error_stays_its_own_words(path: str, body: bytes, error: Json) -> None:
    assert late_error(path, 400, body) == error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SAID, "context_length_exceeded"),
        ({"error": {"code": 400, "message": "no", "type": "invalid_request_error"}}, "invalid_request_error"),
        (Rejected("full", code="queue_full").envelope("/v1/responses"), "queue_full"),
        ({"error": "broken"}, "server_error"),
    ],
)
def test_a_response_that_failed_is_told_to_sdks_and_to_codex(error: Json, code: str) -> None:
    failed, told = [object_of(each + b"\n\n") or {} for each in failed_response(error, "r1").split(b"\n\n")[:2]]
    said = error["error"]
    message = said if isinstance(said, str) else said["message"]
    assert failed["type"] == "response.failed"
    assert (failed["response"]["id"], failed["response"]["status"]) == (response_id("r1"), "failed")
    assert failed["response"]["error"] == {"code": code, "message": message}
    assert (told["type"], told["code"], told["message"], told["error"]) == ("error", code, message, said)


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b"", b"[]", b'{"error": null}', b"\xff"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_what_is_no_error_of_the_api_is_quoted_in_one(path: str, body: bytes) -> None:
    error = late_error(path, 502, body)["error"]
    assert "the upstream answered 502" in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ([(b"x-stainless-read-timeout", b"30.0")], 30.0),
        ([(b"x-stainless-timeout", b"600")], 600.0),
        ([(b"x-stainless-read-timeout", b"30"), (b"x-stainless-timeout", b"600")], 30.0),
        ([(b"x-stainless-read-timeout", b"None")], None),
        ([(b"x-stainless-read-timeout", b"-1")], None),
        ([(b"x-stainless-read-timeout", b"inf")], None),
        ([(b"x-stainless-read-timeout", b"nan")], None),
        ([], None),
    ],
)
def test_how_long_a_client_waits_is_read_where_it_says_so(
    headers: list[tuple[bytes, bytes]], seconds: float | None
) -> None:
    assert Hints.of({"headers": headers}).read_timeout_s == seconds


def test_only_a_client_that_hears_nothing_is_told_in_time() -> None:
    hints = Hints(read_timeout_s=30.0)
    assert hints.longest_wait_s(600.0, streaming=False) == 27.0
    assert hints.longest_wait_s(10.0, streaming=False) == 10.0
    assert hints.longest_wait_s(600.0, streaming=True) == 600.0
    assert Hints().longest_wait_s(600.0, streaming=False) == 600.0


@pytest.mark.parametrize(
    ("api", "stream", "streams"),
    [
        (Api.CHAT, {}, False),
        (Api.CHAT, {"stream": None}, False),
        (Api.CHAT, {"stream": True}, True),
        (Api.OLLAMA_CHAT, {}, True),
        (Api.OLLAMA_GENERATE, {"stream": None}, True),
        (Api.OLLAMA_CHAT, {"stream": False}, False),
    ],
)
def test_ollamas_own_paths_stream_unless_told_not_to(api: Api, stream: Json, streams: bool) -> None:
    assert client_streams(api, stream) is streams
