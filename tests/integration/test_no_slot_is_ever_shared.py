"""Two hundred requests at once on four slots say what they say one by one: no request reads another's KV."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy, until_quiet

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

N_REQUESTS = 200
N_ROOTS = 5


def body(number: int) -> dict[str, Any]:
    """Five roots of a few hundred tokens, and a nonce that only this request knows."""
    root = number % N_ROOTS
    system = f"You are clerk {root} of the archive. " + f"Rule {root}: name the sheet, the scale and the shelf. " * 20
    user = f"Nonce {number * 7919 % 100003}: what does rule {number % 13} say of sheet {number}?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, "stream": number % 2 == 0}


def text_of(answer: httpx.Response) -> str:
    """What was said, streamed or not."""
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    deltas = [httpx.Response(200, text=event).json()["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content") or "" for delta in deltas)


async def said(client: httpx.AsyncClient, number: int) -> str:
    answer = await client.post("/v1/chat/completions", json=body(number))
    assert answer.status_code == 200, answer.text
    return text_of(answer)


async def test_two_hundred_at_once_answer_as_one_by_one(
    engine_factory: Callable[..., RunningEngine], tiny_models: Callable[[str], Path]
) -> None:
    engine = engine_factory(model=tiny_models("attentive"))
    # llama-server closes a connection after 100 requests without a word, so the straight client uses one for each.
    single = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=engine.url, timeout=120, limits=single) as straight:
        alone = [await said(straight, number) for number in range(N_REQUESTS)]
    assert len(set(alone)) > N_REQUESTS // 4, "the model must tell the requests apart"

    # A root threshold near zero makes every root worth a warm-up, so that save and restore take part.
    async with running_proxy(engine.url, admission__root_threshold=0.001) as running:
        limits = httpx.Limits(max_connections=N_REQUESTS)
        async with httpx.AsyncClient(base_url=running.url, timeout=240, limits=limits) as client:
            together = await asyncio.gather(*(said(client, number) for number in range(N_REQUESTS)))
            journal = (await client.get("/prefixproxy/requests", params={"limit": N_REQUESTS})).json()["requests"]
        await until_quiet(running)

    different = [number for number in range(N_REQUESTS) if together[number] != alone[number]]
    assert different == []
    assert Counter(record["outcome"] for record in journal) == {"ok": N_REQUESTS}
    # None: sent without one, and over before it was found
    assert {0, 1, 2, 3} <= {record["slot"] for record in journal} <= {0, 1, 2, 3, None}
