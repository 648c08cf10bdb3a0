"""llama-server answers to any name with its only model: clients that name it differently share what is in its slots."""

from __future__ import annotations

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

ROOT = "You are the clerk of a map archive. " + " ".join(f"Rule {n}: shelf {n * 7 % 23}." for n in range(80))
NAMES = ["gpt-4o", "local", None]


async def test_the_root_is_shared_whatever_the_model_is_called(engine: RunningEngine) -> None:
    async with running_proxy(engine.url) as running, httpx.AsyncClient(base_url=running.url, timeout=120) as client:
        for i, name in enumerate(NAMES):
            messages = [{"role": "system", "content": ROOT}, {"role": "user", "content": f"Where is sheet {i}?"}]
            body = {"messages": messages, "max_tokens": 4} | ({} if name is None else {"model": name})
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
        records = running.proxy.parts.telemetry.journal.newest(9)

    _, *later = reversed(records)
    assert len(later) == len(NAMES) - 1
    assert all((record.expected_cached or 0) > 300 for record in later)
    assert all((record.cache_n or 0) > 500 for record in later)
