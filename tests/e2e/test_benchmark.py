"""The benchmark of the proxy's own cost runs, and says what its table says in JSON too. Its numbers are no gate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

pytestmark = [pytest.mark.e2e]


@pytest.mark.parametrize("options", [["--json"], []])
def test_the_benchmark_runs(options: list[str]) -> None:
    command = [sys.executable, "-m", "tests.bench.overhead", "--requests", "3", *options]
    here = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100, check=True)
    if not options:
        assert "stream, 200 chunks" in result.stdout
        return
    report = orjson.loads(result.stdout)
    assert set(report["cases"]) == {"json", "stream"}
    for case in report["cases"].values():
        assert case["added_p50_ms"] == case["proxy"]["p50_ms"] - case["direct"]["p50_ms"]
        assert case["direct"]["p50_ms"] <= case["direct"]["p95_ms"]
