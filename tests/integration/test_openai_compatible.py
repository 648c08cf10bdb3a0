"""In front of any OpenAI-compatible server: nothing is added to a body, so many at once, its own counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from running_proxy import RunningProxy, eventually, running_proxy, until_quiet
from stub_upstream import NOT_FOUND, Exchange, StubUpstream, event

from prefixproxy.types import CacheSource, Outcome, RequestRecord

pytestmark = pytest.mark.anyio

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Why? " * 40}]}
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 8192}]}


class Server(StubUpstream):
    """Knows `/v1/models` and completions; any other path is not found. `cached`: what its usage tells, if anything."""

    def __init__(self, cached: int | None = None) -> None:
        super().__init__(n_slots=8)
        self.cached = cached
        self.models: object = MODELS
        self.models_status = 200
        self.go = asyncio.Event()
        self.go.set()

    async def __aexit__(self, *error: object) -> None:
        self.go.set()
        await super().__aexit__(*error)

    async def _plain(self, exchange: Exchange) -> None:
        if exchange.request.path == "/v1/models":
            return await exchange.json(self.models_status, self.models)
        await exchange.json(404, NOT_FOUND)

    async def answer(self, exchange: Exchange) -> None:
        await self.go.wait()
        details = {} if self.cached is None else {"prompt_tokens_details": {"cached_tokens": self.cached}}
        usage = {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201, **details}
        body = exchange.request.json()
        if not body.get("stream"):
            message = {"role": "assistant", "content": "Fine."}
            choices = [{"index": 0, "finish_reason": "stop", "message": message}]
            return await exchange.json(200, {"id": "x", "choices": choices, "usage": usage})
        await exchange.stream_head()
        await exchange.send(event({"id": "x", "choices": [{"index": 0, "delta": {"content": "Fine."}}]}))
        if (body.get("stream_options") or {}).get("include_usage"):
            await exchange.send(event({"id": "x", "choices": [], "usage": usage}))
        await exchange.send(b"data: [DONE]\n\n")
        await exchange.end()


@asynccontextmanager
async def before(server: Server, *, kind: str = "openai", **upstream: Any) -> AsyncIterator[RunningProxy]:
    async with server:
        shown = {"name": "u", "url": server.url, "kind": kind, **upstream}
        async with running_proxy(server.url, upstreams=[shown]) as running:
            yield running
            await until_quiet(running)
            assert server.violations == []
            assert [seen for seen in server.requests if b"id_slot" in seen.body] == []


def newest(running: RunningProxy) -> RequestRecord:
    return running.proxy.parts.telemetry.journal.newest(1)[0]


async def post(running: RunningProxy, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}, {"cache_prompt": False}])
async def test_a_body_goes_upstream_byte_for_byte(more: dict[str, Any]) -> None:
    server, raw = Server(), orjson.dumps({**CHAT, **more}, option=orjson.OPT_INDENT_2)
    async with before(server) as running, httpx.AsyncClient() as client:
        await client.post(f"{running.url}/v1/chat/completions", content=raw)
        assert [seen.body for seen in server.generating()] == [raw]


async def test_reuse_off_cannot_be_asked_of_it_and_is_not() -> None:
    server = Server()
    async with server:
        upstreams = [{"name": "u", "url": server.url, "kind": "openai"}]
        async with running_proxy(server.url, upstreams=upstreams, reuse__mode="off") as running:
            await post(running, CHAT)
            assert server.generating()[0].json() == CHAT
            assert newest(running).miss_reason.value != "reuse_off"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("cached", "source"), [(150, CacheSource.REPORTED), (None, CacheSource.UNKNOWN)])
async def test_cached_tokens_are_what_usage_says_or_unknown(
    stream: bool, cached: int | None, source: CacheSource
) -> None:
    async with before(Server(cached)) as running:
        answer = await post(running, {**CHAT, "stream": stream, "stream_options": {"include_usage": True}})
        record = newest(running)
        assert (record.prompt_tokens, record.cache_n, record.cache_source) == (200, cached, source)
        assert record.outcome is Outcome.OK
        if not stream:
            assert answer.headers.get("x-prefixproxy-cache-n") == (None if cached is None else "150")


@pytest.mark.parametrize(("slots", "at_once"), [(2, 2), (0, 4)])
async def test_so_many_run_at_once_and_the_others_wait_here(slots: int, at_once: int) -> None:
    server = Server()
    async with before(server, slots=slots) as running:
        server.go.clear()
        async with asyncio.TaskGroup() as group:
            for i in range(6):
                body = {"model": "m", "messages": [{"role": "user", "content": f"{i}"}]}
                group.create_task(post(running, body))
            await server.arrived(at_once)
            await eventually(lambda: len(running.proxy.parts.dispatcher.snapshot().waiting) == 6 - at_once)
            assert len(server.generating()) == at_once
            server.go.set()
        assert len(server.generating()) == 6


async def test_its_503_passes_once_and_it_stays_up() -> None:
    server, busy = Server(), {"error": {"message": "overloaded", "type": "x"}}
    async with before(server) as running:
        server.next_answers.append(lambda exchange: exchange.json(503, busy))
        answer = await post(running, CHAT)
        assert (answer.status_code, answer.json()) == (503, busy)
        assert len(server.generating()) == 1
        assert running.proxy.parts.dispatcher.fleet.is_up


async def test_the_status_shows_what_it_can_and_what_it_cannot() -> None:
    async with before(Server()) as running, httpx.AsyncClient() as client:
        upstream = (await client.get(f"{running.url}/prefixproxy/status")).json()["upstreams"][0]
        assert (upstream["kind"], upstream["model"], upstream["n_ctx_slot"]) == ("openai", "m", 8192)
        assert [able for able, yes in upstream["capabilities"].items() if yes] == ["shared_cache"]


async def test_a_server_whose_key_only_its_clients_have_is_served() -> None:
    server = Server()
    server.models_status = 401
    async with before(server) as running:
        assert (await post(running, CHAT)).status_code == 200


async def test_a_server_too_busy_to_list_its_models_is_not_gone() -> None:
    """Some answer one request at a time."""
    server = Server()

    async def cut(exchange: Exchange) -> None:
        exchange.reset()

    async with before(server) as running:
        backend = running.proxy.parts.dispatcher.keepers["u"].state.backend
        server.routes["/v1/models"] = cut
        await backend.health()
        assert (await post(running, CHAT)).status_code == 200
        server.routes.clear()


async def test_auto_finds_it() -> None:
    async with before(Server(), kind="auto") as running:
        facts = running.proxy.parts.dispatcher.keepers["u"].state.facts
        assert facts is not None
        assert facts.kind == "openai"
        assert (await post(running, CHAT)).status_code == 200
