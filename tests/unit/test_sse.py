"""Events cut apart as bytes, our own progress removed, and the end of a stream read from its tail."""

from __future__ import annotations

import orjson
import pytest

from prefixproxy.sse import (
    Progress,
    ProgressFilter,
    SSEOverflow,
    SSEReader,
    StreamTail,
    WholeEvents,
    data_of,
    is_error,
    object_of,
)
from prefixproxy.types import Api


def sse(*values: object) -> bytes:
    return b"".join(b"data: " + orjson.dumps(value) + b"\n\n" for value in values)


# --- SSEReader ---


def test_events_keep_their_blank_line() -> None:
    assert SSEReader().feed(b"data: 1\n\ndata: 2\r\n\r\n: ping\n\nrest") == [
        b"data: 1\n\n",
        b"data: 2\r\n\r\n",
        b": ping\n\n",
    ]


@pytest.mark.parametrize("terminator", [b"\n\n", b"\r\n\r\n"])
def test_an_event_ends_where_its_last_byte_arrives(terminator: bytes) -> None:
    reader = SSEReader()
    for i in range(len(b"data: 1" + terminator) - 1):
        assert reader.feed((b"data: 1" + terminator)[i : i + 1]) == []
    assert reader.feed(terminator[-1:]) == [b"data: 1" + terminator]


def test_unicode_line_separators_do_not_end_an_event() -> None:
    event = 'data: {"text":"a\u2028b\u0085c\u2029d"}\n\n'.encode()
    assert SSEReader().feed(event) == [event]


def test_close_returns_the_unfinished_rest_once() -> None:
    reader = SSEReader()
    assert reader.feed(b"data: 1\n\ndata: 2\n") == [b"data: 1\n\n"]
    assert reader.close() == b"data: 2\n"
    assert reader.close() == b""
    assert reader.feed(b"\ndata: 3\n\n") == [b"\ndata: 3\n\n"]


def test_an_event_without_end_is_refused_at_the_bound() -> None:
    reader = SSEReader(max_event_bytes=10)
    assert reader.feed(b"0123456789") == []
    with pytest.raises(SSEOverflow, match="more than 10 bytes"):
        reader.feed(b"0")


def test_whole_events_come_out_before_the_bound_is_felt() -> None:
    reader = SSEReader(max_event_bytes=10)
    assert reader.feed(b"data: 1\n\n01234567890") == [b"data: 1\n\n"]
    with pytest.raises(SSEOverflow):
        reader.feed(b"0")
    assert reader.close() == b"012345678900"


