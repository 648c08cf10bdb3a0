"""Servers of one model whose `--slot-save-path` is one directory: on the real engine, nobody reads another's files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import RunningProxy, eventually, running_proxy, until_quiet

from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.schedule.types import Restore, RootView, Save
from prefixproxy.slotwork import SlotWork
from prefixproxy.types import RootId, SlotId
from prefixproxy.upkeep import Health

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

N_ROOTS = 4
CHAT = "/v1/chat/completions"
SETTINGS: dict[str, Any] = {"admission__root_threshold": 0.001}


def body(root: int, user: str) -> dict[str, Any]:
    system = f"You are clerk {root}. " + " ".join(f"Rule {n}: shelf {n * (7 + root) % 23}." for n in range(150))
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0}


async def families(running: RunningProxy, first: int = 0) -> dict[str, int]:
    """Each root is asked for, all at once, so that no slot stays idle: which root each family has."""
    found = {}

    async def ask(client: httpx.AsyncClient, root: int) -> None:
        answer = await client.post(CHAT, json=body(root, "What of sheet 1?"))
        assert answer.status_code == 200, answer.text
        found[answer.headers["x-prefixproxy-family"]] = root

    async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:
        async with asyncio.TaskGroup() as group:
            for root in range(first, first + N_ROOTS):
                group.create_task(ask(client, root))
        await until_quiet(running)
    return found


def saved(running: RunningProxy) -> list[RootView]:
    return [root for root in running.proxy.parts.dispatcher.snapshot().roots if root.file_bytes]


async def holds_what_was_saved(url: str, snapshot: RootView, root: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        restored = await client.post("/slots/0?action=restore", json={"filename": snapshot.file})
        assert restored.json()["n_read"] == snapshot.file_bytes
        answer = (await client.post(CHAT, json={**body(root, "What of sheet 2?"), "id_slot": 0})).json()
        assert answer["timings"]["cache_n"] > 1000


async def test_two_upstreams_of_one_proxy(engine_factory: Callable[..., RunningEngine], tmp_path: Path) -> None:
    urls = {name: engine_factory(parallel=1, ctx=4096, save_dir=tmp_path).url for name in "ab"}
    upstreams = [{"name": name, "url": url} for name, url in urls.items()]
    async with running_proxy(urls["a"], upstreams=upstreams, **SETTINGS) as running:
        keepers = running.proxy.parts.dispatcher.keepers
        await eventually(lambda: all(keeper.state.health is Health.UP for keeper in keepers.values()))
        roots, snapshots = await families(running), saved(running)
    assert {snapshot.upstream for snapshot in snapshots} == {"a", "b"}
    for snapshot in snapshots:
        await holds_what_was_saved(urls[snapshot.upstream], snapshot, roots[snapshot.family])


async def test_two_proxies_with_a_server_each(engine_factory: Callable[..., RunningEngine], tmp_path: Path) -> None:
    """Both call their server by the same name."""
    urls = [engine_factory(parallel=1, ctx=4096, save_dir=tmp_path).url for _ in range(2)]
    async with running_proxy(urls[0], **SETTINGS) as one, running_proxy(urls[1], **SETTINGS) as other:
        found = [(await families(running, i * N_ROOTS), saved(running)) for i, running in enumerate((one, other))]
    for url, (roots, snapshots) in zip(urls, found, strict=True):
        assert len(snapshots) >= N_ROOTS
        for snapshot in snapshots:
            await holds_what_was_saved(url, snapshot, roots[snapshot.family])


async def test_a_file_that_was_written_over_is_not_taken_for_what_was_saved(
    engine_factory: Callable[..., RunningEngine],
) -> None:
    """What names cannot keep apart, as two proxies of one name before one server, shows in the file's length."""
    engine = engine_factory(parallel=1, ctx=4096)
    server, watch = LlamaServer("u", engine.url), Mock()
    work = SlotWork(watch, Mock(), lambda name: "m")
    save, n_bytes = Save(RootId("ours"), SlotId("u", 0), "one.bin"), []
    try:
        for prompt in ("Rule 1: shelf 7. " * 20, "Rule 1: shelf 7. " * 21):
            await server.call("POST", "/completion", {"prompt": prompt, "id_slot": 0, "n_predict": 0})
            done = await work.save(server, save)
            assert done is not None
            n_bytes.append(done.n_bytes)
        restores = [Restore(save.root, save.slot, save.file, n_bytes=n) for n in n_bytes]
        results = [await work.restore(server, restore) for restore in restores]
    finally:
        await server.close()
    assert results[0] is None
    assert results[1] is not None
    assert [call.args[1] for call in watch.fork.call_args_list] == ["failed", "ok"]
