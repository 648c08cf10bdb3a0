"""doctor on real servers: each planted misconfiguration is found, and the recommended flags give no finding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy
from scripted_ollama import ScriptedOllama

from prefixproxy.commands.options import settings_of
from prefixproxy.doctor.command import DoctorOptions, run
from prefixproxy.engine import EngineSettings
from prefixproxy.settings import upstream_values

ONE_THREAD = {"cpuparams.n_threads": 1}
HARMLESS = {"template-no-tools"}
"""The tiny models borrow a template that knows no tools."""
POOL = {"parallel": -1, "stock": True}
"""What `llama-server` does without -np: four slots on one unified pool."""


@pytest.fixture
def doctor(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the command with --json: its exit code and its report."""

    def look(
        url: str | None = None, overrides: dict[str, Any] | None = None, **options: Any
    ) -> tuple[int, dict[str, Any]]:
        settings = settings_of(None, {"state.path": ":memory:", **(overrides or {})})
        named = [{**one, "api_key": options.pop("api_key", "")} for one in upstream_values([url] if url else [])]
        server = settings_of(None, {"upstreams": named}).upstreams[0] if url else None
        code = run(DoctorOptions(server=server, settings=settings, json=True, **options))
        report: dict[str, Any] = orjson.loads(capsysbinary.readouterr().out)
        return code, report

    return look


def names(report: dict[str, Any], upstream: int = 0) -> dict[str, str]:
    findings = report["upstreams"][upstream]["findings"]
    return {f["name"]: f["severity"] for f in findings if f["name"] not in HARMLESS}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"parallel": 4, "ctx": 4 * 4096}, {}),
        ({"parallel": 6, "ctx": 8192}, {"context-divided": "error"}),
        ({"parallel": 1, "ctx": 1024}, {"context-small": "error"}),
        ({"ctx": 16384, **POOL}, {"kv-unified": "error", "no-save-path": "warning"}),
        ({"parallel": 2, "ctx": 8192, "extra": {**ONE_THREAD, "cache_ram_mib": 0}}, {"ram-cache-off": "warning"}),
        ({"parallel": 2, "ctx": 8192, "stock": True}, {"no-save-path": "warning"}),
    ],
)
def test_each_planted_misconfiguration_is_found_from_the_url_alone(
    engine_factory: Callable[..., RunningEngine],
    doctor: Callable[..., tuple[int, dict[str, Any]]],
    flags: dict[str, Any],
    expected: dict[str, str],
) -> None:
    code, report = doctor(engine_factory(**flags).url)
    assert names(report) == expected
    assert code == (1 if "error" in expected.values() else 0)


def test_a_unified_pool_is_seen_in_the_slots_once_they_were_used(
    engine_factory: Callable[..., RunningEngine], doctor: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    """The first run tries, and has used the server then; the second one must not call it sound."""
    pool = engine_factory(ctx=16384, **POOL).url
    code, tried = doctor(pool)
    assert (code, tried["upstreams"][0]["facts"]["kv_unified"]) == (1, True)
    code, looked_at = doctor(pool)
    assert (code, names(looked_at)["kv-unified"], names(looked_at)["not-tried"]) == (1, "error", "note")


@pytest.mark.anyio
async def test_a_proxy_that_wants_a_key_is_given_one(
    engine: RunningEngine, doctor: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    async with running_proxy(engine.url, server__api_keys=["secret"]) as running:
        code, refused = await asyncio.to_thread(doctor, running.url)
        assert (code, names(refused)) == (1, {"key-wanted": "error"})
        code, report = await asyncio.to_thread(doctor, running.url, api_key="secret")
    assert (code, report["upstreams"][0]["url"]) == (0, engine.url)


def test_a_server_in_use_is_looked_at_and_left_as_it_is(
    engine_factory: Callable[..., RunningEngine], doctor: Callable[..., tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    one = engine_factory(parallel=2, ctx=8192, extra={**ONE_THREAD, "verbosity": 4})
    body = {"prompt": [100, 101, 102, 103], "n_predict": 0}
    httpx.post(f"{one.url}/completion", json=body, timeout=60).raise_for_status()
    before = httpx.get(f"{one.url}/slots").json()
    log = tmp_path / "server.log"
    log.write_text("\n".join(one.engine.startup_log))
    code, report = doctor(one.url, log=log)
    assert (code, names(report)) == (0, {"not-tried": "note"})
    facts = report["upstreams"][0]["facts"]
    assert (facts["kv_unified"], facts["kv_type_k"]) == (False, "f16")
    assert httpx.get(f"{one.url}/slots").json() == before
    code, report = doctor(one.url, may_overwrite=True)
    assert (code, names(report)) == (0, {})


def test_the_admission_test_fills_a_slot_and_is_answered(
    engine_factory: Callable[..., RunningEngine], doctor: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    one = engine_factory(parallel=1, ctx=4096)
    code, report = doctor(one.url, admission=True)
    assert (code, names(report)) == (0, {"admission": "note"})
    (finding,) = [f for f in report["upstreams"][0]["findings"] if f["name"] == "admission"]
    assert "a prompt of 3,840 tokens" in finding["evidence"]


def test_the_embedded_engine_is_started_where_nothing_else_is_set(
    tiny_model: Path, doctor: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    engine = EngineSettings(tiny_model, parallel=2, ctx=8192, extra=ONE_THREAD)
    code, report = doctor(overrides={"server.port": 1}, engine=engine)
    assert (code, names(report)) == (0, {})
    facts = report["upstreams"][0]["facts"]
    assert (facts["n_ctx_slot"], facts["kv_type_k"], facts["kv_unified"]) == (4096, "f16", False)
    assert facts["flash_attention"] in ("on", "off")


@pytest.mark.anyio
async def test_behind_a_proxy_its_upstreams_are_looked_at(
    engine: RunningEngine, doctor: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    async with running_proxy(engine.url) as running:
        code, report = await asyncio.to_thread(doctor, running.url)
    assert code == 0
    assert "is prefixproxy" in report["about"][0]
    assert (report["upstreams"][0]["url"], report["upstreams"][0]["name"]) == (engine.url, "local")


@pytest.mark.anyio
async def test_an_ollama_that_cuts_prompts_fails_the_admission_test(
    doctor: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    async with ScriptedOllama("0.33.3", num_parallel=2, n_ctx=8192) as ollama:
        code, report = await asyncio.to_thread(doctor, ollama.url, {"upstreams": [{"url": ollama.url, "slots": 2}]})
        assert (code, names(report)) == (0, {"nothing-loaded": "note"})
        async with httpx.AsyncClient() as client:
            hello = {"model": "tiny", "prompt": "Hello there", "stream": False}
            await client.post(f"{ollama.url}/api/generate", json=hello, timeout=60)
        code, report = await asyncio.to_thread(doctor, ollama.url, admission=True)
        assert (code, names(report)) == (0, {"admission": "note", "one-slot": "warning"})
        ollama.runners["tiny:latest"].n_ctx = ollama.n_ctx = 4096
        ollama.shown_n_ctx = 8192
        code, report = await asyncio.to_thread(doctor, ollama.url, admission=True)
    assert (code, names(report)) == (1, {"admission-prompt-cut": "error", "one-slot": "warning"})


def test_upstreams_that_are_down_fail(doctor: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    code, report = doctor(overrides={"upstreams": [{"name": "gone", "url": "http://127.0.0.1:9"}]})
    assert (code, names(report)) == (1, {"unreachable": "error"})