def test_many_events_in_one_chunk_may_exceed_the_bound_together() -> None:
    assert len(SSEReader(max_event_bytes=10).feed(b"data: 1\n\n" * 50)) == 50


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b'data: {"a":1}\n\n', b'{"a":1}'),
        (b'data:{"a":1}\r\n\r\n', b'{"a":1}'),
        (b"event: message_stop\ndata: {}\n\n", b"{}"),
        (b"data: one\ndata: two\n\n", b"one\ntwo"),
        (b"data\n\n", b""),
        (b":\n\n", None),
        (b"event: ping\n\n", None),
        (b"database: 1\n\n", None),
    ],
)
def test_data_of(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data


@pytest.mark.parametrize("event", [b"data: [DONE]\n\n", b"data: {broken\n\n", b":\n\n", b"data: [1]\n\n"])
def test_object_of_is_none_for_what_is_no_object(event: bytes) -> None:
    assert object_of(event) is None


# --- StreamTail ---


def test_tail_reads_the_last_events_of_a_short_stream() -> None:
    tail = StreamTail()
    tail.feed(sse({"n": 1}, {"n": 2}) + b": ping\n\n")
    tail.feed(sse({"n": 3}) + b"data: [DONE]\n\n")
    assert tail.last_events(3) == [b'{"n":2}', b'{"n":3}', b"[DONE]"]
    assert tail.last_objects() == [{"n": 1}, {"n": 1}, {"n": 2}, {"n": 3}]


def test_tail_is_bounded_and_still_has_the_first_and_the_last_event() -> None:
    tail = StreamTail(tail_bytes=100)
    for n in range(1000):
        tail.feed(sse({"n": n}))
    assert tail.total_bytes > 10_000
    assert tail._kept <= 200
    assert tail.last_objects(2) == [{"n": 0}, {"n": 998}, {"n": 999}]


def test_timings_of_an_event_that_is_longer_than_the_tail() -> None:
    tail = StreamTail(tail_bytes=200)
    tail.feed(sse({"content": "x"}, {"content": "", "prompt": "y" * 1000, "timings": {"cache_n": 3, "prompt_n": 4}}))
    assert tail.last_objects(1) == [{"content": "x"}, {"timings": {"cache_n": 3, "prompt_n": 4}}]


def test_a_cut_event_without_timings_gives_nothing() -> None:
    tail = StreamTail(tail_bytes=50, head_bytes=0)
    tail.feed(sse({"prompt": "y" * 1000}))
    assert tail.last_objects(1) == []


def test_tail_reads_lines_of_json() -> None:
    tail = StreamTail()
    tail.feed(b'{"done":false}\n{"do')
    tail.feed(b'ne":true,"eval_count":2}\n')
    assert tail.last_objects(1) == [{"done": False}, {"done": True, "eval_count": 2}]


def test_tail_of_nothing_is_empty() -> None:
    assert StreamTail().last_objects() == []


# --- ProgressFilter ---

PROGRESS = {"total": 100, "cache": 60, "processed": 60, "time_ms": 0}
ROLE = {"role": "assistant", "content": None}
FIRST = {"choices": [{"index": 0, "delta": ROLE}]}


def chat_progress(processed: int) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": ROLE}], "prompt_progress": PROGRESS | {"processed": processed}}


def test_chat_progress_is_removed_and_the_first_role_delta_stays() -> None:
    watcher = ProgressFilter(Api.CHAT)
    assert watcher.feed(sse(chat_progress(60), chat_progress(100))) == b""
    assert watcher.progress == Progress(total=100, cached=60, processed=100)
    assert not watcher.first_token_seen
    assert watcher.feed(sse(FIRST)) == sse(FIRST)
    assert watcher.first_token_seen


def test_everything_after_the_first_token_passes_as_it_came() -> None:
    watcher = ProgressFilter(Api.CHAT)
    watcher.feed(sse(chat_progress(100), FIRST))
    late = sse(chat_progress(100)) + b"data: {half an ev"
    assert watcher.feed(late) == late
    assert watcher.feed(b"") == b""


def text(key: str, said: str, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {key: said}}], **more}


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_text_that_comes_with_the_first_progress_goes_in_front_of_the_first_tokens(size: int) -> None:
    """The server sends it with the first token where nobody asks for progress."""
    early = text("content", '<think>\n"\\', prompt_progress=PROGRESS)
    stream = sse(FIRST, early, chat_progress(100), FIRST, text("content", "so"), text("content", "on"))
    watcher = ProgressFilter(Api.CHAT)
    got = b"".join(watcher.feed(stream[at : at + size]) for at in range(0, len(stream), size))
    assert got == sse(FIRST, text("content", '<think>\n"\\so'), text("content", "on"))
    assert watcher.progress == Progress(100, 60, 100)


def test_text_of_another_kind_stays_an_event_of_its_own() -> None:
    watcher = ProgressFilter(Api.CHAT)
    early = text("reasoning_content", "Hm", prompt_progress=PROGRESS)
    assert watcher.feed(sse(FIRST, early, chat_progress(100))) == b""
    assert not watcher.first_token_seen
    assert watcher.feed(sse(text("content", "so"))) == sse(text("reasoning_content", "Hm"), text("content", "so"))
    assert watcher.first_token_seen


def test_a_server_that_tells_no_progress_loses_nothing() -> None:
    watcher = ProgressFilter(Api.CHAT)
    assert watcher.feed(sse(FIRST)) + watcher.feed(sse(text("content", "so"))) == sse(FIRST, text("content", "so"))
    assert watcher.first_token_seen


