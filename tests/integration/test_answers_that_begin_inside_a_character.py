"""An answer whose first token is the beginning of a character: llama-server holds that token back, and with it what its
streams begin with. For Messages that is the only event that says whose answer it is and what its prompt cost."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_template import TOOLS_AND_REASONING
from running_engine import RunningEngine, running_engine
from running_proxy import RunningProxy, eventually, proxied_stub, proxy_in_thread
from stub_upstream import Exchange, StubUpstream

from prefixproxy.engine import EngineSettings
from prefixproxy.types import CacheSource, RequestRecord, SlotState

pytestmark = pytest.mark.timeout(300)

Json = dict[str, Any]

LIMIT_S = 120.0
UNLIKE = re.compile(
    rb'("(?:id|item_id)":\s?")[^"]*|("(?:created|created_at|completed_at|[a-z_]+_ms|[a-z_]+_second)":\s?)[-+.e0-9]+'
)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "Smile."}]
BODIES: dict[str, Json] = {
    CHAT: {"messages": ASKED},
    RESPONSES: {"input": "Smile."},
    MESSAGES: {"messages": ASKED},
    "/v1/completions": {"prompt": "Smile.\n"},
    "/completion": {"prompt": "Smile.\n"},
    "/infill": {"input_prefix": "a", "input_suffix": "b\n", "prompt": ""},
}
WHOLE = "😀!日本."
LIMITS = [1, 2, 3, 4, 5, 6, 50]
"""Within the first character, behind it, and within the second one."""
STOPS = {"a character": "😀", "behind it": "!", "never whole": WHOLE + "?"}


@pytest.fixture(scope="module")
def smiling(tiny_models: Callable[[str], Path]) -> Iterator[RunningEngine]:
    extra: dict[str, int | str] = {"cpuparams.n_threads": 1, "chat_template": TOOLS_AND_REASONING}
    with running_engine(EngineSettings(tiny_models("smiling"), parallel=1, ctx=2048, extra=extra)) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(smiling: RunningEngine) -> Iterator[RunningProxy]:
    with proxy_in_thread(smiling.url) as running:
        yield running


def requested(path: str, *, stream: bool, limit: int = 50, stop: str = "") -> Json:
    of_messages = path == MESSAGES
    body = {**BODIES[path], "temperature": 0, "stream": stream, "max_tokens": limit}
    return body | ({"stop_sequences" if of_messages else "stop": [stop]} if stop else {})


def answers(smiling: RunningEngine, proxy: RunningProxy, path: str, body: Json) -> tuple[httpx.Response, ...]:
    """Straight and through the proxy, each with the prompt in a slot already."""
    urls = (smiling.url, smiling.url, proxy.url)
    return tuple(httpx.post(url + path, json=body, timeout=LIMIT_S) for url in urls)[1:]


def comparable(got: httpx.Response) -> tuple[int, str, bytes]:
    return got.status_code, got.headers["content-type"], UNLIKE.sub(rb"\1\2", got.content)


def text_of(body: Any) -> str:
    """All that was said, whichever the API."""
    if isinstance(body, dict):
        said = (value for key, value in body.items() if key in ("text", "content", "choices", "message", "output"))
        return "".join(map(text_of, said))
    return "".join(map(text_of, body)) if isinstance(body, list) else str(body or "")


def tokens_of(body: Json) -> int:
    """Of prompt and answer."""
    usage = body.get("usage") or {"a": body.get("tokens_evaluated"), "b": body.get("tokens_predicted")}
    return sum(n for key, n in usage.items() if isinstance(n, int) and key != "total_tokens")


def assert_same_or_marked(straight: httpx.Response, got: httpx.Response) -> None:
    """Field for field; where the server kept its last characters to itself, all but these, and that is said."""
    if "x-prefixproxy-assembled" not in got.headers:
        assert comparable(got) == comparable(straight)
        return
    assert got.headers["x-prefixproxy-assembled"] == "inexact"
    assert comparable(got)[:2] == comparable(straight)[:2]
    assert text_of(straight.json()).startswith(text_of(got.json()))
    assert tokens_of(got.json()) == tokens_of(straight.json())


@pytest.mark.engine
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("path", BODIES)
def test_a_json_answer_is_the_servers_own(smiling: RunningEngine, proxy: RunningProxy, path: str, limit: int) -> None:
    straight, got = answers(smiling, proxy, path, requested(path, stream=False, limit=limit))
    assert_same_or_marked(straight, got)
    if limit == 50:
        assert text_of(got.json()) == text_of(straight.json())
        assert path == "/infill" or text_of(got.json()) == WHOLE


@pytest.mark.engine
@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("path", [path for path in BODIES if path != RESPONSES])
def test_a_json_answer_that_was_stopped_is_too(
    smiling: RunningEngine, proxy: RunningProxy, path: str, stop: str
) -> None:
    straight, got = answers(smiling, proxy, path, requested(path, stream=False, stop=stop))
    assert_same_or_marked(straight, got)
    assert text_of(got.json()) == text_of(straight.json())


@pytest.mark.engine
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_is_the_servers_own(smiling: RunningEngine, proxy: RunningProxy, path: str, limit: int) -> None:
    """But for Responses: what begins them is there once, with the progress we ask for, where the server repeats it
    with every token, or leaves it out."""
    straight, got = map(comparable, answers(smiling, proxy, path, requested(path, stream=True, limit=limit)))
    if path == RESPONSES:
        begun = [b"event: response.created", b"event: response.in_progress"]
        assert [event.split(b"\n")[0] for event in got[2].split(b"\n\n")[:2]] == begun
        straight, got = ((*each[:2], unbegun(each[2])) for each in (straight, got))
    assert got == straight
    if path == MESSAGES:
        assert b"message_start" not in straight[2]


def unbegun(stream: bytes) -> bytes:
    events = stream.split(b"\n\n")
    begins = (b"event: response.created\n", b"event: response.in_progress\n")
    return b"\n\n".join(event for event in events if not event.startswith(begins))


# --- what the proxy adds, with a server that answers to order ---

PROMPT_TOKENS, REUSED = 719, 640
STREAM: list[Json] = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "😀"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " hi"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 5},
    },
    {"type": "message_stop"},
]


class Telling:
    """A server that tells of a request what it is told to tell."""

    def __init__(self, stub: StubUpstream, *, reused: bool, counts: bool) -> None:
        self._stub = stub
        self._reused = reused
        self.running: RunningProxy | None = None
        stub.routes["/slots"] = self._slots
        if counts:
            stub.routes["/v1/messages/count_tokens"] = self._count

    async def _slots(self, exchange: Exchange) -> None:
        rows: list[Json] = []
        for slot in self._stub.slots:
            row: Json = {"id": slot.id, "is_processing": slot.busy, "n_prompt_tokens": slot.n_prompt_tokens}
            if self._reused and slot.busy:
                row |= {"n_prompt_tokens_cache": REUSED, "n_prompt_tokens_processed": PROMPT_TOKENS - REUSED}
            rows.append(row)
        await exchange.json(200, rows)

    async def _count(self, exchange: Exchange) -> None:
        await exchange.json(200, {"input_tokens": PROMPT_TOKENS})

    async def answer(self, exchange: Exchange) -> None:
        """Not before the proxy knows the slot: an answer takes longer than looking for it."""
        await exchange.stream_head()
        await eventually(self._is_located)
        for event in STREAM:
            await exchange.send(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json.dumps(event).encode()))
        await exchange.end()

    def _is_located(self) -> bool:
        assert self.running is not None
        slots = self.running.proxy.parts.dispatcher.snapshot().slots
        return any(slot.state is SlotState.LEASED for slot in slots)


@asynccontextmanager
async def telling(*, reused: bool = True, counts: bool = True) -> AsyncIterator[RunningProxy]:
    stub = StubUpstream()
    told = Telling(stub, reused=reused, counts=counts)
    async with proxied_stub(stub) as (_, running):
        told.running = running
        stub.next_answers.append(told.answer)
        yield running


async def asked(running: RunningProxy, *, stream: bool) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.url) as client:
        body = {"max_tokens": 40, "stream": stream, "messages": ASKED}
        return await client.post(MESSAGES, json=body)


async def record_of(running: RunningProxy, got: httpx.Response) -> RequestRecord:
    journal, ident = running.proxy.parts.telemetry.journal, got.headers["x-prefixproxy-request-id"]
    await eventually(lambda: journal.newest(1))
    [record] = journal.newest(1)
    assert record.id == ident
    return record


@pytest.mark.anyio
async def test_what_the_server_tells_elsewhere_completes_the_answer() -> None:
    async with telling() as running:
        got = await asked(running, stream=False)
        record = await record_of(running, got)
    ident = got.headers["x-prefixproxy-request-id"]
    assert (got.status_code, got.headers.get("x-prefixproxy-assembled")) == (200, None)
    assert list(got.json().items()) == [
        ("id", f"chatcmpl-{ident}"),
        ("type", "message"),
        ("role", "assistant"),
        ("content", [{"type": "text", "text": "😀 hi"}]),
        ("model", "stub"),
        ("stop_reason", "end_turn"),
        ("stop_sequence", None),
        ("usage", {"cache_read_input_tokens": 640, "input_tokens": 79, "output_tokens": 5}),
    ]
    assert (record.cache_n, record.prompt_n, record.predicted_n) == (640, 79, 5)
    assert record.cache_source is CacheSource.REPORTED


@pytest.mark.anyio
async def test_a_stream_is_counted_too_and_not_changed() -> None:
    async with telling() as running:
        got = await asked(running, stream=True)
        record = await record_of(running, got)
    assert [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: ")] == STREAM
    assert (record.cache_n, record.prompt_n, record.predicted_n) == (640, 79, 5)


@pytest.mark.anyio
@pytest.mark.parametrize(("reused", "counts"), [(False, True), (True, False), (False, False)])
async def test_what_nobody_tells_is_marked_and_not_counted(reused: bool, counts: bool) -> None:
    async with telling(reused=reused, counts=counts) as running:
        got = await asked(running, stream=False)
        record = await record_of(running, got)
    assert (got.status_code, got.headers["x-prefixproxy-assembled"]) == (200, "inexact")
    assert got.json()["content"] == [{"type": "text", "text": "😀 hi"}]
    assert got.json()["stop_reason"] == "end_turn"
    if counts:
        assert got.json()["usage"] == {"cache_read_input_tokens": 0, "input_tokens": 719, "output_tokens": 5}
    assert (record.cache_n, record.cache_source) == (None, CacheSource.UNKNOWN)
