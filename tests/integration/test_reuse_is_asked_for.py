"""Before the real engine: a server that reuses nothing unasked, and prompts that come in another form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy

from prefixproxy.backends.llamacpp import LlamaServer

pytestmark = [pytest.mark.anyio, pytest.mark.engine]
HEAD = {"role": "system", "content": " ".join(f"Rule {n}: shelf {n * 7 % 23}." for n in range(60))}
FIRST, SECOND = {"role": "user", "content": "Which one?"}, {"role": "user", "content": "And why?"}


@asynccontextmanager
async def clients(engine: RunningEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with running_proxy(engine.url, **settings) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            yield client


async def reused(client: httpx.AsyncClient, path: str, **body: Any) -> int:
    """Tokens of the prompt."""
    answer = await client.post(path, json={"max_tokens": 2, "n_predict": 2, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["timings"]["cache_n"])


async def test_a_server_that_reuses_nothing_unasked_is_asked_to(
    engine_factory: Callable[..., RunningEngine],
) -> None:
    engine = engine_factory(parallel=2, ctx=4096, extra={"cache_prompt": False})
    async with clients(engine) as client, httpx.AsyncClient(base_url=engine.url, timeout=60) as straight:
        asked = [await reused(client, "/v1/chat/completions", messages=[HEAD, one]) for one in (FIRST, SECOND)]
        assert asked[1] > 300
        whole = {"messages": [HEAD, FIRST], "cache_prompt": False}
        assert await reused(client, "/v1/chat/completions", **whole) == 0, "the client's own word stays"
        assert await reused(straight, "/v1/chat/completions", messages=[HEAD, SECOND]) == 0
    async with clients(engine, reuse__mode="off") as client:
        assert await reused(client, "/v1/chat/completions", messages=[HEAD, FIRST]) == 0


@pytest.mark.parametrize("kind", ["llama", "mamba", "swa"])
@pytest.mark.parametrize(("extra", "told"), [({}, True), ({"cache_prompt": False}, False)])
async def test_a_probe_tells_whether_it_reuses_unasked(
    kind: str,
    extra: dict[str, Any],
    told: bool,
    tiny_models: Callable[[str], Path],
    engine_factory: Callable[..., RunningEngine],
) -> None:
    server = LlamaServer("local", engine_factory(model=tiny_models(kind), parallel=2, ctx=2048, extra=extra).url)
    try:
        assert (await server.probe()).reuses_unasked is told
    finally:
        await server.close()


async def test_a_prompt_is_found_again_in_another_form(engine_factory: Callable[..., RunningEngine]) -> None:
    engine = engine_factory(parallel=3, ctx=3 * 2048)
    async with clients(engine) as client:
        await reused(client, "/v1/chat/completions", messages=[HEAD, FIRST])
        rendered = (await client.post("/apply-template", json={"messages": [HEAD, SECOND]})).json()["prompt"]
        tokens = (await client.post("/tokenize", json={"content": rendered})).json()["tokens"]
        assert await reused(client, "/completion", prompt=rendered) > 300
        assert await reused(client, "/completion", prompt=[*tokens, tokens[-1]]) > 300
        assert await reused(client, "/v1/chat/completions", messages=[HEAD, SECOND]) > 300
