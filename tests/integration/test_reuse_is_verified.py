"""`verify` on the real engine: quiet where reuse is sound, loud where the wrong slot was restored once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from running_engine import RunningEngine, running_engine
from running_proxy import proxy_in_thread
from wrong_slot import wrong_slot

from prefixproxy.engine import EngineSettings
from prefixproxy.errors import UsageError
from prefixproxy.settings import load_settings, packaged_config
from prefixproxy.verify.command import VerifyOptions, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHAT = {"messages": [{"role": "user", "content": "Name a colour. " * 20}], "max_tokens": 4, "temperature": 0}
EVERY = 1 << 30
LONG_ROOT = 700
"""Tokens that no machine evaluates as fast as a proxy copies them."""
SCENARIOS = ["multi-turn", "fan-out", "forked", "evicted", "interleaved", "recall"]


@pytest.fixture(scope="module")
def server(tiny_models: Callable[[str], Path]) -> Iterator[RunningEngine]:
    """A model whose answers depend on all of its context: the ordinary tiny one notices nothing."""
    settings = EngineSettings(tiny_models("attentive"), parallel=4, ctx=4 * 2048, extra={"cpuparams.n_threads": 1})
    with running_engine(settings) as one:
        yield one


def verify(url: str, state: Path | str, root: int = 120, **more: Any) -> int:
    settings = load_settings(packaged_config("default.toml"), {"state.path": str(state)}, {})
    return run(VerifyOptions(settings, url, root=root, long=400, json=True, **more))


def test_a_sound_server_passes_in_every_scenario(
    server: RunningEngine, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert verify(server.url, tmp_path / "state.db") == 0
    found = orjson.loads(capfdbinary.readouterr().out)
    assert [(one["name"], one["verdict"]) for one in found["scenarios"]] == [(name, "same") for name in SCENARIOS]
    assert 0 < found["noise"] < found["limit"] < 0.1
    assert found["doubts"] == []


def test_a_wrong_restore_fails_with_both_texts(
    server: RunningEngine, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with wrong_slot(server.url, server.save_dir) as faulty:
        assert verify(faulty.url, tmp_path / "state.db") == 1
    found = orjson.loads(capfdbinary.readouterr().out)
    verdicts = {one["name"]: one["verdict"] for one in found["scenarios"]}
    assert verdicts == {**dict.fromkeys(SCENARIOS, "same"), "forked": "DIFFERENT"}
    [wrong] = next(one["different"] for one in found["scenarios"] if one["name"] == "forked")
    assert wrong["nats"] > found["limit"] > found["noise"]
    assert wrong["with_reuse"] != wrong["without_reuse"] == wrong["without_reuse_again"]
    assert wrong["cache_n"] > 100


def test_a_proxy_before_a_sound_server_passes(
    server: RunningEngine, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with proxy_in_thread(server.url, admission__root_threshold=0.0) as proxy:
        assert verify(proxy.url, tmp_path / "state.db") == 0
        forked = [record["fork"] for record in httpx.get(f"{proxy.url}/prefixproxy/requests").json()["requests"]]
    found = orjson.loads(capfdbinary.readouterr().out)
    assert [(one["name"], one["verdict"]) for one in found["scenarios"]] == [(name, "same") for name in SCENARIOS]
    assert any(forked)


def test_a_failed_verdict_ends_reuse_in_the_running_proxy_and_a_passed_one_brings_it_back(
    engine_factory: Callable[..., RunningEngine],
    tiny_models: Callable[[str], Path],
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    """On a server that nobody has used: from the first prompt on roots are copied, and some copies are planted ones."""
    server = engine_factory(model=tiny_models("attentive"), parallel=4, ctx=4 * 2048)
    state = tmp_path / "state.db"
    with (
        wrong_slot(server.url, server.save_dir, times=EVERY) as faulty,  # which of them matter is up to the proxy
        proxy_in_thread(faulty.url, state__path=str(state), admission__root_threshold=0.0) as proxy,
    ):
        assert verify(proxy.url, state, root=LONG_ROOT) == 1
        assert b'"DIFFERENT"' in capfdbinary.readouterr().out
        assert faulty.restored > 0
        upstream = until(proxy.url, lambda upstream: bool(upstream["reuse_off"]))
        assert "`prefixproxy verify` failed on this model, build and context" in upstream["reuse_off"]
        assert upstream["scheduler"]["snapshots_off_because"] == "reuse is off"
        assert 'prefixproxy_reuse_enabled{upstream="local"} 0.0' in httpx.get(f"{proxy.url}/metrics").text
        with pytest.raises(UsageError, match=r"reuses nothing on upstream local .*verify the upstream's own"):
            verify(proxy.url, state)
        before = faulty.restored
        for _ in range(2):
            assert httpx.post(f"{proxy.url}/v1/chat/completions", json=CHAT, timeout=120).status_code == 200
        newest = httpx.get(f"{proxy.url}/prefixproxy/requests?limit=1").json()["requests"][0]
        assert (newest["cache_n"], newest["miss_reason"], faulty.restored) == (0, "reuse_off", before)
        faulty.times = 0
        assert verify(faulty.url, state) == 0
        until(proxy.url, lambda upstream: not upstream["reuse_off"])
        assert 'prefixproxy_reuse_enabled{upstream="local"} 1.0' in httpx.get(f"{proxy.url}/metrics").text


def test_a_model_with_a_recorded_corruption_starts_without_reuse(tiny_model: Path, tmp_path: Path) -> None:
    kimi = tmp_path / "Kimi-Linear-48B.gguf"
    kimi.symlink_to(tiny_model)
    settings = EngineSettings(kimi, parallel=2, ctx=2 * 1024, extra={"cpuparams.n_threads": 1})
    with running_engine(settings) as one, proxy_in_thread(one.url, admission__root_threshold=0.0) as proxy:
        [upstream] = httpx.get(f"{proxy.url}/prefixproxy/status").json()["upstreams"]
        assert "run `prefixproxy verify` on this build first" in upstream["reuse_off"]
        answers = [httpx.post(f"{proxy.url}/v1/chat/completions", json=CHAT, timeout=120).json() for _ in range(2)]
        assert [answer["timings"]["cache_n"] for answer in answers] == [0, 0]
        # llama-server drops `cache_prompt` there: it would reuse whatever it is told
        refused = httpx.post(f"{proxy.url}/v1/messages", json={**CHAT, "model": "kimi"}, timeout=120)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "reuse_off")
        assert "start it with --no-cache-prompt" in refused.json()["error"]["message"]
        assert httpx.post(f"{proxy.url}/v1/chat/completions", json=CHAT, timeout=120).status_code == 200


def until(url: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The proxy's upstream once it is so: verdicts of other processes are read every few seconds."""
    deadline = time.monotonic() + 120
    while True:
        upstream: dict[str, Any] = httpx.get(f"{url}/prefixproxy/status").json()["upstreams"][0]
        if condition(upstream):
            return upstream
        assert time.monotonic() < deadline, upstream
        time.sleep(0.1)


def test_hidden_slots_are_a_doubt(
    engine_factory: Any, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    hidden = engine_factory(parallel=2, ctx=2 * 2048, extra={"cpuparams.n_threads": 1, "endpoint_slots": False})
    verify(hidden.url, tmp_path / "state.db")
    found = orjson.loads(capfdbinary.readouterr().out)
    assert found["doubts"][-1].startswith("GET /slots is refused: whether somebody else used the server")


def test_other_contexts_are_not_compared(server: RunningEngine, tmp_path: Path, engine_factory: Any) -> None:
    other = engine_factory(parallel=1, ctx=1024)
    with pytest.raises(UsageError, match="not compared: n_ctx_slot is 2048 here and 1024 on the control"):
        verify(server.url, tmp_path / "state.db", control=other.url)
