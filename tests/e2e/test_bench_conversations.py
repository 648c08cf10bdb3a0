"""`make bench-conversations` holds its targets, where the machine is busy nearly: forty conversations on four slots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("tokenizer_source")
def test_forty_conversations_on_four_slots_cost_little_more_than_the_least() -> None:
    command = [sys.executable, "tests/bench/conversations.py", "--ways", "proxy", "--json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", "."])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    report = json.loads(done.stdout)
    ratios = {arm["model"]: arm["ratio"] for arm in report["arms"]}
    assert ratios.keys() == report["targets"].keys() == {"llama", "mamba", "hybrid"}
    assert all(1.0 <= ratio <= report["targets"][model] for model, ratio in ratios.items()), done.stderr
