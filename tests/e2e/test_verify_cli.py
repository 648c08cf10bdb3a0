"""`prefixproxy verify` as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from scripted_ollama import ScriptedOllama
from threads import in_thread

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def verify(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefixproxy", "verify", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFIXPROXY_STATE__PATH": str(cwd / "state.db")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.engine
def test_the_embedded_engine_passes_and_the_verdict_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    sizes = ("--model", tiny_model, "--parallel", 2, "--ctx", 1024, "--root", 100, "--long", 200)
    done = verify(*sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert "n_ctx_slot       1,024" in done.stdout
    assert f"Kept in {tmp_path / 'state.db'}" in done.stdout
    assert (tmp_path / "state.db").stat().st_mode & 0o077 == 0


def test_nobody_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = verify("http://127.0.0.1:1", "--json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "prefixproxy: http://127.0.0.1:1: upstream server cannot be reached\n"


def test_a_server_that_cannot_be_told_not_to_reuse_is_refused(tmp_path: Path) -> None:
    with in_thread("ollama", ScriptedOllama) as ollama:
        done = verify(ollama.url, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "ollama cannot be asked for an answer without reuse" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("--root", "1"), "--root, --long: at least 50 tokens"), (("ftp://somewhere",), "ftp://somewhere is no URL")],
)
def test_wrong_usage_is_one_line(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    done = verify(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


@pytest.mark.engine
def test_the_report_can_be_had_as_json(tiny_model: Path, tmp_path: Path) -> None:
    sizes = ("--model", tiny_model, "--parallel", 1, "--ctx", 512, "--root", 60, "--long", 100)
    done = verify(*sizes, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = orjson.loads(done.stdout)
    assert (found["outcome"], found["n_slots"], found["n_ctx_slot"]) == ("passed", 1, 512)
    assert found["facts"]["kind"] == "llama-server"
    assert found["doubts"] == ["forked was not run: one slot: there is none to copy to"]
