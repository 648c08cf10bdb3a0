"""An upstream that breaks, loads its model, or is not there."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import orjson
import pytest
from running_engine import RunningEngine
from running_proxy import proxied_stub, running_proxy, until_ready
from stub_upstream import Exchange, StubUpstream, event

from prefixproxy.backends.http import HttpUpstream

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def chat(stream: bool = True) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "stream": stream}


def token(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


async def cut_behind_a_token(exchange: Exchange) -> None:
    await exchange.stream_head()
    await exchange.send(token("Fi"))
    exchange.cut()


async def reset_behind_a_token(exchange: Exchange) -> None:
    await exchange.stream_head()
    await exchange.send(token("Fi"))
    exchange.reset()


async def reset(exchange: Exchange) -> None:
    exchange.reset()


@pytest.mark.parametrize("fault", [cut_behind_a_token, reset_behind_a_token])
async def test_a_stream_that_breaks_off_ends_in_an_error_event(fault: Any) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(fault)
        answer = await client.post(CHAT, json=chat())
        events = answer.text.strip().split("\n\n")
        assert answer.status_code == 200
        assert events[0].encode() + b"\n\n" == token("Fi")
        assert orjson.loads(events[-1].removeprefix("data: "))["error"]["code"] == "upstream_error"
        assert len(stub.generating()) == 1


@pytest.mark.parametrize("fault", [cut_behind_a_token, reset_behind_a_token])
async def test_a_json_client_gets_502_when_the_stream_breaks_off(fault: Any) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers += [fault, fault]
        answer = await client.post(CHAT, json=chat(stream=False))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")


async def test_a_connection_that_breaks_before_the_answer_is_tried_once_more() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(reset)
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 200
        assert "[DONE]" in answer.text
        assert len(stub.generating()) == 2


async def test_a_server_that_always_breaks_is_reported_after_the_second_try() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers += [reset, reset, reset]
        answer = await client.post(CHAT, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert len(stub.generating()) == 2


@pytest.mark.parametrize("times", [1, 4])
async def test_a_server_that_loads_its_model_is_waited_for(times: int) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url, timeout=30) as client:
        stub.loading = times
        answer = await client.post(CHAT, json=chat(stream=False))
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "Fine."


async def test_a_server_that_is_not_there_makes_requests_fail_at_once_until_it_comes() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    async with running_proxy(url, wait_ready=False) as running, httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        for answer in (await client.post(CHAT, json=chat()), await client.get("/v1/models")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
        async with StubUpstream(port=port):
            await until_ready(running.url)
            assert (await client.post(CHAT, json=chat(stream=False))).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/elsewhere"])
async def test_the_upstreams_error_passes_with_status_and_body(path: str) -> None:
    error = b'{"error":{"code":500,  "message":"its own words","type":"server_error"}}'

    async def fail(exchange: Exchange) -> None:
        await exchange.whole(500, error, [(b"Content-Type", b"application/json"), (b"Retry-After", b"7")])

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.routes[path] = fail
        answer = await client.post(path, json=chat())
        assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (500, error, "7")


async def test_tokens_reach_the_client_before_the_upstream_writes_the_next() -> None:
    go_on = [asyncio.Event() for _ in range(3)]

    async def step_by_step(exchange: Exchange) -> None:
        await exchange.stream_head()
        for number, gate in enumerate(go_on):
            await exchange.send(token(f"t{number}"))
            await gate.wait()
        await exchange.send(b"data: [DONE]\n\n")
        await exchange.end()

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(step_by_step)
        async with client.stream("POST", CHAT, json=chat()) as answer:
            got = b""
            chunks = answer.aiter_raw()
            for number, gate in enumerate(go_on):
                while token(f"t{number}") not in got:
                    got += await anext(chunks)
                assert token(f"t{number + 1}") not in got
                gate.set()
            got += b"".join([chunk async for chunk in chunks])
    assert got == b"".join(token(f"t{number}") for number in range(3)) + b"data: [DONE]\n\n"


async def test_a_stream_is_what_the_upstream_wrote_less_the_progress_nobody_asked_for() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        got = (await client.post(CHAT, json={**chat(), "max_tokens": 5})).content
        asked = stub.generating()[0]
    assert asked.json()["return_progress"] is True
    assert got == b"".join(e for e in stub.chat_events(asked) if b"prompt_progress" not in e)


@pytest.mark.engine
async def test_a_request_right_behind_a_stream_does_not_meet_its_closing_connection(engine: RunningEngine) -> None:
    """llama-server closes the connection behind each stream without announcing it."""
    upstream = HttpUpstream("engine", engine.url)
    for number in range(10):
        body = orjson.dumps({**chat(), "seed": number, "max_tokens": 2})
        response = await upstream.open("POST", CHAT, [(b"content-type", b"application/json")], body)
        assert (await response.read()).endswith(b"[DONE]\n\n")
        await response.close()
    await upstream.close()
