"""Responses and Messages put together from events; test_dialects_equal_direct.py compares them with the server's.

A random-weight model neither thinks nor calls tools in /v1/messages, so these parts are only tested here.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from prefixproxy.assemble import Assembler
from prefixproxy.assemble_typed import start_left_out
from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import Api

Json = dict[str, Any]

START: Json = {
    "type": "message_start",
    "message": {
        "id": "m1",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "tiny",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"cache_read_input_tokens": 9, "input_tokens": 1, "output_tokens": 0},
    },
}


def block(index: int, content: Json, *deltas: Json) -> list[Json]:
    return [
        {"type": "content_block_start", "index": index, "content_block": content},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def end(reason: str, tokens: int) -> list[Json]:
    delta = {"stop_reason": reason, "stop_sequence": None}
    return [{"type": "message_delta", "delta": delta, "usage": {"output_tokens": tokens}}, {"type": "message_stop"}]


THINKING = block(
    0,
    {"type": "thinking", "thinking": ""},
    {"type": "thinking_delta", "thinking": "Hm"},
    {"type": "thinking_delta", "thinking": "m"},
    {"type": "signature_delta", "signature": ""},
)
TEXT = block(1, {"type": "text", "text": ""}, {"type": "text_delta", "text": "Oslo"})


def call(index: int, *pieces: str) -> list[Json]:
    content = {"type": "tool_use", "id": "c1", "name": "f"}
    return block(index, content, *({"type": "input_json_delta", "partial_json": piece} for piece in pieces))


def message(events: list[Json], max_tokens: int = 100) -> tuple[Json, bool]:
    assembler = Assembler(Api.MESSAGES, {"max_tokens": max_tokens})
    for event in [START, *events]:
        assembler.feed(event)
    status, body = assembler.result()
    assert status == 200
    return body, assembler.exact


def test_a_message_has_its_blocks_in_the_servers_order() -> None:
    body, exact = message([*THINKING, *TEXT, *call(2, '{"b":', '1,"a":2}'), *end("tool_use", 30)])
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hmm", "signature": ""},
        {"type": "text", "text": "Oslo"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"b": 1, "a": 2}},
    ]
    assert list(body["content"][2]["input"]) == ["b", "a"]
    assert (body["stop_reason"], exact) == ("tool_use", True)
    assert body["usage"] == {"cache_read_input_tokens": 9, "input_tokens": 1, "output_tokens": 30}
    assert list(body) == list(START["message"])


@pytest.mark.parametrize("pieces", [(), ('{"a":',)])
def test_arguments_that_are_none_are_an_empty_object(pieces: tuple[str, ...]) -> None:
    body, _ = message([*call(0, *pieces), *end("max_tokens", 3)])
    assert body["content"][0]["input"] == {}


@pytest.mark.parametrize(
    ("events", "max_tokens", "exact"),
    [
        ([*TEXT, *end("max_tokens", 1)], 1, True),
        ([*TEXT, *end("max_tokens", 3)], 3, False),
        ([*TEXT, *end("end_turn", 3)], 3, True),
        ([*TEXT, *end("max_tokens", 3)], 4096, False),
        (end("end_turn", 1), 8, True),
        (end("max_tokens", 1), 1, False),
        (end("end_turn", 4), 8, False),
    ],
    ids=[
        "all shown",
        "held back at the limit",
        "ended by itself",
        "at the context's end",
        "nothing",
        "held back",
        "parsed to nothing",
    ],
)
def test_text_that_may_be_missing_is_marked(events: list[Json], max_tokens: int, exact: bool) -> None:
    assert message(events, max_tokens)[1] is exact


@pytest.mark.parametrize("events", [[], TEXT, [*TEXT, *end("end_turn", 1)[:1]]])
def test_a_message_that_broke_off_is_a_failure(events: list[Json]) -> None:
    with pytest.raises(UpstreamFailed, match="ended its stream"):
        message(events)


def test_a_message_without_its_beginning_waits_for_one() -> None:
    """The server leaves it out where the first token ends inside a character."""
    assembler = Assembler(Api.MESSAGES, {"max_tokens": 100})
    lacking = []
    for event in [*TEXT, *end("end_turn", 5)]:
        lacking.append(assembler.lacks_start)
        assembler.feed(event)
    assert not any(lacking)
    assert assembler.lacks_start
    start = start_left_out("m2", "tiny", 10, 9, 7)
    assembler.feed(start.event)
    assert not assembler.lacks_start
    status, body = assembler.result()
    assert (status, start.counted, assembler.exact) == (200, True, True)
    assert orjson.dumps({**body, "id": "m1"}) == orjson.dumps(message([*TEXT, *end("end_turn", 5)])[0])


@pytest.mark.parametrize(
    ("total", "reused", "cached", "evaluated"),
    [(10, None, 0, 10), (None, 4, 4, 3), (None, None, 0, 7), (3, 4, 3, 0)],
)
def test_what_is_not_known_counts_as_evaluated(
    total: int | None, reused: int | None, cached: int, evaluated: int
) -> None:
    start = start_left_out("m", "tiny", total, reused, 7)
    usage = {"cache_read_input_tokens": cached, "input_tokens": evaluated, "output_tokens": 0}
    assert start.event["message"]["usage"] == usage
    assert start.counted == (None not in (total, reused))


@pytest.mark.parametrize("kept", [["message_stop"], ["message_delta"], []])
def test_a_message_that_broke_off_lacks_more_than_its_beginning(kept: list[str]) -> None:
    assembler = Assembler(Api.MESSAGES, {"max_tokens": 100})
    for event in [*TEXT, *(each for each in end("end_turn", 5) if each["type"] in kept)]:
        assembler.feed(event)
    if kept != ["message_stop"]:
        assert not assembler.lacks_start
    with pytest.raises(UpstreamFailed):
        assembler.result()


@pytest.mark.parametrize(
    ("delta", "block"),
    [
        ({"type": "text_delta", "text": "on"}, [{"type": "text", "text": "on"}]),
        ({"type": "signature_delta", "signature": ""}, [{"type": "thinking", "thinking": "", "signature": ""}]),
        ({"type": "input_json_delta", "partial_json": "{}"}, []),
    ],
)
def test_what_is_added_to_a_block_that_never_began_is_marked(delta: Json, block: list[Json]) -> None:
    """llama-server signs the thought of a message that it goes on with, and that it does not repeat."""
    body, exact = message([{"type": "content_block_delta", "index": 0, "delta": delta}, *TEXT, *end("end_turn", 3)])
    assert (body["content"], exact) == ([*block, {"type": "text", "text": "Oslo"}], False)


def test_an_error_needs_no_beginning() -> None:
    assembler = Assembler(Api.MESSAGES, {"max_tokens": 100})
    for event in [{"error": {"code": 500}}, *TEXT, *end("end_turn", 5)]:
        assembler.feed(event)
    assert not assembler.lacks_start
    assert assembler.result()[0] == 500


def test_a_response_that_broke_off_is_a_failure() -> None:
    assembler = Assembler(Api.RESPONSES, {})
    assembler.feed({"type": "response.created", "response": {"id": "r"}})
    with pytest.raises(UpstreamFailed, match="ended its stream"):
        assembler.result()


def test_the_error_of_a_stream_is_the_answer() -> None:
    assembler = Assembler(Api.MESSAGES, {})
    error = {"error": {"code": 500, "message": "no", "type": "server_error"}}
    assembler.feed(error)
    assert assembler.result() == (500, error)


def test_what_a_response_counts_is_not_lost() -> None:
    assembler = Assembler(Api.RESPONSES, {"max_output_tokens": 2})
    said = {"id": "r", "object": "response", "created_at": 1, "status": "completed", "model": "m", "output": []}
    usage = {"input_tokens": 3, "output_tokens": 1}
    timings = {"cache_n": 1, "prompt_n": 2}
    assembler.feed({"type": "response.completed", "response": {**said, "usage": usage}, "timings": timings})
    assert assembler.result()[1]["usage"] == usage
    assert assembler.beside == ({"timings": timings},)
