"""Whether a model's memory can be cut back is tried out when a server that nobody has used is met, and only then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy
from stub_upstream import Exchange, StubUpstream

from prefixproxy.backends.llamacpp import LlamaServer

pytestmark = pytest.mark.anyio


async def capabilities(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url) as client:
        [upstream] = (await client.get("/prefixproxy/status")).json()["upstreams"]
    able: dict[str, Any] = upstream["capabilities"]
    return able


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "expected"), [("llama", True), ("attentive", True), ("mamba", False), ("hybrid", False), ("swa", None)]
)
async def test_a_fresh_server_is_tried_and_a_used_one_is_left_alone(
    kind: str,
    expected: bool | None,
    tiny_models: Callable[[str], Path],
    engine_factory: Callable[..., RunningEngine],
) -> None:
    engine = engine_factory(model=tiny_models(kind), parallel=2, ctx=2 * 1024)
    async with running_proxy(engine.url) as running, httpx.AsyncClient(base_url=engine.url) as straight:
        assert (await capabilities(running.url))["rolls_back"] is expected
        slots = (await straight.get("/slots")).json()

        later = LlamaServer("later", engine.url)
        try:
            assert (await later.probe()).capabilities.rolls_back is None
        finally:
            await later.close()
        assert (await straight.get("/slots")).json() == slots


async def test_a_verdict_is_remembered_and_its_cost_told_once(engine_factory: Callable[..., RunningEngine]) -> None:
    engine = engine_factory(parallel=2, ctx=2 * 1024)
    server = LlamaServer("local", engine.url)
    try:
        first, second = await server.probe(), await server.probe()
    finally:
        await server.close()
    assert (first.capabilities.rolls_back, second.capabilities.rolls_back) == (True, True)
    for able in (first.capabilities, second.capabilities):
        assert (able.clears_idle, able.host_cache) == (False, True)
    assert (first.ram_mib, second.ram_mib) == (8192, 8192)
    cost = [(usage.cached_tokens, usage.evaluated_tokens) for usage in first.tried.values()]
    assert sorted(cost) == [(18, 32 + 6 + 1), (4 + 16 + 17, 16 + 8 + 1 + 1)]
    assert second.tried == {}


async def test_a_server_with_its_own_defaults_clears_its_idle_slots_and_gets_no_pin(
    engine_factory: Callable[..., RunningEngine],
) -> None:
    """Two roots take turns: each request finds its root in the RAM cache, where a pin would bypass it."""
    engine = engine_factory(parallel=-1, ctx=4 * 1024, stock=True)
    roots = [" ".join(f"{name} {n}: shelf {n * 7 % 23}." for n in range(60)) for name in ("Rule", "Thing")]
    async with running_proxy(engine.url) as running, httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        assert (await capabilities(running.url))["clears_idle"] is True
        for n in range(8):
            messages = [{"role": "system", "content": roots[n % 2]}, {"role": "user", "content": f"Which, {n}?"}]
            answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
            assert n < 2 or answer.json()["timings"]["cache_n"] > 300, n
        [upstream] = (await client.get("/prefixproxy/status")).json()["upstreams"]
        assert "clears the idle slots" in upstream["scheduler"]["unpinned_because"]
        later = LlamaServer("later", engine.url)
        try:
            assert (await later.probe()).capabilities.clears_idle in (True, None)
        finally:
            await later.close()


async def test_a_server_without_a_ram_cache_is_told(engine_factory: Callable[..., RunningEngine]) -> None:
    server = LlamaServer("local", engine_factory(parallel=3, ctx=3 * 1024, extra={"cache_ram_mib": 0}).url)
    try:
        facts = await server.probe()
    finally:
        await server.close()
    assert (facts.capabilities.clears_idle, facts.capabilities.host_cache, facts.ram_mib) == (False, False, 0)


@pytest.mark.parametrize(
    ("props", "slot"),
    [
        ({"is_sleeping": True}, {"is_processing": False}),
        ({"is_sleeping": False}, {"is_processing": True}),
        ({"is_sleeping": False}, {"is_processing": False, "n_prompt_tokens": 0}),
    ],
)
async def test_nothing_is_tried_on_a_server_that_sleeps_or_works_or_was_used(
    props: dict[str, Any], slot: dict[str, Any]
) -> None:
    assert await tried(props, slot) == ([], None)


async def test_a_server_that_refuses_the_trial_serves_all_the_same() -> None:
    prompts, verdict = await tried({}, {"is_processing": False}, refuses=True)
    assert (len(prompts), verdict) == (1, None)


async def tried(props: dict[str, Any], slot: dict[str, Any], refuses: bool = False) -> tuple[list[str], bool | None]:
    """The prompts that came to a stub which says so of itself and of each of its slots, and what was concluded."""
    stub = StubUpstream(n_slots=2)

    async def told(exchange: Exchange) -> None:
        await exchange.json(200, {"total_slots": 2, "model_path": "stub.gguf", "build_info": "b1", **props})

    async def listed(exchange: Exchange) -> None:
        await exchange.json(200, [{"id": number, **slot} for number in range(2)])

    async def refused(exchange: Exchange) -> None:
        await exchange.json(501, {"error": {"code": 501, "message": "no", "type": "not_supported_error"}})

    stub.routes |= {"/props": told, "/slots": listed}
    if refuses:
        stub.routes["/completion"] = refused
    async with stub:
        server = LlamaServer("local", stub.url)
        try:
            able = (await server.probe()).capabilities
        finally:
            await server.close()
    assert able.warm, "it serves all the same"
    return [seen.path for seen in stub.requests if seen.path == "/completion"], able.rolls_back
