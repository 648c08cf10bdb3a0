"""Runs a bench that tiny models take part in, as `make` does, and reads what it prints with --json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LIMIT_S = 280.0


def bench_report(script: str, *options: str) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """The report, and how the bench ended: rows that missed their target make it exit with 1."""
    command = [sys.executable, f"tests/bench/{script}", "--json", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", "."])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return json.loads(done.stdout), done
