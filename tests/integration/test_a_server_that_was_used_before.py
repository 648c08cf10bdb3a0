"""A conversation that ran straight to a server goes on through the proxy: what the server has of it is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import eventually, running_proxy, until_quiet

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(120)]

PATH = "/v1/chat/completions"


def talk(name: str, n: int = 60) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": " ".join(f"{name} {i}: shelf {i * 7 % 23}." for i in range(n))},
        {"role": "user", "content": "Where is sheet 3?"},
    ]


async def asked(client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The server's timings; the answer and another question are added."""
    answer = await client.post(PATH, json={"messages": messages, "max_tokens": 4, "temperature": 0})
    assert answer.status_code == 200, answer.text
    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And sheet 4?"}]
    timings: dict[str, Any] = answer.json()["timings"]
    return timings


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
async def test_conversations_from_before_are_found(
    kind: str, engine_factory: Callable[..., RunningEngine], tiny_models: Callable[[str], Path]
) -> None:
    engine = engine_factory(model=tiny_models(kind), parallel=4, ctx=4 * 2048)
    talks = [talk(name) for name in ("Rule", "Thing", "Plan")]
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as straight:
        for messages in talks:
            await asked(straight, messages)
    async with running_proxy(engine.url) as running, httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        for messages in talks:
            assert (await asked(client, messages))["prompt_n"] < 60


async def test_so_is_one_that_another_client_had_straight(engine_factory: Callable[..., RunningEngine]) -> None:
    engine, messages = engine_factory(parallel=4, ctx=4 * 2048), talk("Rule")
    async with (
        running_proxy(engine.url) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60) as client,
        httpx.AsyncClient(base_url=engine.url, timeout=60) as straight,
    ):
        await asked(client, talk("Else", 3))
        await asked(straight, messages)
        assert (await asked(client, messages))["prompt_n"] < 60


async def test_what_a_client_erases_is_not_counted_on(engine_factory: Callable[..., RunningEngine]) -> None:
    engine = engine_factory(parallel=2, ctx=2 * 2048)
    async with running_proxy(engine.url) as running, httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        await asked(client, talk("Rule"))
        await until_quiet(running)

        def held() -> list[int]:
            return [slot.tokens for slot in running.proxy.parts.dispatcher.snapshot().slots]

        [slot] = [number for number, tokens in enumerate(held()) if tokens > 300]
        assert (await client.post(f"/slots/{slot}?action=erase")).status_code == 200
        await eventually(lambda: held()[slot] == 0)
