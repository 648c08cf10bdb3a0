"""The Grafana dashboards: what is committed is what the script writes, and every panel says what it shows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from prefixproxy.metrics import HELP

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
NAMES = ["admission", "context", "families", "overview", "slots"]


@contextmanager
def scripts_on_the_path() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def script() -> ModuleType:
    with scripts_on_the_path():
        return import_module("dashboards")


def loaded(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def panels() -> list[tuple[str, dict[str, Any]]]:
    return [(path.stem, panel) for path in FILES for panel in loaded(path)["panels"]]


PANELS = pytest.mark.parametrize(
    "panel", [p for _, p in panels()], ids=[f"{name}: {panel['title']}" for name, panel in panels()]
)


def test_the_dashboards_are_all_there() -> None:
    assert [path.stem for path in FILES] == NAMES == sorted(script().DASHBOARDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_is_up_to_date(name: str) -> None:
    path = ROOT / "deploy" / "grafana" / "dashboards" / f"{name}.json"
    assert path.read_text(encoding="utf-8") == script().rendered(name), "run `make docs`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_survives_grafanas_own_types(path: Path) -> None:
    """Grafana's library reads it and loses nothing: every key is one of its schema, with a value of its type."""
    register_default_plugins()
    read = Dashboard.from_json(loaded(path))
    assert_kept(loaded(path), json.loads(JSONEncoder(sort_keys=True).encode(read)))


def assert_kept(value: Any, read: Any, where: str = "") -> None:
    """All of `value` is in `read`, which may hold defaults besides."""
    if isinstance(value, dict):
        assert set(value) <= set(read), where
        for key, inner in value.items():
            assert_kept(inner, read[key], f"{where}.{key}")
    elif isinstance(value, list):
        assert len(value) == len(read), where
        for number, (inner, again) in enumerate(zip(value, read, strict=True)):
            assert_kept(inner, again, f"{where}[{number}]")
    else:
        assert value == read, where


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_can_be_narrowed_to_an_upstream_and_a_model(path: Path) -> None:
    page = loaded(path)
    assert page["uid"] == f"prefixproxy-{path.stem}"
    variables = {variable["name"]: variable for variable in page["templating"]["list"]}
    assert set(variables) == {"datasource", "upstream", "model"}
    assert all(variables[name]["allValue"] == ".*" for name in ("upstream", "model"))
    assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])
    assert len({panel["title"] for panel in page["panels"]}) == len(page["panels"])


@PANELS
def test_a_panel_has_title_unit_description_and_data(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 15
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= {"upstream", "model", "__rate_interval", "__range"}


def unit_of(expression: str) -> set[str]:
    """Units a value of this expression can have, from what it is made of."""
    numerators = re.split(r"\s/\s", expression)
    if len(numerators) > 1:
        return {"percentunit"}
    quantile, per_second = "histogram_quantile" in expression, "rate(" in expression
    if "cached_ratio" in expression:
        return {"percentunit"} if quantile else {"none"}
    if "_bucket" in expression and not quantile:
        return {"none"}
    if "_seconds" in expression and "_count" not in expression:
        return {"s"} if quantile or not per_second else {"suffix: s/s"}
    if "_bytes" in expression:
        return {"Bps"} if per_second else {"bytes"}
    if re.search(r"_tokens|n_ctx_slot", expression):
        return {"suffix: tok/s"} if per_second and not quantile else {"suffix: tok"}
    if per_second:
        return {"reqps", "cps"}
    return {"none", "bool_on_off"}


@PANELS
def test_a_panels_unit_fits_its_expressions(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        assert unit in unit_of(target["expr"]), target["expr"]


@PANELS
def test_a_panel_asks_only_for_metrics_that_exist(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        names = re.findall(r"\bprefixproxy_(\w+)", target["expr"])
        assert names
        known = {*HELP, "upstream_info"}
        assert [n for n in names if n not in known and re.sub(r"_(bucket|sum|count)$", "", n) not in known] == []


def test_every_metric_is_on_some_dashboard() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    missing = [name for name in HELP if f"prefixproxy_{name}" not in text]
    assert missing == []
