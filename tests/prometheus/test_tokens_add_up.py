"""The proxy's token counters against the engine's own: the same run, the same sums, to the token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_engine import RunningEngine
from running_proxy import RunningProxy, running_proxy, until_quiet

from prefixproxy.types import Outcome

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

CHAT = "/v1/chat/completions"
BRIEFING = " ".join(f"Rule {n}: sheet {n} lies in drawer {n * 7 % 23}, scale one to {n}000." for n in range(60))
OTHER = " ".join(f"Shelf {n} holds the loans of reader {n * 11 % 37}." for n in range(60))
LONG = " ".join(f"Entry {n} of the inventory was checked twice." for n in range(700))
SMALL_BATCH = {"n_batch": 64, "n_ubatch": 64, "cpuparams.n_threads": 1}
"""The engine looks up from a prefill after each batch: small ones let a test meet it on the way."""


async def samples(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels, 0 where there is none."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(url)).text
    found = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return sum(s.value for s in found if labels.items() <= s.labels.items())


async def counted(running: RunningProxy, **labels: str) -> tuple[float, float]:
    """Cached and evaluated prompt tokens as the proxy counts them."""
    url, name = f"{running.url}/metrics", "prefixproxy_prompt_tokens_total"
    return await samples(url, name, source="cached"), await samples(url, name, source="evaluated")


async def engine_counted(running: RunningProxy) -> tuple[float, float]:
    """The same in the engine's counters, read through the proxy."""
    url = f"{running.url}/prefixproxy/upstreams/local/metrics"
    return await samples(url, "llamacpp:prompt_tokens_cached_total"), await samples(url, "llamacpp:prompt_tokens_total")


@asynccontextmanager
async def proxied(start: Callable[..., RunningEngine], **more: Any) -> AsyncIterator[tuple[RunningProxy, str]]:
    engine = start(parallel=4, ctx=4 * 10240, extra=SMALL_BATCH)
    async with running_proxy(engine.url, admission__root_threshold=0.01, **more) as running:
        yield running, engine.url


async def post(running: RunningProxy, path: str, **body: Any) -> str:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        answer = await client.post(path, json={"temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.text


def chat(system: str, *turns: str, **more: Any) -> dict[str, Any]:
    said = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return {"messages": [{"role": "system", "content": system}, *said], "max_tokens": 2, **more}


async def prefilling(url: str) -> None:
    """Until the engine is well inside a long prefill."""
    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(30):
        while not any(map(deep_in, await slots(client))):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)


def deep_in(slot: dict[str, Any]) -> bool:
    return bool(slot["is_processing"]) and slot["n_prompt_tokens_processed"] > 256


async def slots(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await client.get("/slots")).json()
    return listed


async def leave_when(running: RunningProxy, body: dict[str, Any], moment: Callable[[asyncio.Event], Any]) -> None:
    """Send a streaming chat and close the connection at `moment`, which may wait for the first text."""
    first_text = asyncio.Event()

    async def send() -> None:
        async with (
            httpx.AsyncClient(base_url=running.url, timeout=60) as client,
            client.stream("POST", CHAT, json={**body, "stream": True}) as answer,
        ):
            async for chunk in answer.aiter_raw():
                if b'"content":"' in chunk:
                    first_text.set()

    async with asyncio.TaskGroup() as group:
        job = group.create_task(send())
        await moment(first_text)
        job.cancel()
    await until_quiet(running)


def newest_outcome(running: RunningProxy) -> Outcome:
    return running.proxy.parts.telemetry.journal.newest(1)[0].outcome


async def test_every_prompt_token_the_engine_counts_is_counted_once(
    engine_factory: Callable[..., RunningEngine],
) -> None:
    """Chats streamed and not, every other API, a fan-out with its warm-up and forks, two answers at once."""
    async with proxied(engine_factory) as (running, _):
        await post(running, CHAT, **chat(OTHER, "Who has sheet 3?"))
        await post(running, CHAT, **chat(OTHER, "Who has sheet 3?", "Reader 4.", "And sheet 5?", stream=True))
        lanes = [chat(BRIEFING, f"Lane {n}: where is sheet {n}?", stream=n % 2 == 0) for n in range(6)]
        await asyncio.gather(*(post(running, CHAT, **lane) for lane in lanes))
        await post(running, "/v1/completions", prompt=BRIEFING, max_tokens=2)
        await post(running, "/completion", prompt=BRIEFING, n_predict=2, stream=True)
        await post(running, "/v1/messages", **chat(BRIEFING, "In the words of Anthropic?"))
        await post(running, "/v1/responses", input="And as a response?", max_output_tokens=2)
        await post(running, CHAT, **chat(BRIEFING, "Say it twice.", n=2))
        await until_quiet(running)

        assert await counted(running) == await engine_counted(running)
        metrics = f"{running.url}/metrics"
        assert await samples(metrics, "prefixproxy_warmups_total", outcome="ok") >= 1
        assert await samples(metrics, "prefixproxy_forks_total", outcome="ok") >= 1
        by_slot = [
            await samples(metrics, "prefixproxy_slot_prompt_tokens_total", source=source)
            for source in ("cached", "evaluated")
        ]
        assert sum(by_slot) > 0


async def test_requests_whose_client_left_are_counted_as_far_as_the_engine_went(
    engine_factory: Callable[..., RunningEngine],
) -> None:
    async with proxied(engine_factory) as (running, engine_url):
        await post(running, CHAT, **chat(BRIEFING, "Where is sheet 1?"))
        before = await counted(running)

        await leave_when(
            running, chat(BRIEFING, "Talk on.", max_tokens=4000, ignore_eos=True), lambda text: text.wait()
        )
        assert newest_outcome(running) is Outcome.CLIENT_GONE
        assert await counted(running) == await engine_counted(running) > before

        before = await counted(running)
        await leave_when(running, chat(BRIEFING, f"Read this. {LONG}"), lambda text: prefilling(engine_url))
        left = running.proxy.parts.telemetry.journal.newest(1)[0]
        assert (left.outcome, left.prompt_n) == (Outcome.CLIENT_GONE, None), "it left too late to test anything"
        after = await counted(running)
        assert after[0] > before[0], "the briefing was in the slot"
        assert after[1] >= before[1] + 256
        assert after == await engine_counted(running)


async def test_the_metrics_of_an_unknown_upstream_are_not_found(engine: RunningEngine) -> None:
    async with running_proxy(engine.url) as running, httpx.AsyncClient(base_url=running.url) as client:
        known = await client.get("/prefixproxy/upstreams/local/metrics")
        assert known.status_code == 200
        assert known.headers["content-type"].startswith("text/plain")
        unknown = await client.get("/prefixproxy/upstreams/nobody/metrics")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
