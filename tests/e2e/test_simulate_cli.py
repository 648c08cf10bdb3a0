"""`prefixproxy simulate` as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from records import RECORD

from prefixproxy.journal import record_json

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
MADE_UP = ("--synthetic", "fanout", "--requests", "20", "--prefill-rate", "2000")


def simulate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefixproxy", "simulate", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_a_journal_export_is_replayed_as_json(tmp_path: Path) -> None:
    records = [replace(RECORD, id=f"r{i}", time=100.0 + i, reference="r0" if i else "") for i in range(3)]
    (tmp_path / "journal.jsonl").write_bytes(b"\n".join(orjson.dumps(record_json(record)) for record in records))
    done = simulate("journal.jsonl", "--slots", "1,3", "--policy", "cost", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    outcomes = orjson.loads(done.stdout)["outcomes"]
    assert [(each["slots"], each["answered"]) for each in outcomes] == [(1, 3), (3, 3)]
    assert all(each["evaluated_tokens"] >= each["least_tokens"] for each in outcomes)


def test_a_made_up_load_is_shown_as_a_table_and_drawn(tmp_path: Path) -> None:
    done = simulate(*MADE_UP, "--slots", "2", "--plot", "out.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "20 made-up requests (fanout)" in done.stdout
    assert (tmp_path / "out.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "name one load"),
        (("bad.jsonl", *MADE_UP), "name one load"),
        (("missing.jsonl",), "missing.jsonl: cannot read it: No such file or directory"),
        (("bad.jsonl",), "bad.jsonl: line 2: not a journal record: id is missing"),
        ((*MADE_UP, "--slots", "2,none"), "--slots: whole numbers from 1 to 100000"),
        ((*MADE_UP, "--policy", "best"), "--policy: cost, fifo or both"),
        ((*MADE_UP, "--rate", "0"), "--rate: from 0.0001 to 1,000,000 (got 0)"),
        (("--synthetic", "traffic"), "--synthetic: 'traffic' is none of fanout, conversations, mixed"),
        ((*MADE_UP, "--plot", "no/such/out.svg"), "--plot: cannot write no/such/out.svg: No such file or directory"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b"\n{}\n")
    done = simulate(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"prefixproxy: {told}"), done.stderr
    assert done.stderr.count("\n") == 1
