"""Requests on Ollama's `/v1` that have to carry a context: no reload, the same request, the same answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import httpx
import orjson
import pytest
from running_proxy import RunningProxy, running_proxy, until_quiet
from scripted_ollama import ScriptedOllama

from prefixproxy.types import CacheSource, Outcome, RequestRecord

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "You plan the work of a small team. " * 60}
N_CTX = 4096
SAID: dict[str, list[dict[str, Any]]] = {
    "text": [{"content": "Fine"}, {"content": " <b>&\u2028ü\n\x01"}],
    "nothing": [],
    "thinking": [
        {"content": "", "thinking": "hm"},
        {"content": "so", "thinking": "."},
        {"content": "Fine"},
    ],
    "a call": [
        {"content": "Wait."},
        {
            "content": "",
            "thinking": "look",
            "tool_calls": [
                {"id": "call_1", "function": {"index": 0, "name": "look", "arguments": {"b": "<ü>", "a": 1.5}}},
                {"function": {"index": 1, "name": "look", "arguments": {}}},
            ],
        },
    ],
    "logprobs": [{"content": "Fine", "logprobs": [{"token": "Fine", "logprob": -0.25, "top_logprobs": []}]}],
}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [SYSTEM, {"role": "user", "content": "Why?"}], **more}


@asynccontextmanager
async def before(ollama: ScriptedOllama, *normalise: str) -> AsyncIterator[RunningProxy]:
    async with ollama:
        upstream = {"name": "o", "url": ollama.url, "kind": "ollama", "slots": 2, "normalise": [*normalise]}
        async with running_proxy(ollama.url, upstreams=[upstream]) as running:
            yield running
            await until_quiet(running)
            assert ollama.violations == []


async def ask(url: str, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return await client.post(path, content=raw, headers={"content-type": "application/json"})


async def somebody_asks_for(url: str, n_ctx: int) -> None:
    await ask(url, "/api/chat", chat(stream=False, options={"num_ctx": n_ctx}))


def newest(running: RunningProxy) -> RequestRecord:
    return running.proxy.parts.telemetry.journal.newest(1)[0]


async def reported(running: RunningProxy) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        shown = (await client.get(f"{running.url}/prefixproxy/status")).json()["upstreams"][0]["reported"]
    assert isinstance(shown, dict)
    return shown


def without_id(answer: bytes) -> bytes:
    return re.sub(rb'"id":"(?:chatcmpl|cmpl)-[0-9a-f]+"', b'"id":""', answer)


async def test_clients_on_both_apis_share_one_loaded_model() -> None:
    ollama = ScriptedOllama()
    async with before(ollama, "num_ctx") as running:
        for n_ctx in (8192, 2048):
            await somebody_asks_for(running.url, n_ctx)
            for stream in (False, True):
                assert (await ask(running.url, CHAT, chat(stream=stream))).status_code == 200
                completion = {"model": "tiny", "prompt": "Once", "stream": stream}
                assert (await ask(running.url, COMPLETIONS, completion)).status_code == 200
        assert ollama.loads == [("tiny:latest", 8192)]
        assert {seen.path for seen in ollama.generating()} == {"/api/chat", "/api/generate"}
        shown = await reported(running)
        assert (shown["sent_natively"], shown["sent_without_context"]) == (8, 0)


@pytest.mark.parametrize("normalise", [[], ["keep_alive"]], ids=str)
async def test_without_being_asked_for_v1_stays_v1(normalise: list[str]) -> None:
    ollama = ScriptedOllama()
    raw = orjson.dumps(chat(stream=False), option=orjson.OPT_INDENT_2)
    async with before(ollama, *normalise) as running:
        await somebody_asks_for(running.url, 8192)
        await ask(running.url, CHAT, raw)
        assert (ollama.generating()[-1].path, ollama.generating()[-1].body) == (CHAT, raw)
        assert (await reported(running))["sent_natively"] == 0


async def test_a_context_that_nobody_asked_for_is_not_sent() -> None:
    ollama = ScriptedOllama()
    async with before(ollama, "num_ctx") as running:
        await ask(running.url, CHAT, chat(stream=False))
        assert ollama.generating()[-1].path == CHAT


@pytest.mark.parametrize("version", ["0.33.3", "0.33.0"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_answer_is_the_one_v1_gives(path: str, version: str) -> None:
    straight, behind = ScriptedOllama(version), ScriptedOllama(version)
    asked = chat(seed=7) if path == CHAT else {"model": "tiny", "prompt": "Once <"}
    async with straight, before(behind, "num_ctx") as running:
        for url in (straight.url, running.url):
            await somebody_asks_for(url, N_CTX)
        for said, stream, include_usage in product(SAID, (False, True), (False, True)):
            straight.says = behind.says = SAID[said]
            body = {**asked, "stream": stream, "stream_options": {"include_usage": include_usage}}
            theirs, ours = [await ask(url, path, body) for url in (straight.url, running.url)]
            assert behind.generating()[-1].path != path
            assert without_id(ours.content) == without_id(theirs.content)
            assert ours.headers["content-type"] == theirs.headers["content-type"]
            assert behind.meant[-1]["options"].pop("num_ctx") == N_CTX
            assert behind.meant[-1] == straight.meant[-1]
            record = newest(running)
            assert record.outcome is Outcome.OK
            assert record.prompt_tokens
            assert (record.cache_source is CacheSource.REPORTED) == (version == "0.33.3")


async def test_an_old_ollama_times_what_v1_alone_does_not_tell() -> None:
    """A prompt found in its slot takes a fraction of the time that the same took when its model was loaded."""
    async with before(ScriptedOllama("0.33.0"), "num_ctx") as running:
        body = chat(stream=True)
        await somebody_asks_for(running.url, 8192)
        await ask(running.url, CHAT, body)
        record = newest(running)
        assert record.cache_source is CacheSource.INFERRED
        assert (record.cache_n or 0) > 0.5 * (record.prompt_tokens or 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(max_completion_tokens=5, stream=False)),
        (CHAT, chat(logit_bias={"5": 1}, stream=False)),
        (CHAT + "?x=1", chat(stream=False)),
        ("/v1/messages", {**chat(), "max_tokens": 5}),
        ("/v1/responses", {"model": "tiny", "input": "Why?"}),
    ],
)
async def test_what_cannot_be_the_same_request_passes_as_it_is(path: str, body: dict[str, Any]) -> None:
    ollama = ScriptedOllama()
    raw = orjson.dumps(body, option=orjson.OPT_INDENT_2)
    async with before(ollama, "num_ctx") as running:
        await somebody_asks_for(running.url, 8192)
        await ask(running.url, path, raw)
        assert (ollama.generating()[-1].target, ollama.generating()[-1].body) == (path, raw)
        assert (await reported(running))["sent_without_context"] == 1


@pytest.mark.parametrize("version", ["0.24.0", "0.0.0"])
async def test_a_version_of_which_nothing_was_read_gets_what_came(version: str) -> None:
    ollama = ScriptedOllama(version)
    async with before(ollama, "num_ctx") as running:
        await somebody_asks_for(running.url, 8192)
        await ask(running.url, CHAT, chat(stream=False))
        assert ollama.generating()[-1].path == CHAT


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_error_has_the_shape_of_the_api_called(path: str) -> None:
    body = chat() if path == CHAT else {"model": "tiny", "prompt": "Once"}
    ollama = ScriptedOllama()
    async with before(ollama, "num_ctx") as running:
        await somebody_asks_for(running.url, 8192)
        ollama.fails_with = "out of memory"
        whole = await ask(running.url, path, {**body, "stream": False})
        error = {"message": "out of memory", "type": "api_error", "param": None, "code": None}
        assert (whole.status_code, whole.json()) == (500, {"error": error})
        stream = await ask(running.url, path, {**body, "stream": True})
        assert stream.content.endswith(b"data: " + orjson.dumps({"error": error}) + b"\n\n")
        assert newest(running).outcome is Outcome.UPSTREAM_ERROR


async def test_a_stream_that_ends_early_is_told() -> None:
    ollama = ScriptedOllama()
    async with before(ollama, "num_ctx") as running:
        await somebody_asks_for(running.url, 8192)
        ollama.silent_end = True
        answer = await ask(running.url, CHAT, chat(stream=True))
        assert b'"upstream_error"' in answer.content
        assert b"[DONE]" not in answer.content
        assert newest(running).outcome is Outcome.UPSTREAM_ERROR


async def explained(running: RunningProxy, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    answer = await ask(running.url, "/prefixproxy/explain", {"path": path, "body": body})
    assert answer.status_code == 200
    return answer.json()["path"], answer.json()["body"]


async def test_explain_shows_what_ollama_gets_and_notes_nothing() -> None:
    ollama = ScriptedOllama()
    async with before(ollama, "num_ctx") as running:
        wanting = chat(stream=False, options={"num_ctx": N_CTX * 2})
        assert await explained(running, CHAT, chat()) == (CHAT, chat())
        assert await explained(running, "/api/chat", wanting) == ("/api/chat", wanting)
        assert await explained(running, CHAT, chat()) == (CHAT, chat()), "nobody has asked for a context yet"
        await somebody_asks_for(running.url, N_CTX * 2)
        shown = await explained(running, CHAT, chat(max_tokens=5))
        assert await explained(running, "/v1/responses", {"model": "tiny", "input": "Hi"}) == (
            "/v1/responses",
            {"model": "tiny", "input": "Hi"},
        )
        assert (await reported(running))["sent_natively"] == 0
        assert (await reported(running))["sent_without_context"] == 0
        await ask(running.url, CHAT, chat(max_tokens=5))
    assert shown == ("/api/chat", ollama.requests[-1].json())
    assert shown[1]["options"]["num_ctx"] == N_CTX * 2
