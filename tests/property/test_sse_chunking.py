"""However a stream is cut into chunks, its events, its filtered bytes and its tail are the same."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.sse import ProgressFilter, SSEReader, StreamTail, data_of
from prefixproxy.types import Api

TEXT = st.text(
    st.sampled_from(["a", "é", "\u2028", "\u0085", "\U0001f600", "\n", "\r", "\\", '"', "{", "}", ":", " ", "d"]),
    max_size=6,
)
PROGRESS = {"total": 100, "cache": 60, "processed": 60}


def chat_event(text: str, *, progress: bool) -> bytes:
    delta = {"role": "assistant", "content": None} if progress else {"content": text}
    value: dict[str, object] = {"choices": [{"index": 0, "delta": delta}]}
    if progress:
        value["prompt_progress"] = PROGRESS
    return b"data: " + orjson.dumps(value)


EVENTS = st.one_of(
    st.builds(chat_event, TEXT, progress=st.booleans()),
    st.sampled_from([b":", b": ping", b"event: x\ndata: {}", b"data: [DONE]", b"data: {broken", b"data: a\ndata: b"]),
)
STREAMS = st.lists(st.tuples(EVENTS, st.sampled_from([b"\n\n", b"\r\n\r\n"])), max_size=8)


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """The events of a stream, and the same bytes in chunks cut anywhere."""
    events = [
        event.replace(b"\n", b"\r\n") + end if end == b"\r\n\r\n" else event + end for event, end in draw(STREAMS)
    ]
    whole = b"".join(events)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return events, [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@given(cut_streams())
def test_any_chunking_gives_the_same_events(stream: tuple[list[bytes], list[bytes]]) -> None:
    events, chunks = stream
    reader = SSEReader()
    assert [event for chunk in chunks for event in reader.feed(chunk)] == events
    assert reader.close() == b""


@given(st.lists(st.binary(max_size=20)))
def test_no_byte_is_lost_whatever_they_are(chunks: list[bytes]) -> None:
    reader = SSEReader()
    events = [event for chunk in chunks for event in reader.feed(chunk)]
    assert b"".join(events) + reader.close() == b"".join(chunks)


@given(cut_streams())
def test_the_filter_drops_progress_before_the_first_data_event_and_nothing_else(
    stream: tuple[list[bytes], list[bytes]],
) -> None:
    events, chunks = stream
    expected, passing = [], False
    for event in events:
        if not passing and b"prompt_progress" in event and b'"content":null' in event:
            continue
        passing = passing or data_of(event) is not None
        expected.append(event)
    watcher = ProgressFilter(Api.CHAT)
    assert b"".join(watcher.feed(chunk) for chunk in chunks) + watcher.close() == b"".join(expected)


@given(st.lists(st.binary(max_size=30)), st.booleans())
def test_the_filter_without_progress_is_the_identity(chunks: list[bytes], remove: bool) -> None:
    watcher = ProgressFilter(Api.CHAT, remove=remove)
    assert b"".join(watcher.feed(chunk) for chunk in chunks) + watcher.close() == b"".join(chunks)


@given(cut_streams(), st.integers(1, 200))
def test_the_tail_reads_the_same_from_any_chunking(stream: tuple[list[bytes], list[bytes]], kept: int) -> None:
    _events, chunks = stream
    cut, whole = StreamTail(tail_bytes=kept), StreamTail(tail_bytes=kept)
    for chunk in chunks:
        cut.feed(chunk)
    whole.feed(b"".join(chunks))
    assert cut.last_objects(3) == whole.last_objects(3)
    assert cut.last_events(3) == whole.last_events(3)
