"""Recurrent, hybrid and sliding-window models on the real engine: they cannot forget a tail, so what serves several
lanes is a copy of the root alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import RunningProxy, running_proxy, until_quiet

from prefixproxy.demo.prompt import briefing
from prefixproxy.demo.wave import evaluated_total
from prefixproxy.schedule.types import Policy
from prefixproxy.types import Outcome, RequestRecord

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

LANES = 4
LIMIT_S = 120.0
LEAST_OVER = 1.25
"""Tokens evaluated over the least possible: each wave is one root and four short questions."""


async def wave(running: RunningProxy, lanes: Sequence[int]) -> list[RequestRecord]:
    """These lanes at once on one root; their records."""
    root = briefing("north", 1800)

    async def ask(client: httpx.AsyncClient, lane: int) -> None:
        messages = [
            {"role": "system", "content": root},
            {"role": "user", "content": f"Lane {lane}: sum up section {lane + 1} in one line."},
        ]
        answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 6})
        assert answer.status_code == 200, answer.text

    async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as client, asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(ask(client, lane))
    await until_quiet(running)
    return running.proxy.parts.telemetry.journal.newest(len(lanes))


@pytest.mark.parametrize("kind", ["mamba", "hybrid", "swa"])
async def test_a_root_is_evaluated_once_and_copied(
    kind: str, tiny_models: Callable[[str], Path], engine_factory: Callable[..., RunningEngine]
) -> None:
    engine = engine_factory(model=tiny_models(kind), parallel=LANES, ctx=LANES * 4096)
    async with running_proxy(engine.url) as running:
        running.proxy.parts.dispatcher.set_policy(Policy(root_threshold_s=0.002))
        before = await evaluated_total(engine.url)
        records = [*await wave(running, range(LANES)), *await wave(running, range(LANES, 2 * LANES))]
        after = await evaluated_total(engine.url)
    assert [record.outcome for record in records] == [Outcome.OK] * len(records)
    assert before is not None
    assert after is not None
    prompts = [record.prompt_tokens or 0 for record in records]
    reused = [record.cache_n or 0 for record in records]
    root = min(prompts) - 64
    assert all(tokens > 0.9 * root for tokens in reused), (prompts, reused)
    least = max(reused) + sum(prompt - max(reused) for prompt in prompts)
    assert after - before <= LEAST_OVER * least, (prompts, reused)


@pytest.mark.parametrize("kind", ["mamba", "hybrid"])
async def test_a_document_in_the_question_is_evaluated_once_more_and_then_kept(
    kind: str, tiny_models: Callable[[str], Path], engine_factory: Callable[..., RunningEngine]
) -> None:
    """One question after the other: the server itself goes on from a checkpoint at most, a batch before the end."""
    engine = engine_factory(model=tiny_models(kind), parallel=LANES, ctx=LANES * 4096)
    document = briefing("north", 1800)
    async with running_proxy(engine.url) as running, httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as client:
        for question in range(4):
            messages = [
                {"role": "system", "content": "Answer."},
                {
                    "role": "user",
                    "content": f"{document}\n\nQuestion {question}: what is section {question + 2} about?",
                },
            ]
            answer = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
            assert answer.status_code == 200, answer.text
        await until_quiet(running)
        records = running.proxy.parts.telemetry.journal.newest(4)
    reused = [record.cache_n or 0 for record in sorted(records, key=lambda record: record.time)]
    prompt = min(record.prompt_tokens or 0 for record in records)
    assert reused[0] < 0.1 * prompt
    assert all(tokens > 0.95 * prompt for tokens in reused[2:]), (prompt, reused)
