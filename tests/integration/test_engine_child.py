"""The real llama.cpp server as a child process: comes up, is restarted, and never outlives its parent."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from running_engine import CHILDREN_FILE, RunningEngine, engine_pids
from running_proxy import eventually, listening

from prefixproxy.app import EMBEDDED
from prefixproxy.engine import (
    Engine,
    EngineEvent,
    EngineFacts,
    EngineFailed,
    EngineSettings,
    EngineState,
    RestartPolicy,
)
from prefixproxy.serving import wired
from prefixproxy.settings import load_settings, packaged_config
from prefixproxy.upkeep import Health

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


def small(model: Path, **changes: object) -> EngineSettings:
    return EngineSettings(model, **{"parallel": 2, "ctx": 1024, **changes})  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").exists() else True


def test_the_servers_log_is_kept(engine_factory: Callable[..., RunningEngine]) -> None:
    # an engine of its own: in the shared one's log, other tests' requests push the start out
    engine, deadline = engine_factory().engine, time.monotonic() + 30
    while not any("model loaded" in line for line in engine.log_tail(400)):
        assert time.monotonic() < deadline, "readiness may overtake the log on its own pipe, but not for this long"
        time.sleep(0.02)


def test_shared_engine_serves_with_the_recommended_settings(engine: RunningEngine) -> None:
    assert engine.facts == EngineFacts(n_slots=4, n_ctx_slot=4096, kv_unified=False)
    assert [s["n_ctx"] for s in httpx.get(f"{engine.url}/slots").json()] == [4096] * 4
    assert "llamacpp:prompt_tokens_total" in httpx.get(f"{engine.url}/metrics").text
    assert engine.engine.build.startswith("xllamacpp-")


def test_a_saved_slot_lands_in_the_private_directory(engine: RunningEngine) -> None:
    httpx.post(f"{engine.url}/completion", json={"prompt": "one two three", "n_predict": 0, "id_slot": 3})
    saved = httpx.post(f"{engine.url}/slots/3?action=save", json={"filename": "three.bin"})
    assert saved.status_code == 200
    file = engine.save_dir / "three.bin"
    assert file.stat().st_size == saved.json()["n_written"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(engine.save_dir.stat().st_mode) == 0o700


def test_stock_engine_cannot_save_slots(engine_factory: Callable[..., RunningEngine]) -> None:
    stock = engine_factory(stock=True, parallel=2, ctx=1024)
    assert stock.facts == EngineFacts(n_slots=2, n_ctx_slot=512, kv_unified=False)
    assert httpx.post(f"{stock.url}/slots/0?action=save", json={"filename": "x.bin"}).status_code == 501
    assert httpx.get(f"{stock.url}/slots").status_code == 200


async def test_a_crash_is_reported_and_the_engine_comes_back_on_the_same_url(tiny_model: Path) -> None:
    events: list[EngineEvent] = []
    crashed = asyncio.Event()

    def note(event: EngineEvent) -> None:
        events.append(event)
        if event.state is EngineState.CRASHED:
            crashed.set()

    async with Engine(small(tiny_model, restart=RestartPolicy(first_delay_s=0.01)), note) as engine:
        await engine.wait_ready()
        first, url = engine.pid, engine.url
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await asyncio.wait_for(crashed.wait(), 30)
        await engine.wait_ready()
        assert engine.pid != first
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/health")).json() == {"status": "ok"}
    assert [e.state.value for e in events] == ["starting", "ready", "crashed", "starting", "ready", "stopped"]
    assert "killed by signal 9" in events[2].reason
    assert events[2].retry_in_s == 0.01


async def test_an_engine_that_crashes_at_once_is_given_up_with_the_reason(tiny_model: Path) -> None:
    events: list[EngineEvent] = []
    restart = RestartPolicy(first_delay_s=0.01, quick_failures=2)

    def kill_each(event: EngineEvent) -> None:
        events.append(event)
        if event.state is EngineState.STARTING and event.pid is not None:
            os.kill(event.pid, signal.SIGABRT)

    async with Engine(small(tiny_model, restart=restart), kill_each) as engine:
        with pytest.raises(EngineFailed, match="failed 2 times in a row: killed by signal 6"):
            await engine.wait_ready()
        assert engine.pid is None
    assert [e.state.value for e in events] == ["starting", "crashed", "starting", "gave_up"]


async def test_a_model_the_server_cannot_load_is_given_up_at_once(tmp_path: Path, tokenizer_source: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\x00" * 100)
    async with Engine(small(broken)) as engine:
        with pytest.raises(EngineFailed) as caught:
            await engine.wait_ready()
    assert "\n" not in str(caught.value)
    assert "broken.gguf" in str(caught.value)


async def test_a_proxy_before_an_engine_that_never_served_is_told_so_and_so_are_its_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    told = asyncio.Event()
    settings = load_settings(packaged_config("default.toml"), {"state.path": ":memory:"}, {})
    answer: httpx.Response | None = None
    with suppress(EngineFailed):
        async with wired(settings, small(broken), told.set) as proxy, listening(proxy, wait_ready=False) as running:
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                answer = await client.post("/v1/chat/completions", json={"messages": []})
            await told.wait()
        pytest.fail("leaving tells it too")
    assert answer is not None
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")
    assert f"the engine cannot run {broken}" in answer.json()["error"]["message"]
    assert [record for record in caplog.records if "cannot run" in record.getMessage()] == []


@pytest.mark.skipif(not CHILDREN_FILE.exists(), reason="finds the engine's process in /proc")
async def test_an_engine_that_served_once_leaves_the_proxy_up_when_it_is_given_up(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = asyncio.Event()
    settings = load_settings(packaged_config("default.toml"), {"state.path": ":memory:"}, {})
    engine, others = small(tiny_model, restart=RestartPolicy(quick_failures=1)), engine_pids()
    async with wired(settings, engine, told.set) as proxy, listening(proxy) as running:
        [pid] = engine_pids() - others
        os.kill(pid, signal.SIGKILL)
        keeper = proxy.parts.dispatcher.keepers[EMBEDDED]
        await eventually(lambda: keeper.state.health is Health.LOST)
        async with httpx.AsyncClient(base_url=running.url) as client:
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 503
    assert "the engine failed: killed by signal 9" in caplog.text
    assert not told.is_set()


async def test_an_unknown_engine_setting_is_named(tiny_model: Path) -> None:
    async with Engine(small(tiny_model, extra={"n_bach": 1})) as engine:
        with pytest.raises(EngineFailed, match="no setting 'n_bach'"):
            await engine.wait_ready()


async def test_stopping_ends_the_child_and_removes_the_saved_slots(tiny_model: Path) -> None:
    async with Engine(small(tiny_model)) as engine:
        await engine.wait_ready()
        pid, save_dir = engine.pid, engine.save_dir
        assert pid is not None
        assert alive(pid)
        assert save_dir.is_dir()
    assert not alive(pid)
    assert not save_dir.exists()


async def test_stopping_does_not_wait_for_a_model_that_is_still_loading(tiny_model: Path) -> None:
    started: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def note(event: EngineEvent) -> None:
        if event.state is EngineState.STARTING:
            started.set_result(event.pid)

    async with Engine(small(tiny_model), note):
        pid = await started
    assert pid is not None
    assert not alive(pid)


async def test_a_given_save_directory_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "slots"
    async with Engine(small(tiny_model, save_dir=kept)) as engine:
        await engine.wait_ready()
        async with httpx.AsyncClient(base_url=engine.url) as client:
            await client.post("/completion", json={"prompt": "a", "n_predict": 0, "id_slot": 0})
            await client.post("/slots/0?action=save", json={"filename": "a.bin"})
    assert (kept / "a.bin").exists()


def test_the_child_and_its_saved_slots_do_not_outlive_a_killed_parent(tiny_model: Path, tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, json, sys
        from pathlib import Path
        from prefixproxy.engine import Engine, EngineSettings

        async def main():
            async with Engine(EngineSettings(Path(sys.argv[1]), parallel=1, ctx=512)) as engine:
                await engine.wait_ready()
                print(json.dumps([engine.pid, str(engine.save_dir)]), flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    command = [sys.executable, "-c", program, str(tiny_model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, save_dir = json.loads(parent.stdout.readline())
        watch = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        parent.kill()
    if watch is None:
        pytest.skip("no way to wait for a process that is not our child")
    try:
        assert select.select([watch], [], [], 30)[0] == [watch]
    finally:
        os.close(watch)
    assert not Path(save_dir).exists()
