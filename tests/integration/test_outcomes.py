"""What the journal calls the end of a request, and what its client gets, where the answer is none or half of one."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from running_engine import RunningEngine
from running_proxy import RunningProxy, eventually, proxied_stub, running_proxy
from stub_upstream import Exchange, Script, event, timings_of

from prefixproxy.journal import record_json
from prefixproxy.types import Outcome

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOKEN = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Fi"}, "finish_reason": None}]})
FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": timings_of(7)})
DONE = b"data: [DONE]\n\n"
ERROR_EVENTS = (b'data: {"error"', b"event: error", b"event: response.failed")
JSON = (b"Content-Type", b"application/json")

ENDLESS: list[tuple[str, dict[str, Any], bytes]] = [
    (CHAT, MESSAGES, b""),
    (CHAT, MESSAGES, TOKEN),
    (CHAT, MESSAGES, TOKEN + b'data: {"choices":[{"ind'),
    ("/v1/completions", {"prompt": "hi"}, event({"choices": [{"text": "Fi", "finish_reason": None}]})),
    ("/completion", {"prompt": "hi"}, event({"content": "Fi", "stop": False})),
    ("/v1/responses", {"input": "hi"}, event({"type": "response.output_text.delta", "delta": "Fi"})),
    ("/v1/messages", MESSAGES, event({"type": "content_block_delta"})),
]


def streaming(*chunks: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Script:
    async def script(exchange: Exchange) -> None:
        exchange.keep_open = False
        await exchange.head(200, [(b"Content-Type", b"text/event-stream"), *headers])
        for chunk in chunks:
            if chunk:
                await exchange.send(chunk)
        await exchange.end()

    return script


def answering(status: int, body: bytes, *headers: tuple[bytes, bytes]) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(status, body, headers)

    return script


async def outcome_of_last(running: RunningProxy) -> Outcome:
    journal = running.proxy.parts.telemetry.journal
    await eventually(lambda: journal.newest(1))
    return journal.newest(1)[0].outcome


@pytest.mark.parametrize(("path", "body", "sent"), ENDLESS)
async def test_a_stream_without_its_end_ends_in_an_error_event(path: str, body: dict[str, Any], sent: bytes) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(streaming(sent))
        answer = await client.post(path, json={**body, "stream": True})
        assert answer.status_code == 200
        told = sent[: sent.rfind(b"\n\n") + 2] if b"\n\n" in sent else b""
        assert answer.content.startswith(told)
        assert answer.content[len(told) :].startswith(ERROR_EVENTS), "half an event is left out"
        *_, last = answer.content.removesuffix(b"\n\n").split(b"\n\n")
        error = orjson.loads(last.partition(b"data: ")[2])["error"]
        assert error["code"] == "upstream_error"
        assert await outcome_of_last(running) is Outcome.UPSTREAM_ERROR
        assert len(stub.generating()) == 1


@pytest.mark.parametrize("sent", [b"", TOKEN])
async def test_a_json_client_of_a_stream_without_its_end_gets_502(sent: bytes) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers += [streaming(sent)] * 2
        answer = await client.post(CHAT, json=MESSAGES)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert await outcome_of_last(running) is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize("end", [DONE, FINISH, FINISH + DONE])
async def test_a_stream_with_its_end_is_ok(end: bytes) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(streaming(TOKEN, end))
        answer = await client.post(CHAT, json={**MESSAGES, "stream": True})
        assert answer.content == TOKEN + end
        assert await outcome_of_last(running) is Outcome.OK


async def test_an_error_that_the_upstream_tells_in_its_stream_is_told_once() -> None:
    told = event({"error": {"code": 500, "message": "its own words", "type": "server_error"}})
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(streaming(TOKEN, told))
        answer = await client.post(CHAT, json={**MESSAGES, "stream": True})
        assert answer.content == TOKEN + told
        assert await outcome_of_last(running) is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "body", "headers", "outcome"),
    [
        (200, b'{"choices": []}', (JSON,), Outcome.OK),
        (200, gzip.compress(b'{"choices": []}', mtime=0), (JSON, (b"Content-Encoding", b"gzip")), Outcome.OK),
        (200, b"<html>A login page</html>", ((b"Content-Type", b"text/html"),), Outcome.UPSTREAM_ERROR),
        (200, b"", (), Outcome.UPSTREAM_ERROR),
        (200, b"[]", (JSON,), Outcome.UPSTREAM_ERROR),
        (200, b'{"choices": []}', (JSON, (b"Content-Encoding", b"gzip")), Outcome.UPSTREAM_ERROR),
        (204, b"", (), Outcome.UPSTREAM_ERROR),
        (302, b"", ((b"Location", b"/login"),), Outcome.UPSTREAM_ERROR),
        (400, b'{"error": {}}', (JSON,), Outcome.BAD_REQUEST),
        (401, b'{"error": {}}', (JSON,), Outcome.REJECTED),
        (403, b"no", (), Outcome.REJECTED),
        (404, b'{"error": {}}', (JSON,), Outcome.BAD_REQUEST),
        (429, b'{"error": {}}', (JSON,), Outcome.REJECTED),
        (500, b'{"error": {}}', (JSON,), Outcome.UPSTREAM_ERROR),
    ],
)
async def test_what_is_no_stream_passes_as_it_is_and_is_ok_only_if_it_is_an_answer(
    status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...], outcome: Outcome, stream: bool
) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(answering(status, body, *headers))
        async with client.stream("POST", CHAT, json={**MESSAGES, "stream": stream}) as answer:
            got = b"".join([chunk async for chunk in answer.aiter_raw()])
        assert (answer.status_code, got) == (status, body)
        assert [answer.headers[name.decode()].encode() for name, _ in headers] == [value for _, value in headers]
        assert await outcome_of_last(running) is outcome
        assert running.proxy.parts.telemetry.metrics.render("")[0].count(b'rejected_total{reason="other"} 0.0') == 1


@pytest.mark.parametrize(
    ("body", "headers", "outcome"),
    [
        (b"{", {}, Outcome.BAD_REQUEST),
        (b"{}", {"authorization": "Bearer wrong"}, Outcome.REJECTED),
    ],
)
async def test_our_own_refusals_are_called_what_the_upstreams_are(
    body: bytes, headers: dict[str, str], outcome: Outcome
) -> None:
    keys = {"authorization": "Bearer right", **headers}
    async with (
        proxied_stub(server__api_keys=["right"]) as (stub, running),
        httpx.AsyncClient(base_url=running.url, headers=keys) as client,
    ):
        assert (await client.post(CHAT, content=body)).status_code in (400, 401)
        assert await outcome_of_last(running) is outcome
        assert stub.generating() == []


@pytest.mark.parametrize("stream", [True, False])
async def test_no_encoding_is_asked_for_where_the_answer_is_read(stream: bool) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post(CHAT, json={**MESSAGES, "stream": stream}, headers={"accept-encoding": "gzip, br"})
        assert "Fine." in answer.text
        assert [value for name, value in stub.generating()[0].headers if name == b"accept-encoding"] == [b"identity"]


def packed(encoder: Any, parts: tuple[bytes, ...]) -> list[bytes]:
    """Each part in a chunk of its own, as a server that flushes writes them."""
    chunks = [encoder.compress(part) + encoder.flush(zlib.Z_SYNC_FLUSH) for part in parts]
    return [*chunks, encoder.flush()]


@pytest.mark.parametrize(
    ("coding", "encoder"),
    [
        (b"gzip", lambda: zlib.compressobj(wbits=zlib.MAX_WBITS | 16)),
        (b"deflate", zlib.compressobj),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_that_is_encoded_all_the_same_is_decoded(
    coding: bytes, encoder: Callable[[], Any], stream: bool
) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        chunks = packed(encoder(), (TOKEN, FINISH, DONE))
        stub.next_answers.append(streaming(*chunks, headers=((b"Content-Encoding", coding),)))
        async with client.stream("POST", CHAT, json={**MESSAGES, "stream": stream}) as answer:
            got = b"".join([chunk async for chunk in answer.aiter_raw()])
        assert "content-encoding" not in answer.headers
        if stream:
            assert got == TOKEN + FINISH + DONE
        else:
            assert orjson.loads(got)["choices"][0]["message"]["content"] == "Fi"
        assert await outcome_of_last(running) is Outcome.OK
        assert running.proxy.parts.telemetry.journal.newest(1)[0].prompt_tokens == 7


@pytest.mark.parametrize(("coding", "sent"), [(b"br", TOKEN), (b"gzip", TOKEN)])
async def test_a_stream_that_cannot_be_decoded_is_an_error(coding: bytes, sent: bytes) -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers += [streaming(sent, headers=((b"Content-Encoding", coding),))] * 2
        answer = await client.post(CHAT, json=MESSAGES)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        stub.next_answers.append(streaming(sent, headers=((b"Content-Encoding", coding),)))
        answer = await client.post(CHAT, json={**MESSAGES, "stream": True})
        assert orjson.loads(answer.text.removeprefix("data: "))["error"]["code"] == "upstream_error"
        assert await outcome_of_last(running) is Outcome.UPSTREAM_ERROR


@pytest.mark.parametrize(("shown", "marked"), [(2, False), (1, True)])
async def test_a_json_answer_whose_last_token_never_showed_says_so(shown: int, marked: bool) -> None:
    """Two tokens were generated; the text that came last was the `shown`th."""
    first = {"index": 0, "delta": {"role": "assistant", "content": "Fi"}, "finish_reason": None}
    token = event({"choices": [first], "timings": timings_of(7, predicted_n=shown)})
    limit = {"index": 0, "delta": {}, "finish_reason": "length"}
    end = event({"choices": [limit], "timings": timings_of(7, predicted_n=2)})
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(streaming(token, end, DONE))
        answer = await client.post(CHAT, json=MESSAGES)
        assert answer.json()["choices"][0]["message"]["content"] == "Fi"
        assert answer.headers.get("x-prefixproxy-assembled") == ("inexact" if marked else None)
        assert await outcome_of_last(running) is Outcome.OK


@pytest.mark.engine
async def test_text_held_back_at_the_limit_is_marked(engine: RunningEngine) -> None:
    """All but the first letter could become the stop word, until the limit comes: what is lost is said to be."""
    short = 0
    async with running_proxy(engine.url) as running, httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        for seed in range(6):
            body = {"prompt": "hi", "grammar": 'root ::= "b" [a]+', "stop": ["c", "a" * 100], "temperature": 3.0}
            body |= {"seed": seed, "max_tokens": 2 + seed, "n_predict": 2 + seed}
            answer = await client.post("/completion", json=body)
            direct = (await client.post(engine.url + "/completion", json=body)).json()["content"]
            if answer.json()["content"] != direct:
                short += 1
                assert direct.startswith(answer.json()["content"])
                assert answer.headers["x-prefixproxy-assembled"] == "inexact"
    assert short > 0


async def test_the_log_has_one_line_for_each_request_and_no_prompt_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "prefixproxy.requests")
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(answering(500, b"{}", JSON))
        for path in (CHAT, CHAT):
            await client.post(path, json={"messages": [{"role": "user", "content": "a secret"}]})
        journal = running.proxy.parts.telemetry.journal
        await eventually(lambda: len(journal.newest(2)) == 2)
        lines = [orjson.loads(r.message) for r in caplog.records if r.name == "prefixproxy.requests"]
        assert lines == [orjson.loads(orjson.dumps(record_json(one))) for one in reversed(journal.newest(2))]
        assert [line["status"] for line in lines] == [500, 200]
        assert "secret" not in caplog.text
