"""Clients of streams are kept while they wait: a head and signs of life first, then the answer as it would have been.

Every wait is held open by the test until the client has its sign of life.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import orjson
import pytest
from running_proxy import RunningProxy, eventually, proxied_stub, running_proxy, until_quiet
from scripted_ollama import ScriptedOllama
from stub_upstream import Exchange, StubUpstream

from prefixproxy.patience.signs import event_of
from prefixproxy.types import Outcome, RequestRecord

pytestmark = pytest.mark.anyio

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SOON: dict[str, Any] = {"patience__after": 0.02, "patience__every": 0.02}
LIMIT_S = 60.0
COMMENT = b": keep-alive\n\n"
SIGN = {CHAT: COMMENT, "/completion": COMMENT, MESSAGES: b'"text":""}}\n\n', RESPONSES: b"event: keepalive\n"}

MESSAGE_EVENTS: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": {"id": "m1", "role": "assistant", "content": [], "usage": {"input_tokens": 7}},
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Fine."}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
    {"type": "message_stop"},
]
ITEM = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
PART = {"type": "output_text", "text": "Fine.", "annotations": []}
RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1, "model": "stub"}
RESPONSE_EVENTS: list[dict[str, Any]] = [
    {"type": "response.created", "response": {"id": "resp_1", "object": "response", "status": "in_progress"}},
    {"type": "response.in_progress", "response": {"id": "resp_1", "object": "response", "status": "in_progress"}},
    {"type": "response.output_item.added", "output_index": 0, "item": {**ITEM, "content": []}},
    {
        "type": "response.content_part.added",
        "output_index": 0,
        "content_index": 0,
        "item_id": "msg_1",
        "part": {**PART, "text": ""},
    },
    {
        "type": "response.output_text.delta",
        "output_index": 0,
        "content_index": 0,
        "item_id": "msg_1",
        "delta": "Fine.",
    },
    {"type": "response.output_item.done", "output_index": 0, "item": {**ITEM, "content": [PART]}},
    {
        "type": "response.completed",
        "response": {**RESPONSE, "status": "completed", "output": [{**ITEM, "content": [PART]}]},
    },
]
EVENTS: dict[str, list[dict[str, Any]]] = {MESSAGES: MESSAGE_EVENTS, RESPONSES: RESPONSE_EVENTS}


def body_of(path: str, **more: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if path == RESPONSES:
        prompt = {"input": "hi"}
    elif path == "/completion":
        prompt = {"prompt": "hi"}
    return {"model": "m", "stream": True, **prompt, **more}


class Held:
    """An upstream that answers once the test lets it: straight away with its head, or with nothing."""

    def __init__(self, stub: StubUpstream, *, head: bool = False) -> None:
        self.go = asyncio.Event()
        self._stub = stub
        self._head = head

    async def __call__(self, exchange: Exchange) -> None:
        events: list[dict[str, Any]] | None = EVENTS.get(exchange.request.path)
        if self._head:
            await exchange.stream_head()
        await self.go.wait()
        if events is None and not self._head:
            return await self._stub.answer(exchange)
        if not self._head:
            await exchange.stream_head()
        for each in [event_of(e) for e in events] if events else self._stub.chat_events(exchange.request):
            await exchange.send(each)
        await exchange.end()


async def stall(exchange: Exchange) -> None:
    await exchange.request.connection_gone.wait()


class Reading:
    """The bytes of one streamed answer as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._chunks = response.aiter_raw()
        self.got = b""

    async def until(self, part: bytes) -> None:
        async with asyncio.timeout(LIMIT_S):
            while part not in self.got:
                self.got += await anext(self._chunks)

    async def rest(self) -> bytes:
        async with asyncio.timeout(LIMIT_S):
            async for chunk in self._chunks:
                self.got += chunk
        return self.got


