"""`make bench-fanout` holds its target: the part of it that is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.usefixtures("tokenizer_source")
def test_the_proxy_evaluates_a_cold_root_once_however_its_lanes_arrive() -> None:
    command = [sys.executable, "-m", "tests.bench.fanout", "--tiny", "--lanes", "5", "--ways", "proxy", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert {arm["arrival"] for arm in report["arms"]} == {"sequential", "at once", "staggered"}
    assert all(arm["least_tokens"] <= arm["evaluated_tokens"] <= 1.05 * arm["least_tokens"] for arm in report["arms"])
