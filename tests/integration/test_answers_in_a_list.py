"""llama-server's own API answers several prompts, and `n` above 1, with a list: an answer like any other."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy, until_quiet

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize("asked", [{"prompt": "A shelf.", "n": 2}, {"prompt": ["A shelf.", "Two more boxes."]}])
async def test_it_counts_as_the_server_counted_the_last_of_them(engine: RunningEngine, asked: dict[str, Any]) -> None:
    async with running_proxy(engine.url) as running, httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{running.url}/completion", json={**asked, "n_predict": 2, "temperature": 0})
        await until_quiet(running)
        (record,) = (await client.get(f"{running.url}/prefixproxy/requests")).json()["requests"]
    last = answer.json()[-1]["timings"]
    assert len(answer.json()) == 2
    assert (record["outcome"], record["cache_source"]) == ("ok", "reported")
    assert (record["cache_n"], record["prompt_n"]) == (last["cache_n"], last["prompt_n"])
    assert answer.headers["x-prefixproxy-prompt-n"] == str(last["prompt_n"])
