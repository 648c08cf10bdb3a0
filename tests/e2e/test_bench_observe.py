"""The benchmark of what observing costs runs, and its shares are those of its numbers. The numbers are no gate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

pytestmark = [pytest.mark.e2e]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("options", [["--json"], []])
def test_the_benchmark_runs(options: list[str]) -> None:
    command = [sys.executable, "tests/bench/observe.py", "--blocks", "1", "--requests", "3", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    if not options:
        assert "Observing takes" in result.stdout
        return
    report = orjson.loads(result.stdout)
    assert set(report["cases"]) == {"json", "talk", "stream"}
    for case in report["cases"].values():
        assert case["inside_ms"] > 0
        assert case["share_inside"] == case["inside_ms"] / case["observed_ms"]