@asynccontextmanager
async def reading(
    running: RunningProxy, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> AsyncIterator[Reading]:
    async with (
        httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as client,
        client.stream("POST", path, json=body, headers=headers) as response,
    ):
        yield Reading(response)


async def plain(running: RunningProxy, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as client:
        return await client.post(path, json=body)


def newest(running: RunningProxy) -> RequestRecord:
    return running.proxy.parts.telemetry.journal.newest(1)[0]


@pytest.mark.parametrize("head", [True, False], ids=["prefill", "no head"])
async def test_a_chat_gets_comments_and_then_the_bytes_it_would_have_had(head: bool) -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        # On a slow machine this one may be kept waiting too.
        expected = (await plain(running, CHAT, body_of(CHAT, max_tokens=3))).content.replace(COMMENT, b"")
        held = Held(stub, head=head)
        stub.next_answers.append(held)
        async with reading(running, CHAT, body_of(CHAT, max_tokens=3)) as answer:
            await answer.until(COMMENT * 3)
            held.go.set()
            got = await answer.rest()
        assert answer.response.status_code == 200
        assert answer.response.headers["content-type"] == "text/event-stream"
        assert got.replace(COMMENT, b"") == expected
        assert got.endswith(expected)
        assert len(stub.generating()) == 2
        assert (newest(running).outcome, newest(running).cache_n) == (Outcome.OK, 0)


async def test_what_waits_in_the_queue_is_kept_and_generated_once() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        held = Held(stub)
        stub.next_answers.append(held)
        async with reading(running, CHAT, body_of(CHAT)) as first:
            await first.until(COMMENT)
            async with reading(running, CHAT, body_of(CHAT, user="second")) as second:
                await second.until(COMMENT)
                assert len(stub.generating()) == 1
                assert "x-prefixproxy-slot" not in second.response.headers
                assert second.response.headers["x-prefixproxy-request-id"]
                held.go.set()
                assert (await second.rest()).endswith(b"data: [DONE]\n\n")
            assert (await first.rest()).endswith(b"data: [DONE]\n\n")
        assert len(stub.generating()) == 2


async def test_no_sign_comes_behind_the_first_token() -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.stream_head()
        role, first, *others = [e for e in stub.chat_events(exchange.request) if b"prompt_progress" not in e]
        await exchange.send(role + first)
        await go.wait()
        for each in others:
            await exchange.send(each)
        await exchange.end()

    async with proxied_stub(StubUpstream(n_slots=2), **SOON) as (stub, running):
        stub.next_answers.append(slow)
        held = Held(stub)
        async with reading(running, CHAT, body_of(CHAT)) as answer:
            await answer.until(b'"content":"')
            stub.next_answers.append(held)
            async with reading(running, CHAT, body_of(CHAT, user="another")) as other:
                # Time enough for three signs, by the clock that sends them.
                await other.until(COMMENT * 3)
                held.go.set()
                await other.rest()
            go.set()
            got = await answer.rest()
        assert COMMENT not in got[got.index(b'"content":"') :]


async def test_a_json_client_gets_no_head_before_its_answer() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        held = Held(stub)
        stub.next_answers.append(held)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(plain(running, CHAT, body_of(CHAT, stream=False)))
            await stub.arrived(1)
            async with reading(running, CHAT, body_of(CHAT)) as other:
                await other.until(COMMENT * 3)
                held.go.set()
                await other.rest()
        answer = waiting.result()
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.headers["x-prefixproxy-slot"] == "0"
        assert answer.json()["choices"][0]["message"]["content"] == "Fine."


async def test_nobody_is_kept_if_it_is_switched_off() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), patience__after=0) as (stub, running):
        held = Held(stub, head=True)
        stub.next_answers.append(held)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(plain(running, CHAT, body_of(CHAT)))
            await stub.arrived(1)
            held.go.set()
        assert COMMENT not in waiting.result().content
        assert waiting.result().headers["x-prefixproxy-slot"] == "0"


async def test_an_anthropic_client_gets_one_answer_whose_text_block_was_open() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        held = Held(stub)
        stub.next_answers.append(held)
        async with reading(running, MESSAGES, body_of(MESSAGES)) as answer:
            await answer.until(SIGN[MESSAGES])
            held.go.set()
            got = await answer.rest()
        kinds = [line.removeprefix(b"event: ") for line in got.split(b"\n") if line.startswith(b"event: ")]
        assert kinds.count(b"message_start") == kinds.count(b"content_block_start") == kinds.count(b"message_stop") == 1
        assert b'"text":"Fine."' in got
        last = next(line for line in got.split(b"\n") if line.startswith(b'data: {"type":"message_delta"'))
        assert orjson.loads(last.removeprefix(b"data: "))["usage"] == {"input_tokens": 7, "output_tokens": 1}
        assert newest(running).outcome is Outcome.OK


