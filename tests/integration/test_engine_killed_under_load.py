"""The embedded engine is killed under load: every request ends, service comes back by itself, hot roots with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_engine import CHILDREN_FILE, engine_pids
from running_proxy import eventually, listening, until_quiet

from prefixproxy.app import EMBEDDED
from prefixproxy.engine import EngineSettings, RestartPolicy
from prefixproxy.serving import wired
from prefixproxy.settings import load_settings, packaged_config
from prefixproxy.upkeep import Health

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

N_LANES, N_ROOTS = 24, 2


def body(lane: int, **more: Any) -> dict[str, Any]:
    root = lane % N_ROOTS
    system = f"You are clerk {root}. " + f"Rule {root}: name the sheet, the scale and the shelf. " * 30
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"What of sheet {lane}?"}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, **more}


async def ending(client: httpx.AsyncClient, lane: int, stream: bool) -> str:
    """How a request ends: with its answer, or the code or message of its error."""
    try:
        answer = await client.post("/v1/chat/completions", json=body(lane, stream=stream, max_tokens=200))
    except httpx.RemoteProtocolError:
        return "cut" if stream else "lost"
    if answer.status_code == 200:
        finished = not stream or "[DONE]" in answer.text
        return "answer" if finished else "told" if '"error"' in answer.text else "cut"
    return f"{answer.status_code} {answer.json()['error']['message']}"


async def answers(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Two lanes of each root, one after the other."""
    return [(await client.post("/v1/chat/completions", json=body(lane))).json() for lane in range(2 * N_ROOTS)]


@pytest.mark.skipif(not CHILDREN_FILE.exists(), reason="finds the engine's process in /proc")
async def test_the_engine_is_killed_under_load(tiny_models: Callable[[str], Path]) -> None:
    engine = EngineSettings(
        tiny_models("attentive"),
        parallel=4,
        ctx=4 * 4096,
        extra={"cpuparams.n_threads": 1},
        restart=RestartPolicy(first_delay_s=0.01),
    )
    overrides = {"state.path": ":memory:", "admission.root_threshold": 0.001}
    settings = load_settings(packaged_config("default.toml"), overrides, {})
    async with wired(settings, engine) as proxy, listening(proxy) as running:
        keeper = proxy.parts.dispatcher.keepers[EMBEDDED]
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:
            before = [
                (await client.post("/v1/chat/completions", json=body(lane))).json() for lane in range(2 * N_ROOTS)
            ]
            saved = {root.family for root in proxy.parts.dispatcher.snapshot().roots if root.file_bytes}
            assert len(saved) == N_ROOTS, "each root has a file, and a conversation that gave way may have one, too"

            async with asyncio.TaskGroup() as group:
                lanes = [group.create_task(ending(client, lane, lane % 2 == 0)) for lane in range(N_LANES)]
                await eventually(lambda: proxy.parts.dispatcher.snapshot().running == 4)
                [pid] = engine_pids()
                os.kill(pid, signal.SIGKILL)
            endings = [lane.result() for lane in lanes]
            assert "lost" not in endings, endings
            assert endings.count("answer") >= N_LANES - 8, "only those that ran were harmed"

            await until_quiet(running)
            [pid] = engine_pids()
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda: keeper.state.health is not Health.UP)
            await eventually(lambda: keeper.state.health is Health.UP)
            await until_quiet(running)
            held = sorted(slot.tokens for slot in proxy.parts.dispatcher.snapshot().slots)
            assert held[-N_ROOTS] > 300, f"the roots are back before anybody asks: {held}"
            after = await answers(client)
    for old, new in zip(before, after, strict=True):
        assert new["choices"] == old["choices"]
        assert new["timings"]["cache_n"] > 300