@pytest.mark.parametrize("end", [[], [{"error": {"code": 500}}]])
def test_what_waits_for_a_first_token_that_never_comes_is_let_go(end: list[dict[str, object]]) -> None:
    for begun in ([FIRST], [FIRST, text("content", "a", prompt_progress=PROGRESS)]):
        watcher = ProgressFilter(Api.CHAT)
        kept = [FIRST] if len(begun) == 1 else [text("content", "a")]
        assert watcher.feed(sse(*begun)) + watcher.feed(sse(*end)) + watcher.close() == sse(*kept, *end)
        assert not watcher.first_token_seen


def test_the_rest_of_the_chunk_with_the_first_token_is_not_held_back() -> None:
    watcher = ProgressFilter(Api.CHAT)
    assert watcher.feed(sse(chat_progress(100), FIRST) + b"data: {half") == sse(FIRST) + b"data: {half"


def test_pings_pass_during_prefill() -> None:
    watcher = ProgressFilter(Api.CHAT)
    assert watcher.feed(b":\n\n" + sse(chat_progress(60)) + b":\n\n") == b":\n\n:\n\n"
    assert not watcher.first_token_seen


def test_progress_the_client_asked_for_stays() -> None:
    watcher = ProgressFilter(Api.CHAT, remove=False)
    stream = sse(chat_progress(60), chat_progress(100), FIRST)
    assert watcher.feed(stream) == stream
    assert watcher.progress == Progress(100, 60, 100)
    assert watcher.first_token_seen


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (Api.COMPLETIONS, {"choices": [{"text": "", "index": 0}], "prompt_progress": PROGRESS}),
        (Api.COMPLETION, {"content": "", "tokens": [0], "prompt_progress": PROGRESS}),
        (Api.INFILL, {"content": "", "tokens": [0], "prompt_progress": PROGRESS}),
    ],
)
def test_progress_of_completions_is_removed(api: Api, event: dict[str, object]) -> None:
    watcher = ProgressFilter(api)
    assert watcher.feed(sse(event)) == b""
    assert watcher.progress == Progress(100, 60, 60)


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (Api.COMPLETIONS, {"choices": [{"text": "a"}], "prompt_progress": PROGRESS}),
        (Api.COMPLETION, {"content": "a", "prompt_progress": PROGRESS}),
    ],
)
def test_an_event_with_text_is_never_removed(api: Api, event: dict[str, object]) -> None:
    assert ProgressFilter(api).feed(sse(event)) == sse(event)


def response(kind: str, **more: object) -> bytes:
    return f"event: {kind}\n".encode() + sse({"type": kind, "response": {"status": "in_progress"}, **more})


def test_responses_keep_one_in_progress_event_without_its_progress() -> None:
    watcher = ProgressFilter(Api.RESPONSES)
    created, plain = response("response.created"), response("response.in_progress")
    reported = response("response.in_progress", prompt_progress=PROGRESS)
    assert watcher.feed(created + reported + reported) == created + plain
    assert watcher.progress == Progress(100, 60, 60)
    assert not watcher.first_token_seen
    delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n'
    assert watcher.feed(delta) == delta
    assert watcher.first_token_seen


def test_an_error_is_no_token() -> None:
    watcher = ProgressFilter(Api.CHAT)
    error = sse({"error": {"code": 500, "message": "m", "type": "server_error"}})
    assert watcher.feed(error) == error
    assert not watcher.first_token_seen


def test_an_oversized_first_event_switches_reading_off() -> None:
    watcher = ProgressFilter(Api.COMPLETION, max_event_bytes=10)
    assert watcher.feed(b"data: 0123456789") == b"data: 0123456789"
    assert watcher.feed(b" and more") == b" and more"


def test_a_stream_cut_in_its_first_event_is_not_swallowed() -> None:
    watcher = ProgressFilter(Api.CHAT)
    assert watcher.feed(b"data: {") == b""
    assert watcher.close() == b"data: {"


@pytest.mark.parametrize("malformed", [{"total": "x", "cache": 0, "processed": 0}, 3, None])
def test_malformed_progress_passes_as_the_first_event(malformed: object) -> None:
    event = sse({"choices": [{"delta": ROLE}], "prompt_progress": malformed})
    assert ProgressFilter(Api.CHAT).feed(event) == event


DONE = b"data: [DONE]\n\n"
FINISHED = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 1}}


