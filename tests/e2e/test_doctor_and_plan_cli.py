"""`prefixproxy doctor` and `prefixproxy plan` as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running_engine import RunningEngine

pytestmark = pytest.mark.e2e


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    command = [sys.executable, "-m", "prefixproxy", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_doctor_prints_the_facts_and_leaves_with_0(engine: RunningEngine, tmp_path: Path) -> None:
    done = run("doctor", engine.url, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"server           llama-server at {engine.url}"
    assert "n_ctx_slot       4,096" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor_heeds_the_minimum_of_the_settings(engine: RunningEngine, tmp_path: Path) -> None:
    (tmp_path / "prefixproxy.toml").write_text("[context]\nmin_n_ctx_slot = 8192\n")
    done = run("doctor", engine.url, "--json", cwd=tmp_path)
    assert done.returncode == 1
    (upstream,) = json.loads(done.stdout)["upstreams"]
    first = upstream["findings"][0]
    assert (first["name"], first["severity"]) == ("context-divided", "error")
    assert "context.min_n_ctx_slot is 8,192" in first["evidence"]
    assert first["fix"].startswith("-np 4 -c 32768")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["doctor", "http://127.0.0.1:9"], 1, ""),
        (["doctor", "nowhere"], 2, "must look like http://host:port"),
        (["doctor", "http://127.0.0.1:9", "--log", "gone.log"], 2, "--log: cannot read gone.log"),
        (["plan", "gone.gguf"], 2, "cannot read the model gone.gguf"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], code: int, told: str, tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == (1 if told else 0)


def test_the_proxys_own_address_may_be_looked_at(tmp_path: Path) -> None:
    (tmp_path / "prefixproxy.toml").write_text("[server]\nport = 9\n")
    done = run("doctor", "http://127.0.0.1:9", "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["upstreams"][0]["findings"][0]["name"] == "unreachable"


def test_plan_prints_a_table_and_the_flags(tiny_model: Path, tmp_path: Path) -> None:
    done = run("plan", str(tiny_model), "--memory", "1G", "--parallel", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "-np 2 -c 65536 --no-kv-unified" in done.stdout
    found = json.loads(run("plan", str(tiny_model), "--memory", "1K", "--json", cwd=tmp_path).stdout)
    assert (found["ok"], found["fit"]) == (False, None)
