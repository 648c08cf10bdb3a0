"""Ollama's lines: passed on at once, read for the first token and for what was said."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.lines import LineWatch, message_in, object_in
from prefixproxy.sse import StreamTail
from prefixproxy.types import Api

TOKEN = b'{"message":{"content":"a\xe2\x80\xa8b"},"done":false}\n'
LAST = b'{"message":{"content":""},"done":true,"total_duration":5,"prompt_eval_count":7}\n'
STREAM = TOKEN + TOKEN + LAST


def objects(lines: list[bytes]) -> list[dict[str, Any]]:
    return [value for line in lines if (value := object_in(line)) is not None]


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=6))
def test_every_byte_passes_at_once_and_the_first_line_is_the_first_token(cuts: list[int]) -> None:
    watch, passed = LineWatch(), 0
    places = sorted({0, len(STREAM), *cuts})
    for start, end in pairwise(places):
        assert watch.feed(STREAM[start:end]) == STREAM[start:end]
        passed = end
        assert watch.first_token_seen == (passed >= len(TOKEN))
    assert watch.close() == b""


def test_an_error_is_no_token() -> None:
    watch = LineWatch()
    watch.feed(b'{"error":"no"}\n')
    assert not watch.first_token_seen


def test_a_first_line_without_end_is_not_kept_for_ever() -> None:
    watch = LineWatch(max_line_bytes=8)
    watch.feed(b"123456789")
    assert watch.first_token_seen


@pytest.mark.parametrize(
    ("api", "lines", "said"),
    [
        (Api.OLLAMA_CHAT, [TOKEN, TOKEN, LAST], "a\u2028ba\u2028b"),
        (Api.OLLAMA_GENERATE, [b'{"response":"x"}', b'{"response":"y","done":true}'], "xy"),
    ],
)
def test_what_was_said(api: Api, lines: list[bytes], said: str) -> None:
    message = message_in(api, objects(lines))
    assert message == {"choices": [{"message": {"role": "assistant", "content": said}}]}


@pytest.mark.parametrize("lines", [[], [TOKEN], [b"nonsense"], [b'{"error":"x"}']])
def test_an_answer_without_its_end_said_nothing(lines: list[bytes]) -> None:
    assert message_in(Api.OLLAMA_CHAT, objects(lines)) is None


def test_the_counts_behind_a_long_context_are_found() -> None:
    """`context` has a number for every token and stands before the counts."""
    last = {"response": "", "done": True, "context": list(range(40_000)), "total_duration": 9, "prompt_eval_count": 7}
    tail = StreamTail()
    tail.feed(b'{"response":"x","done":false}\n')
    tail.feed(orjson.dumps(last) + b"\n")
    assert len(orjson.dumps(last)) > 128 << 10
    assert tail.last_objects()[-1] == {"total_duration": 9, "prompt_eval_count": 7, "done": True}
    assert tail.ended(Api.OLLAMA_GENERATE)


@pytest.mark.parametrize(
    ("api", "stream", "well"),
    [
        (Api.OLLAMA_CHAT, STREAM, True),
        (Api.OLLAMA_CHAT, TOKEN, False),
        (Api.CHAT, b'data: {"choices":[]}\n\ndata: [DONE]\n\n', True),
        (Api.CHAT, b'data: {"choices":[]}\n\n', False),
        (Api.MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (Api.MESSAGES, b'data: {"type":"message_delta"}\n\n', False),
        (Api.RESPONSES, b'data: {"type":"response.completed"}\n\n', True),
        (Api.RESPONSES, b'data: {"type":"response.output_text.delta"}\n\n', False),
    ],
)
def test_a_stream_that_ends_before_its_answer_is_noticed(api: Api, stream: bytes, well: bool) -> None:
    tail = StreamTail()
    tail.feed(stream)
    assert tail.ended(api) is well