@pytest.mark.parametrize(
    ("api", "stream", "ended"),
    [
        (Api.CHAT, b"", False),
        (Api.CHAT, b": ping\n\n", False),
        (Api.CHAT, sse(FIRST), False),
        (Api.CHAT, sse(FIRST, FINISHED), True),
        (Api.CHAT, sse(FIRST, FINISHED, USAGE), True),
        (Api.CHAT, sse(FIRST) + DONE, True),
        (Api.CHAT, sse(FIRST) + DONE.strip(), True),
        (Api.CHAT, sse(FIRST, FINISHED)[:-12], False),
        (Api.COMPLETIONS, sse({"choices": [{"text": "a", "finish_reason": None}]}), False),
        (Api.COMPLETIONS, sse({"choices": [{"text": "", "finish_reason": "length"}]}), True),
        (Api.COMPLETION, sse({"content": "a", "stop": False}), False),
        (Api.COMPLETION, sse({"content": "", "prompt_progress": PROGRESS}), False),
        (Api.COMPLETION, sse({"content": "a", "stop": False}, {"content": "", "stop": True}), True),
        (Api.COMPLETION, sse({"content": "a", "stop": False}, {"model": "only what response_fields asked for"}), True),
        (Api.COMPLETION, sse({"content": "a", "stop": False}, {}), True),
        (Api.COMPLETION, sse({"content": "a", "stop": False}) + b"data: null\n\n", False),
        (Api.COMPLETION, sse({"content": "a", "stop": False}, {"error": {"code": 500}}), False),
        (Api.RESPONSES, sse({"type": "response.output_text.delta"}), False),
        (Api.RESPONSES, sse({"type": "response.completed"}), True),
        (Api.RESPONSES, sse({"type": "response.incomplete"}), True),
        (Api.MESSAGES, sse({"type": "message_delta"}), False),
        (Api.MESSAGES, sse({"type": "message_delta"}, {"type": "message_stop"}), True),
        (Api.OLLAMA_CHAT, b'{"message":{},"done":false}\n', False),
        (Api.OLLAMA_CHAT, b'{"message":{},"done":false}\n{"done":true}\n', True),
    ],
)
def test_a_stream_has_its_end_or_has_not(api: Api, stream: bytes, ended: bool) -> None:
    tail = StreamTail()
    tail.feed(stream)
    assert tail.ended(api) is ended


@pytest.mark.parametrize(("cut", "ended"), [(0, True), (3, False)])
def test_a_last_event_too_long_to_keep_is_the_end_if_it_is_whole(cut: int, ended: bool) -> None:
    long = sse({"content": "", "prompt": "x" * 5000, "stop": True}).rstrip()
    tail = StreamTail(tail_bytes=1000)
    tail.feed(sse({"content": "a", "stop": False}) + long[: len(long) - cut])
    assert tail.ended(Api.COMPLETION) is ended


@pytest.mark.parametrize(
    "event",
    [{"error": {"message": "m"}}, {"error": "m"}, {"type": "error", "message": "m"}, {"type": "response.failed"}],
)
def test_errors_are_known_in_every_spelling(event: dict[str, object]) -> None:
    assert is_error(event)
    assert not is_error({"type": "response.completed", "response": {"error": None}})


@pytest.mark.parametrize("cut", range(1, 40))
def test_half_an_event_is_held_back_until_it_is_whole(cut: int) -> None:
    stream, first = b'data: {"a":1}\n\ndata: {"b":2}\r\n\r\ndata: [DONE]', b'data: {"a":1}\n\n'
    whole = WholeEvents()
    begun = whole.feed(stream[:cut])
    assert begun in (b"", first, stream[: stream.index(b"data: [DONE]")])
    assert begun + whole.feed(stream[cut:]) == stream[: stream.index(b"data: [DONE]")]
    assert (whole.close(), whole.close()) == (b"data: [DONE]", b"")


def test_lines_are_held_back_likewise_and_what_is_too_long_passes() -> None:
    lines = WholeEvents((b"\n",), max_bytes=4)
    assert [lines.feed(part) for part in (b'{"a', b"}\n{", b"}\n", b"12345", b"6\n")] == [
        b"",
        b'{"a}\n',
        b"{}\n",
        b"12345",
        b"6\n",
    ]
