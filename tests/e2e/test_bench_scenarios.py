"""`make bench-scenarios`: patterns that cost more than without the proxy once, and do no longer. In these, requests
come one by one, so each run evaluates the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ONCE_WORSE = "log_that_slides,slots_named_by_clients,text_and_tokens,rendered_by_the_client,tools_in_some_turns"
WAYS = ("proxy", "same_flags", "before_np")


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("tokenizer_source")
def test_patterns_that_were_worse_than_stock_once() -> None:
    command = [sys.executable, "tests/bench/scenarios.py", "--models", "llama", "--json"]
    command += ["--ways", ",".join(WAYS), "--only", ONCE_WORSE]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", "tests/bench", "."])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    report = json.loads(done.stdout)
    assert len(report["arms"]) == len(WAYS) * len(ONCE_WORSE.split(","))
    assert all(arm["evaluated_tokens"] > 100 for arm in report["arms"]), done.stderr
    assert report["ok"], done.stderr
    assert done.returncode == 0
