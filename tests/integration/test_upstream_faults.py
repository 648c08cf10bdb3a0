"""An upstream that breaks, loads its model, or is not there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from running_engine import RunningEngine
from running_proxy import eventually, proxied_stub, running_proxy, until_ready
from stub_upstream import LOADING, Exchange, Script, StubUpstream, event

from prefixproxy.backends.http import HttpUpstream
from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import SlotId

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


@pytest.mark.parametrize("end", ["cut", "reset"])
async def test_half_an_event_never_stands_before_the_error(end: str) -> None:
    """A client that reads event by event would fail on it, and never come to what went wrong."""
    half_sent = asyncio.Event()

    async def broken(exchange: Exchange) -> None:
        await exchange.stream_head()
        await exchange.send(token("Fi") + token("ne.")[:30])
        await half_sent.wait()
        getattr(exchange, end)()

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(broken)
        async with client.stream("POST", CHAT, json=chat()) as answer:
            chunks = answer.aiter_bytes()
            got = await anext(chunks)
            half_sent.set()
            got += b"".join([chunk async for chunk in chunks])
    first, error, rest = got.split(b"\n\n")
    assert (first + b"\n\n", rest) == (token("Fi"), b"")
    assert orjson.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_error"


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


def saying(status: int, body: bytes, *headers: tuple[bytes, bytes]) -> Script:
    async def say(exchange: Exchange) -> None:
        await exchange.whole(status, body, headers)

    return say


QUEUED = b'{"error":{"code":503,"message":"too many requests queued","type":"unavailable_error"}}'


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [QUEUED, b"busy", b"[]", b'{"error":"Loading model"}', b"x" * 100_000])
async def test_a_503_that_does_not_speak_of_loading_passes_as_it_is(
    body: bytes, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.routes[CHAT] = saying(503, body, (b"Retry-After", b"9"))
        answer = await client.post(CHAT, json=chat(stream))
        journal = (await client.get("/prefixproxy/requests")).json()["requests"]
        assert running.proxy.parts.dispatcher.fleet.is_up
        assert len(stub.generating()) == 1
    assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (503, body, "9")
    assert [record["outcome"] for record in journal] == ["upstream_error"]
    assert "lost" not in caplog.text


async def test_a_server_that_says_loading_twice_has_the_last_word() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        body = orjson.dumps(LOADING)
        stub.routes[CHAT] = saying(503, body, (b"Retry-After", b"4"))
        answer = await client.post(CHAT, json=chat())
        assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (503, body, "4")
        assert len(stub.generating()) == 2


async def test_a_server_that_loads_for_longer_than_requests_wait_has_the_last_word() -> None:
    async with (
        proxied_stub(admission__queue_timeout=1.0) as (stub, running),
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        stub.loading = 1_000_000
        answer = await client.post(CHAT, json=chat())
        assert (answer.status_code, answer.json()) == (503, LOADING)
        assert len(stub.generating()) == 1
        stub.loading = 0
        await until_ready(running.url)


@pytest.mark.parametrize("fault", [cut_behind_a_token, reset_behind_a_token])
async def test_what_was_generated_in_part_is_not_generated_again(fault: Any) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(fault)
        answer = await client.post(CHAT, json=chat(stream=False))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert len(stub.generating()) == 1


async def test_a_json_body_that_breaks_off_is_not_generated_again() -> None:
    async def cut(exchange: Exchange) -> None:
        await exchange.head(200, [(b"Content-Type", b"application/json"), (b"Content-Length", b"99")], chunked=False)
        await exchange.send(b'{"choices":')
        exchange.cut()

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(cut)
        answer = await client.post(CHAT, json=chat(stream=False))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert len(stub.generating()) == 1


async def test_a_stream_that_breaks_off_before_its_first_event_is_tried_once_more_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def cut(exchange: Exchange) -> None:
        await exchange.stream_head()
        exchange.cut()

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(cut)
        answer = await client.post(CHAT, json=chat(stream=False))
        assert answer.status_code == 200
        assert len(stub.generating()) == 2
        request = answer.headers["x-prefixproxy-request-id"]
    assert f"request {request} is sent once more: upstream local broke off" in caplog.text


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


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        ("", "wants a key (upstreams[].api_key is not set)"),
        ("wrong", "refused our key (upstreams[].api_key)"),
    ],
)
async def test_a_server_that_wants_another_key_is_named_wherever_one_looks(
    ours: str, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    reason = f"upstream local {found}: Invalid API Key"
    async with StubUpstream() as stub:
        stub.api_key = "right"
        upstreams = [{"name": "local", "url": stub.url, "kind": "llama-server", "api_key": ours}]
        async with (
            running_proxy(stub.url, wait_ready=False, upstreams=upstreams) as running,
            httpx.AsyncClient(base_url=running.url, headers={"authorization": "Bearer right"}) as client,
        ):
            await eventually(lambda: running.proxy.parts.dispatcher.keepers["local"].state.failure)
            ready = await client.get("/readyz")
            status = (await client.get("/prefixproxy/status")).json()["upstreams"][0]
            answer = await client.post(CHAT, json=chat())
            stub.api_key = ours
            await until_ready(running.url)
            assert (await client.get("/readyz")).json()["reasons"] == {}
    assert (ready.status_code, ready.json()["reasons"]) == (503, {"local": reason})
    assert (status["up"], status["failure"]) == (False, reason)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
    assert reason in answer.json()["error"]["message"]
    assert caplog.text.count(reason) == 1


async def test_with_the_right_key_ours_goes_in_place_of_the_clients() -> None:
    async with StubUpstream() as stub:
        stub.api_key = "right"
        upstreams = [{"name": "local", "url": stub.url, "api_key": "right"}]
        async with (
            running_proxy(stub.url, upstreams=upstreams) as running,
            httpx.AsyncClient(base_url=running.url, headers={"x-api-key": "client"}) as client,
        ):
            assert (await client.post(CHAT, json=chat(stream=False))).status_code == 200
            assert stub.generating()[0].header(b"x-api-key") is None


@pytest.mark.engine
async def test_the_engine_with_a_key_shows_why_it_is_not_ready(engine_factory: Callable[..., RunningEngine]) -> None:
    """llama-server asks for the key on /props and /slots too; only /health is open (server-http.cpp)."""
    keyed = engine_factory(parallel=1, ctx=512, extra={"cpuparams.n_threads": 1, "api_keys": ["right"]})
    upstreams = [{"name": "local", "url": keyed.url, "kind": "llama-server"}]
    async with running_proxy(keyed.url, wait_ready=False, upstreams=upstreams) as running:
        await eventually(lambda: running.proxy.parts.dispatcher.keepers["local"].state.failure)
        failure = running.proxy.parts.dispatcher.keepers["local"].state.failure
    assert failure == "upstream local wants a key (upstreams[].api_key is not set): Invalid API Key"
    async with running_proxy(keyed.url, upstreams=[{**upstreams[0], "api_key": "right"}]) as running:
        slots = running.proxy.parts.dispatcher.snapshot().slots
    assert len(slots) == 1


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


@pytest.mark.parametrize(
    ("path", "missing"),
    [("/apply-template", "prompt"), ("/tokenize", "tokens")],
)
async def test_an_answer_that_lacks_what_was_asked_for_is_told_in_words(path: str, missing: str) -> None:
    async def other_answer(exchange: Exchange) -> None:
        await exchange.json(200, {"something": "else"})

    async with StubUpstream() as stub:
        stub.routes[path] = other_answer
        server = LlamaServer("local", stub.url)
        with pytest.raises(UpstreamFailed) as caught:
            await server.tokens(CHAT, chat())
        await server.close()
    assert caught.value.message == f"upstream local answered {path} without '{missing}'"


@pytest.mark.parametrize("answer", [{"timings": {}}, {"n_saved": 1, "n_written": 1, "timings": {}}, []])
async def test_a_save_that_tells_no_numbers_has_failed(answer: Any) -> None:
    async def other_answer(exchange: Exchange) -> None:
        await exchange.json(200, answer)

    async with StubUpstream() as stub:
        stub.routes["/slots/0"] = other_answer
        server = LlamaServer("local", stub.url)
        with pytest.raises(UpstreamFailed, match="answered a slot action without"):
            await server.save(SlotId("local", 0), "a.bin")
        await server.close()


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
