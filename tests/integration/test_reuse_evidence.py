"""Reuse that is off, or that the model cannot do, is named as such: in the journal and by the gauge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import RunningProxy, running_proxy

from prefixproxy.types import Kind, MissReason, RequestRecord

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

BRIEFING = " ".join(f"Rule {n}: sheet {n} lies in drawer {n * 7 % 23}, scale one to {n}000." for n in range(14))
"""Short enough that the server keeps no checkpoint within it (llama-server.md, 512 tokens before the end)."""
NEVER_WARM = 86_400.0


async def asked(running: RunningProxy, question: str, **more: Any) -> RequestRecord:
    """One short chat on the briefing; its record."""
    messages = [{"role": "system", "content": BRIEFING}, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, **more}
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return running.proxy.parts.telemetry.journal.newest(1)[0]


async def gauge(running: RunningProxy) -> str:
    async with httpx.AsyncClient(base_url=running.url) as client:
        text = (await client.get("/metrics")).text
    (line,) = [line for line in text.splitlines() if line.startswith("prefixproxy_reuse_enabled{")]
    return line.rpartition(" ")[2]


async def test_with_reuse_off_every_prompt_is_evaluated_whole(engine: RunningEngine) -> None:
    async with running_proxy(engine.url, reuse__mode="off") as running:
        await asked(running, "Where is sheet 3?")
        again = await asked(running, "Where is sheet 3?")
        assert (again.cache_n, again.expected_cached, again.miss_reason) == (0, 0, MissReason.REUSE_OFF)
        assert await gauge(running) == "0.0"
        async with httpx.AsyncClient(base_url=running.url) as client:
            metrics = (await client.get("/metrics")).text
        assert "prefixproxy_warmups_total{" not in metrics


async def test_a_client_that_forbids_reuse_is_told_so(engine: RunningEngine) -> None:
    async with running_proxy(engine.url, admission__root_threshold=NEVER_WARM) as running:
        await asked(running, "Where is sheet 4?")
        again = await asked(running, "Where is sheet 4?", cache_prompt=False)
        assert (again.cache_n, again.miss_reason) == (0, MissReason.REUSE_OFF)
        assert await gauge(running) == "1.0"


@pytest.mark.parametrize("kind", ["mamba", "hybrid"])
async def test_a_model_that_cannot_forget_a_tail_is_found_out(
    kind: str, tiny_models: Callable[[str], Path], engine_factory: Callable[..., RunningEngine]
) -> None:
    engine = engine_factory(model=tiny_models(kind), parallel=1, ctx=4096)
    upstream = {"name": "local", "url": engine.url, "snapshots": "off"}
    async with running_proxy(engine.url, admission__root_threshold=NEVER_WARM, upstreams=[upstream]) as running:
        first, *others = [await asked(running, f"Lane {n} asks. " * 12) for n in range(3)]
    assert first.miss_reason is MissReason.COLD_ROOT
    assert [other.cache_n for other in others] == [0, 0], "the briefing was in the slot, and could not be kept"
    assert {other.miss_reason for other in others} == {MissReason.NO_ROLLBACK}


async def test_tools_that_the_template_does_not_render_make_no_other_prompt(
    engine_factory: Callable[..., RunningEngine],
) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with running_proxy(engine_factory(parallel=4, ctx=4 * 1024).url) as running:
        plain = await asked(running, "Where is sheet 3?")
        with_tools = await asked(running, "Where is sheet 4?", tools=tools, tool_choice="none")
    assert (plain.kind, with_tools.kind) == (Kind.ROOT, Kind.FORK)
    assert with_tools.prompt_tokens == plain.prompt_tokens
