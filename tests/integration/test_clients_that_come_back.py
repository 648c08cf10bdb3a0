"""A client that gives up during its prefill and sends the same prompt again pays for none of it twice (real engine)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_engine import RunningEngine
from running_proxy import RunningProxy, eventually, running_proxy, until_quiet

from prefixproxy.types import Outcome, SlotState

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

LIMIT_S = 120.0
BATCH = 64
"""The engine notices a client that left between two batches."""
LONG = " ".join(f"Entry {n} of the inventory was checked twice." for n in range(700))
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
    MESSAGES: {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
    RESPONSES: {"input": LONG, "max_output_tokens": 2},
}


async def evaluated(url: str) -> int:
    """Prompt tokens the engine has evaluated since it started, by its own count."""
    async with httpx.AsyncClient() as client:
        families = text_string_to_metric_families((await client.get(f"{url}/metrics")).text)
    return int(sum(s.value for f in families for s in f.samples if s.name == "llamacpp:prompt_tokens_total"))


async def send(running: RunningProxy, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.url, timeout=LIMIT_S) as client:
        return await client.post(path, json={"temperature": 0, **body})


async def well_inside_a_prefill(running: RunningProxy, url: str, job: asyncio.Task[httpx.Response]) -> None:
    """Until the engine has evaluated a few batches of it in a slot that the proxy knows; or until it is answered, if it
    was evaluated while this request waited for it."""

    def known() -> bool:
        return any(slot.state is SlotState.LEASED for slot in running.proxy.parts.dispatcher.snapshot().slots)

    await eventually(lambda: known() or job.done())
    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(LIMIT_S):
        while not (job.done() or any(map(deep_in, (await client.get("/slots")).json()))):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.005)


def deep_in(slot: dict[str, Any]) -> bool:
    return bool(slot["is_processing"]) and slot["n_prompt_tokens_processed"] > 0


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
async def test_what_was_evaluated_is_not_evaluated_again(
    engine_factory: Callable[..., RunningEngine], path: str, stream: bool
) -> None:
    extra = {"n_batch": BATCH, "n_ubatch": BATCH, "cpuparams.n_threads": 1}
    engine = engine_factory(parallel=2, ctx=2 * 12288, extra=extra)
    async with running_proxy(engine.url, admission__root_threshold=0.01) as running:
        before = await evaluated(engine.url)
        body = {**BODIES[path], "stream": stream}
        for _ in range(3):
            async with asyncio.TaskGroup() as group:
                leaving = group.create_task(send(running, path, body))
                await well_inside_a_prefill(running, engine.url, leaving)
                leaving.cancel()
        answer = await send(running, path, body)
        assert answer.status_code == 200
        await until_quiet(running)
        journal = running.proxy.parts.telemetry.journal
        await eventually(lambda: len(journal.newest(10)) == 4)
        newest, *left = journal.newest(10)
        assert newest.outcome is Outcome.OK
        assert left[-1].outcome is Outcome.CLIENT_GONE
        n_prompt = newest.prompt_tokens
        assert n_prompt is not None
        assert n_prompt > 50 * BATCH
        # Wherever in the prefill each of them left: a batch or two at each border, never the prompt once more.
        assert await evaluated(engine.url) - before <= n_prompt + 3 * 4 * BATCH


async def test_a_second_copy_waits_for_the_first_instead_of_evaluating_beside_it(
    engine_factory: Callable[..., RunningEngine],
) -> None:
    """A client that sends again while its first request is still at work: one prefill serves both."""
    extra = {"n_batch": BATCH, "n_ubatch": BATCH, "cpuparams.n_threads": 1}
    engine = engine_factory(parallel=2, ctx=2 * 12288, extra=extra)
    async with running_proxy(engine.url, admission__root_threshold=0.01) as running:
        before = await evaluated(engine.url)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(send(running, CHAT, BODIES[CHAT]))
            await well_inside_a_prefill(running, engine.url, first)
            second = await send(running, CHAT, BODIES[CHAT])
        assert first.result().status_code == second.status_code == 200
        n_prompt = second.json()["usage"]["prompt_tokens"]
        assert await evaluated(engine.url) - before <= n_prompt + 4 * BATCH