@pytest.mark.parametrize("helper", [False, True], ids=["create", "stream"])
async def test_the_openai_sdk_reads_a_response_that_was_waited_for(helper: bool) -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        held = Held(stub)
        stub.next_answers.append(held)
        kinds: list[str] = []
        ids: set[str] = set()

        def read(event: Any) -> None:
            kinds.append(event.type)
            if event.type == "keepalive":
                held.go.set()
            if event.type in ("response.created", "response.completed"):
                ids.add(event.response.id)

        async with (
            asyncio.timeout(LIMIT_S),
            openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
        ):
            if helper:
                async with client.responses.stream(model="m", input="hi") as stream:
                    async for told in stream:
                        read(told)
                    assert (await stream.get_final_response()).output_text == "Fine."
            else:
                async for event in await client.responses.create(model="m", input="hi", stream=True):
                    read(event)
        assert kinds[0] == "response.created"
        assert kinds.count("response.created") == kinds.count("response.completed") == 1
        assert len(ids) == 1


async def test_the_openai_sdk_reads_a_chat_that_was_waited_for() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        held = Held(stub)
        stub.next_answers.append(held)
        async with (
            asyncio.timeout(LIMIT_S),
            openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
        ):
            messages: Any = [{"role": "user", "content": "hi"}]
            # The head comes early: the call returns before there is any answer.
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
            held.go.set()
            text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == "Fine."


async def test_lines_of_json_are_kept_with_white_space() -> None:
    ollama = ScriptedOllama(num_parallel=1)
    async with ollama:
        upstream = {"name": "o", "url": ollama.url, "kind": "ollama", "slots": 1}
        async with running_proxy(ollama.url, upstreams=[upstream], **SOON) as running:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}]}
            expected = (await plain(running, "/api/chat", body)).content
            ollama.may_prefill.clear()
            async with reading(running, "/api/chat", body) as answer:
                await answer.until(b"   ")
                ollama.may_prefill.set()
                got = await answer.rest()
            assert answer.response.headers["content-type"] == "application/x-ndjson"
            lines = [orjson.loads(line) for line in got.splitlines()]
            assert [line["message"] for line in lines] == [
                orjson.loads(line)["message"] for line in expected.splitlines()
            ]
            assert (newest(running).outcome, lines[-1]["done"]) == (Outcome.OK, True)
            ollama.may_prefill.clear()
            async with reading(running, "/api/chat", {**body, "model": "tiny"}) as answer:
                await answer.until(b" ")
                ollama.fails_with = "the runner has died"
                ollama.may_prefill.set()
                assert orjson.loads((await answer.rest()).splitlines()[-1]) == {"error": "the runner has died"}
            await until_quiet(running)


TOO_LONG = {"error": {"code": 400, "message": "too long", "type": "exceed_context_size_error"}}


def answering(status: int, said: object) -> Callable[[asyncio.Event], Callable[[Exchange], Any]]:
    def held(go: asyncio.Event) -> Callable[[Exchange], Any]:
        async def script(exchange: Exchange) -> None:
            await go.wait()
            await exchange.json(status, said)

        return script

    return held


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/completion"])
async def test_an_error_that_comes_late_is_the_streams_last_event(path: str) -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        go = asyncio.Event()
        stub.next_answers.append(answering(400, TOO_LONG)(go))
        async with reading(running, path, body_of(path)) as answer:
            await answer.until(SIGN[path])
            go.set()
            got = await answer.rest()
        *_, last = got.removesuffix(b"\n\n").split(b"\n")
        value = orjson.loads(last.removeprefix(b"data: "))
        assert value["error"] == TOO_LONG["error"]
        if path in (MESSAGES, RESPONSES):
            assert got.rsplit(b"event: ", 1)[1].startswith(b"error\n")
        assert (newest(running).status, newest(running).outcome) == (200, Outcome.BAD_REQUEST)
        assert len(stub.generating()) == 1


async def test_a_response_begun_early_is_gone_on_from_by_the_upstreams_own_name() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        held = Held(stub)
        stub.next_answers.append(held)
        async with reading(running, RESPONSES, body_of(RESPONSES)) as answer:
            await answer.until(SIGN[RESPONSES])
            held.go.set()
            events = [event for event in (await answer.rest()).split(b"\n\n") if b"response.completed" in event]
        named = orjson.loads(events[0].split(b"data: ")[1])["response"]["id"]
        await plain(running, RESPONSES, {"model": "m", "input": "And?", "previous_response_id": named})
        sent = stub.generating()[-1].json()["previous_response_id"]
        assert sent != named
        assert sent == RESPONSE_EVENTS[0]["response"]["id"]


