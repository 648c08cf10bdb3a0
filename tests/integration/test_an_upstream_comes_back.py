"""An upstream that comes back as another one, unseen or after a while, and one that falls silent."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from running_proxy import RunningProxy, eventually, proxied_stub, running_proxy
from stub_upstream import Exchange, StubUpstream, event

from prefixproxy.errors import UpstreamUnavailable
from prefixproxy.upkeep import Health

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **more}


def health(running: RunningProxy, name: str = "local") -> Health:
    return running.proxy.parts.dispatcher.keepers[name].state.health


def look(running: RunningProxy, name: str = "local") -> None:
    """Now, not within seconds."""
    running.proxy.parts.dispatcher.keepers[name].state.probe_now.set()


@pytest.mark.parametrize(("n_slots", "n_ctx", "model"), [(4, 128, "other"), (1, 4096, "stub"), (2, 64, "stub")])
async def test_a_server_that_was_started_anew_between_two_looks_is_known_for_what_it_is(
    n_slots: int, n_ctx: int, model: str
) -> None:
    async with StubUpstream() as first, running_proxy(first.url) as running:
        async with httpx.AsyncClient(base_url=running.url) as client:
            assert (await client.post(CHAT, json=chat())).status_code == 200
            await first.__aexit__()
            port = int(first.url.rsplit(":", 1)[1])
            async with StubUpstream(n_slots=n_slots, n_ctx_slot=n_ctx, model=model, port=port) as second:
                look(running)
                keeper = running.proxy.parts.dispatcher.keepers["local"]
                await eventually(lambda: keeper.state.facts and keeper.state.facts.n_ctx_slot == n_ctx)
                await eventually(lambda: len(running.proxy.parts.dispatcher.snapshot().slots) == n_slots)
                [told] = (await client.get("/prefixproxy/status")).json()["upstreams"]
                assert (told["model"], told["n_ctx_slot"], told["health"]) == (model, n_ctx, "up")
                answers = await asyncio.gather(*(client.post(CHAT, json=chat(max_tokens=n)) for n in range(1, 7)))
                assert [answer.status_code for answer in answers] == [200] * 6
                assert second.violations == []


async def test_a_server_that_gets_one_more_model_answers_to_it_without_a_break() -> None:
    async with proxied_stub() as (stub, running):
        stub.aliases.append("new")
        stub.model = "stub"
        stub.n_ctx_slot = 2048
        look(running)
        keeper = running.proxy.parts.dispatcher.keepers["local"]
        await eventually(lambda: keeper.state.facts and "new" in keeper.state.facts.models)


async def held_until_gone(exchange: Exchange) -> None:
    await exchange.request.connection_gone.wait()


async def silent_behind_a_token(exchange: Exchange) -> None:
    await exchange.stream_head()
    await exchange.send(event({"choices": [{"index": 0, "delta": {"content": "Fi"}, "finish_reason": None}]}))
    await exchange.request.connection_gone.wait()


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixproxy.dispatch.LOST_GRACE_S", 0.0)


@pytest.mark.usefixtures("no_grace")
async def test_a_stream_from_a_server_that_froze_ends_in_an_error() -> None:
    """Its connection stays open and tells nothing."""
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(silent_behind_a_token)
        async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
            chunks = answer.aiter_bytes()
            got = await anext(chunks)
            await freeze(running, stub)
            got += b"".join([chunk async for chunk in chunks])
        thaw(stub)
        assert (answer.status_code, len(stub.generating())) == (200, 1)
    assert b'"content":"Fi"' in got
    assert b"upstream_error" in got


@pytest.mark.usefixtures("no_grace")
async def test_an_answer_from_a_server_that_froze_is_502() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.next_answers.append(silent_behind_a_token)
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(client.post(CHAT, json=chat()))
            await stub.arrived(1)
            await freeze(running, stub)
        thaw(stub)
        answer = asked.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_error")
        assert "upstream local is lost, and did not end its answer" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("no_grace")
async def test_what_a_frozen_server_had_not_begun_is_answered_elsewhere() -> None:
    async with StubUpstream() as a, StubUpstream() as b:
        upstreams = [{"name": "a", "url": a.url}, {"name": "b", "url": b.url}]
        async with (
            running_proxy(a.url, upstreams=upstreams) as running,
            httpx.AsyncClient(base_url=running.url) as client,
        ):
            await eventually(lambda: health(running, "a") is health(running, "b") is Health.UP)
            a.next_answers.append(held_until_gone)
            b.next_answers.append(held_until_gone)
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(client.post(CHAT, json=chat()))
                await eventually(lambda: a.generating() or b.generating())
                stuck, other = (a, b) if a.generating() else (b, a)
                other.next_answers.clear()
                await freeze(running, stuck, "a" if stuck is a else "b")
            assert asked.result().status_code == 200
            assert (len(stuck.generating()), len(other.generating())) == (1, 1)
            thaw(stuck)


async def freeze(running: RunningProxy, stub: StubUpstream, name: str = "local") -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.request.connection_gone.wait()

    stub.routes |= {"/props": silent, "/slots": silent}
    dispatcher = running.proxy.parts.dispatcher
    dispatcher.lost(dispatcher.keepers[name].state.backend, UpstreamUnavailable("it does not answer", retry_after_s=1))


def thaw(stub: StubUpstream) -> None:
    stub.routes.clear()
