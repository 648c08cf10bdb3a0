"""`prefixproxy bench` as a user types it: the field report's shape by token counts, never by time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from scripted_ollama import ScriptedOllama
from threads import in_thread

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
LANES, ROOT_TOKENS = 3, 700


def bench(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefixproxy", "bench", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFIXPROXY_STATE__PATH": ":memory:"}
    # A tiny model evaluates any root in less than the half second from which on one is warmed.
    environment["PREFIXPROXY_ADMISSION__ROOT_THRESHOLD"] = "0"
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)


def arms(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Scenarios by arm and name."""
    return {arm["arm"]: {one["name"]: one for one in arm["scenarios"]} for arm in told["targets"][0]["arms"]}


@pytest.mark.engine
def test_the_embedded_engine_shows_the_shape_of_the_field_report(tiny_model: Path, tmp_path: Path) -> None:
    sizes = ("--lanes", LANES, "--root", ROOT_TOKENS, "--repeat", 1, "--ctx", 2048)
    done = bench("--model", tiny_model, *sizes, "--json", "--plot", "ratios.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = orjson.loads(done.stdout)
    found = arms(told)
    assert told["targets"][0]["facts"]["n_ctx_slot"] == 2048
    root = told["targets"][0]["arms"][0]["root_tokens"]
    for arm in found.values():
        shared = arm["shared root, one by one"]
        assert shared["token_ratio"]["median"] <= 0.15
        assert shared["found_share"] == 1.0
        assert arm["reducer"]["token_ratio"]["median"] > 0.9
        assert arm["unique prefix"]["token_ratio"]["median"] > 0.9
    tails = LANES * 40
    straight, proxy = found["straight"], found["proxy"]
    assert straight["clock and lane id first"]["evaluated_tokens"]["median"] >= LANES * root
    assert straight["clock and lane id first"]["found_share"] == 0.0
    assert proxy["clock and lane id first"]["found_share"] == 1.0
    assert proxy["shared root at once"]["evaluated_tokens"]["median"] <= root + tails
    assert straight["shared root at once"]["evaluated_tokens"]["median"] >= root
    assert proxy["continuations at once"]["found_share"] == 1.0
    assert (tmp_path / "ratios.svg").read_text(encoding="utf-8").startswith("<svg")


def test_an_ollama_is_measured_by_its_own_api_and_what_it_does_not_tell_is_said(tmp_path: Path) -> None:
    with in_thread("ollama", ScriptedOllama) as ollama:
        done = bench(ollama.url, "--lanes", 2, "--root", 100, "--repeat", 1, "--no-proxy", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"ollama at {ollama.url}" in done.stdout
    assert "only straight was measured" in done.stdout
    assert "one run of each scenario" in done.stdout


def test_two_servers_stand_side_by_side_and_are_compared_on_equal_terms_only(tmp_path: Path) -> None:
    sizes = ("--lanes", 1, "--root", 60, "--repeat", 1, "--no-proxy")
    with in_thread("one", ScriptedOllama) as one, in_thread("other", ScriptedOllama) as other:
        done = bench(one.url, other.url, *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "side by side" in done.stdout
    assert f"ollama at {one.url}" in done.stdout
    assert f"ollama at {other.url}" in done.stdout
    assert "the servers are not compared with each other, only each with its own control" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--lanes", "0"), "--lanes: from 1 to 32 (got 0)"),
        (("--root", "1"), "--root: at least 50 tokens (got 1)"),
        (("--repeat", "0"), "--repeat: from 1 to 100 (got 0)"),
        (("--no-straight", "--no-proxy"), "--no-straight and --no-proxy leave nothing to measure"),
        (("--plot", "no/such/out.svg"), "--plot: cannot write no/such/out.svg: No such file or directory"),
        (("http://127.0.0.1:1",), "http://127.0.0.1:1: upstream"),
        (("http://a", "http://b", "http://c"), "at most 2 servers stand side by side (got 3)"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    done = bench(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"prefixproxy: {told}"), done.stderr
    assert done.stderr.count("\n") == 1
