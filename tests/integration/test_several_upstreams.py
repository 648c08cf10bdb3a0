"""Several upstreams behind one proxy: which one a request goes to, and what happens when one of them is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from running_proxy import RunningProxy, eventually, running_proxy
from scripted_ollama import ScriptedOllama
from stub_upstream import Exchange, StubUpstream

from prefixproxy.upkeep import Health

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def chat(model: str | None = None, **more: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {"messages": [{"role": "user", "content": "hi"}], **named, **more}


@asynccontextmanager
async def before(
    *stubs: StubUpstream, all_up: bool = True, **settings: Any
) -> AsyncIterator[tuple[RunningProxy, httpx.AsyncClient]]:
    """The proxy in front of these, called a, b, c ..., with all of them up."""
    upstreams = [{"name": "abc"[i], "url": stub.url} for i, stub in enumerate(stubs)]
    async with (
        running_proxy(stubs[0].url, upstreams=upstreams, **settings) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        if all_up:
            await eventually(lambda: all(health(running, upstream["name"]) is Health.UP for upstream in upstreams))
        yield running, client


def health(running: RunningProxy, name: str) -> Health:
    return running.proxy.parts.dispatcher.keepers[name].state.health


def look(running: RunningProxy, name: str) -> None:
    """Now, not within seconds."""
    running.proxy.parts.dispatcher.keepers[name].state.probe_now.set()


async def gone(running: RunningProxy, name: str, stub: StubUpstream) -> None:
    await stub.__aexit__()
    look(running, name)
    await eventually(lambda: health(running, name) is Health.LOST)


def models_of(stub: StubUpstream, path: str = CHAT) -> list[Any]:
    return [seen.json().get("model") for seen in stub.requests if seen.path == path]


async def test_each_model_goes_to_its_server_under_each_of_its_names() -> None:
    async with StubUpstream(model="small") as a, StubUpstream(model="large", aliases=["large", "big"]) as b:
        async with before(a, b) as (_, client):
            for model in ("small", "large", "big", "large", "big"):
                assert (await client.post(CHAT, json=chat(model))).status_code == 200
        assert models_of(a) == ["small"]
        assert models_of(b) == ["large", "big", "large", "big"]


@pytest.mark.parametrize("model", [None, "", "gpt-4o"])
async def test_a_name_that_nobody_lists_is_always_answered_by_the_same_model(model: str | None) -> None:
    """llama-server answers to any name: two of them would give one conversation two voices."""
    async with StubUpstream(model="small", n_slots=1) as a, StubUpstream(model="large", n_slots=9) as b:
        async with before(a, b) as (_, client), asyncio.TaskGroup() as group:
            asked = [group.create_task(client.post(CHAT, json=chat(model, max_tokens=i + 1))) for i in range(6)]
        assert [task.result().status_code for task in asked] == [200] * 6
        assert (len(a.generating()), len(b.generating())) == (6, 0)


async def test_two_servers_of_one_model_share_its_requests() -> None:
    served = asyncio.Semaphore(0)

    async def hold(exchange: Exchange) -> None:
        await served.acquire()
        await exchange.json(200, a.chat_answer(exchange.request))

    async with StubUpstream(n_slots=1) as a, StubUpstream(n_slots=1) as b:
        a.next_answers.append(hold)
        b.next_answers.append(hold)
        async with before(a, b) as (_, client), asyncio.TaskGroup() as group:
            for name in ("stub", "gpt-4o"):
                group.create_task(client.post(CHAT, json=chat(name)))
            await a.arrived(1)
            await b.arrived(1)
            served.release()
            served.release()


async def test_a_model_whose_only_server_is_gone_is_not_answered_by_another() -> None:
    async with StubUpstream(model="small") as a, StubUpstream(model="large") as b, before(a, b) as (running, client):
        await gone(running, "b", b)
        for path in (CHAT, "/v1/embeddings", "/v1/chat/completions/input_tokens"):
            answer = await client.post(path, json=chat("large"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
            assert "no upstream that serves 'large' is ready (b: " in answer.json()["error"]["message"]
        assert a.generating() == []
        assert (await client.post(CHAT, json=chat("small"))).status_code == 200


async def test_a_model_whose_server_comes_back_is_answered_by_it() -> None:
    async with StubUpstream(model="small") as a, StubUpstream(model="large") as b, before(a, b) as (running, client):
        b.loading = 1_000_000
        look(running, "b")
        await eventually(lambda: health(running, "b") is Health.LOADING)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(client.post(CHAT, json=chat("large")))
            assert (await client.post(CHAT, json=chat("small"))).status_code == 200
            b.loading = 0
        assert asked.result().status_code == 200
        assert (models_of(a), models_of(b)) == (["small"], ["large"])


async def test_what_nobody_lists_waits_for_a_server_that_loads_for_the_first_time() -> None:
    """What that one has is not known yet: it may be what was asked for."""
    async with StubUpstream(model="small") as a, StubUpstream(model="large") as b:
        b.loading = 1_000_000
        async with before(a, b, all_up=False) as (running, client), asyncio.TaskGroup() as group:
            await eventually(lambda: health(running, "b") is Health.LOADING)
            asked = group.create_task(client.post(CHAT, json=chat("large")))
            for model in ("small", None):
                assert (await client.post(CHAT, json=chat(model))).status_code == 200
            b.loading = 0
        assert asked.result().status_code == 200
        assert (models_of(a), models_of(b)) == (["small", None], ["large"])


async def test_embeddings_and_counts_go_to_the_server_of_their_model() -> None:
    form: list[tuple[str, tuple[str | None, bytes]]] = [("file", ("a.wav", b"RIFF")), ("model", (None, b"large"))]
    async with StubUpstream(model="small") as a, StubUpstream(model="large") as b, before(a, b) as (_, client):
        for path in ("/v1/embeddings", "/v1/chat/completions/input_tokens", "/tokenize", "/v1/audio/transcriptions"):
            before_a, before_b = len(a.requests), len(b.requests)
            if "audio" in path:
                await client.post(path, files=form)
            else:
                await client.post(path, json={"model": "large", "input": "hi", "content": "hi"})
            assert [seen.path for seen in a.requests[before_a:] if seen.path == path] == []
            assert [seen.path for seen in b.requests[before_b:] if seen.path == path] == [path]
        await client.get("/props?model=large")
        assert [seen.target for seen in b.requests if "model=" in seen.target] == ["/props?model=large"]


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
async def test_the_list_of_models_is_that_of_all_servers(path: str) -> None:
    async with StubUpstream(model="small") as a, ScriptedOllama() as b, StubUpstream(model="small") as c:
        a.routes["/models"] = c.routes["/models"] = lambda exchange: exchange.json(200, {"data": [{"id": "small"}]})
        async with before(a, b, c) as (running, client):
            listed = await client.get(path)
            if path == "/v1/models":
                assert [each["id"] for each in listed.json()["data"]] == ["small", "tiny:latest"]
                assert listed.json()["object"] == "list"
            await gone(running, "a", a)
            assert "small" in (await client.get(path)).text
            await gone(running, "c", c)
            last = await client.get("/v1/models")
            assert [each["id"] for each in last.json()["data"]] == ["tiny:latest"]


@pytest.mark.parametrize("ollama_first", [True, False])
async def test_llama_server_and_ollama_each_get_what_only_they_have(ollama_first: bool) -> None:
    async with StubUpstream(model="small") as a, ScriptedOllama() as b:
        async with before(*((b, a) if ollama_first else (a, b))) as (_, client):
            native = ["/completion", "/infill", "/tokenize", CHAT, "/chat/completions"]
            for path in native:
                body = {**chat(), "prompt": "x", "content": "x", "input_prefix": "x", "input_suffix": "y"}
                assert (await client.post(path, json=body)).status_code == 200
            for path in ("/props", "/slots", "/health"):
                assert (await client.get(path)).status_code == 200
            seen_by_ollama = len(b.requests)
            for path, body in (("/api/chat", chat("tiny")), (CHAT, chat("tiny")), ("/api/embed", {"model": "tiny"})):
                assert (await client.post(path, json=body)).status_code == 200
            for path in ("/api/tags", "/api/version"):
                assert (await client.get(path)).status_code == 200
            assert len([seen for seen in b.requests[seen_by_ollama:] if seen.method == "POST"]) == 3
        assert [seen.path for seen in b.requests[:seen_by_ollama] if seen.method == "POST"] == []