async def test_the_openai_sdk_raises_what_came_late() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        go = asyncio.Event()
        stub.next_answers.append(answering(400, TOO_LONG)(go))
        kinds: list[str] = []
        async with (
            asyncio.timeout(LIMIT_S),
            openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client,
        ):
            stream = await client.responses.create(model="m", input="hi", stream=True)

            async def read() -> None:
                async for event in stream:
                    kinds.append(event.type)
                    go.set()

            with pytest.raises(openai.APIError, match="too long"):
                await read()
        assert kinds[-1] == "response.failed"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_place_in_the_queue_that_times_out_ends_the_stream_too(path: str) -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        held = Held(stub)
        stub.next_answers.append(held)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(plain(running, CHAT, body_of(CHAT)))
            await stub.arrived(1)
            async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as client:
                await client.patch("/prefixproxy/admission", json={"queue_timeout": 1.0})
            got = (await plain(running, path, body_of(path))).content
            held.go.set()
        assert first.result().status_code == 200
        *_, last = got.removesuffix(b"\n\n").split(b"\n")
        assert orjson.loads(last.removeprefix(b"data: "))["error"]["code"] == "queue_timeout"


async def test_an_upstream_that_answers_without_a_stream_is_an_error() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        go = asyncio.Event()
        stub.next_answers.append(answering(200, {"choices": []})(go))
        async with reading(running, CHAT, body_of(CHAT)) as answer:
            await answer.until(COMMENT)
            go.set()
            assert b"without one" in await answer.rest()
        await eventually(lambda: newest(running).outcome is Outcome.UPSTREAM_ERROR)


async def test_a_model_that_loads_is_waited_for_behind_an_early_head_too() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        go = asyncio.Event()
        loading = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
        stub.next_answers.append(answering(503, loading)(go))
        async with reading(running, CHAT, body_of(CHAT)) as answer:
            await answer.until(COMMENT)
            go.set()
            got = await answer.rest()
        assert got.endswith(b"data: [DONE]\n\n")
        assert b"Loading" not in got
        assert newest(running).outcome is Outcome.OK


async def test_a_connection_that_broke_before_anything_was_generated_is_tried_once_more() -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):
        go = asyncio.Event()

        async def broken(exchange: Exchange) -> None:
            await go.wait()
            exchange.reset()

        stub.next_answers.append(broken)
        async with reading(running, CHAT, body_of(CHAT)) as answer:
            await answer.until(COMMENT)
            go.set()
            assert (await answer.rest()).endswith(b"data: [DONE]\n\n")
        assert len(stub.generating()) == 2


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_client_that_leaves_although_it_was_kept_is_noticed(path: str) -> None:
    async with proxied_stub(StubUpstream(n_slots=1), **SOON) as (stub, running):

        def outcomes() -> list[Outcome]:
            return [record.outcome for record in running.proxy.parts.telemetry.journal.newest(5)]

        stub.next_answers.append(stall)
        async with reading(running, path, body_of(path)) as answer:
            await answer.until(SIGN[path])
            async with reading(running, CHAT, body_of(CHAT, user="waits")) as other:
                await other.until(COMMENT)
            await eventually(lambda: outcomes() == [Outcome.CLIENT_GONE])
        async with asyncio.timeout(LIMIT_S):
            await stub.generating()[0].connection_gone.wait()
        await eventually(lambda: outcomes() == [Outcome.CLIENT_GONE] * 2)
        assert len(stub.generating()) == 1


async def test_a_json_client_is_told_to_come_back_before_it_gives_up() -> None:
    async with proxied_stub(StubUpstream(n_slots=1)) as (stub, running):
        held = Held(stub)
        stub.next_answers.append(held)
        async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as client, asyncio.TaskGroup() as group:
            first = group.create_task(client.post(CHAT, json=body_of(CHAT)))
            await stub.arrived(1)
            patience = {"x-stainless-read-timeout": "0.5"}
            refused = await client.post(CHAT, json=body_of(CHAT, stream=False), headers=patience)
            held.go.set()
        assert first.result().status_code == 200
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_timeout")
        assert int(refused.headers["retry-after"]) > 0
        assert len(stub.generating()) == 1


@pytest.mark.parametrize("path", [CHAT, "/elsewhere"])
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("theirs", "ours"), [(None, "5"), (b"17", "17")])
async def test_every_not_now_says_when(path: str, status: int, theirs: bytes | None, ours: str) -> None:
    async def busy(exchange: Exchange) -> None:
        headers = [(b"Retry-After", theirs)] if theirs else []
        await exchange.whole(status, b'{"error":{"message":"busy"}}', headers)

    async with proxied_stub() as (stub, running):
        stub.routes[path] = busy
        answer = await plain(running, path, body_of(CHAT, stream=False))
        assert (answer.status_code, answer.headers["retry-after"]) == (status, ours)
        assert answer.headers.get_list("retry-after") == [ours]
