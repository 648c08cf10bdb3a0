"""Recording and alert rules: promtool finds nothing, every alert fires when it should and has a runbook."""

from __future__ import annotations

from pathlib import Path

import yaml
from prom import ROOT, RULES, RUNBOOKS, promtool, rule_expressions, rules

from prefixproxy.metrics import HELP

CASES = Path(__file__).parent / "alerts.test.yml"


def alerts() -> set[str]:
    return {rule["alert"] for rule in rules() if "alert" in rule}


def test_promtool_accepts_rules_and_configuration() -> None:
    promtool("check", "rules", *map(str, sorted(RULES.glob("*.rules.yml"))))
    promtool("check", "config", str(RULES / "prometheus.yml"))


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    text = CASES.read_text(encoding="utf-8").replace("{rules}", str(RULES)).replace("{runbooks}", RUNBOOKS)
    (tmp_path / "alerts.yml").write_text(text, encoding="utf-8")
    promtool("test", "rules", str(tmp_path / "alerts.yml"))


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = [
        (case["alertname"], bool(case["exp_alerts"]))
        for group in yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
        for case in group["alert_rule_test"]
    ]
    assert set(cases) == {(name, fires) for name in alerts() for fires in (True, False)}


def test_every_alert_names_its_severity_and_a_runbook_that_exists() -> None:
    page = (ROOT / "docs" / "operate" / "alerts.md").read_text(encoding="utf-8")
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
            assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{rule['alert'].lower()}"
            assert f"\n## {rule['alert']}\n" in page


def test_rules_ask_only_for_metrics_that_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expression in rule_expressions():
        for name in expression.metrics - recorded - {"up"}:
            plain = name.removeprefix("prefixproxy_")
            assert plain.removesuffix("_bucket") in HELP, f"{expression.where}: {name}"
