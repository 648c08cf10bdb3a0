"""Debian's Prometheus and promtool, and what the deploy folder asks of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
RUNBOOKS = "https://github.com/prefixproxy/prefixproxy/blob/main/docs/operate/alerts.md"


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips without it, but never in CI."""
    found = shutil.which(name)
    if found is None:
        reason = f"needs {name} (Debian: apt-get install prometheus)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def promtool(*arguments: str, given: str = "") -> None:
    """Runs it, and fails with its own words when it finds anything."""
    run = subprocess.run([tool("promtool"), *arguments], input=given, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""


@dataclass(frozen=True)
class Expression:
    """One query, and where it stands."""

    where: str
    text: str

    @property
    def metrics(self) -> set[str]:
        return set(re.findall(r"\b(?:\w+:)?prefixproxy_\w+(?::\w+)?|\bup\b", self.text))


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every panel of every dashboard, by the dashboard's name."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            yield path.stem, panel


def dashboard_expressions() -> list[Expression]:
    return [
        Expression(f"{name}: {panel['title']} {target['refId']}", target["expr"])
        for name, panel in panels()
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    files = (yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(RULES.glob("*.rules.yml")))
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def rule_expressions() -> list[Expression]:
    return [Expression(str(rule.get("alert") or rule["record"]), rule["expr"]) for rule in rules()]
