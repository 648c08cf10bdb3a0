"""The documentation is complete and true where a machine can tell: names, links, generated pages, decisions."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from prefixproxy.errors import ProxyError
from prefixproxy.journal import RECORD_FIELDS
from prefixproxy.metrics import HELP, REJECT_REASONS, WORK_OUTCOMES, Metrics, StatusSnapshot, UpstreamStatus
from prefixproxy.settings import Admission, Settings, packaged_config
from prefixproxy.settings_errors import setting_names
from prefixproxy.types import API_OF_PATH, CacheSource, Kind, MissReason, Outcome, Priority, SlotState
from prefixproxy.volatile.files import load_rules

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *(path for path in (ROOT / "README.md", ROOT / "CHANGELOG.md") if path.exists())])
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))

HINT_HEADERS = ("lane", "priority", "stabilise")
ANSWER_HEADERS = ("request-id", "slot", "family", "expected-cached", "queue-ms", "assembled", "cache-n", "prompt-n")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found, f"no heading {heading!r}"
    return found.group(1)


def rows(text: str) -> dict[str, str]:
    """The rows of all tables in a text, by each code word in their first column."""
    out = {}
    for line in text.splitlines():
        if line.startswith("|"):
            first = line.split("|")[1]
            out.update(dict.fromkeys(re.findall(r"`([^`]+)`", first), line))
    return out


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings.md", "rules.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    written = reference().PAGES_BY_NAME[name]()
    assert page(f"reference/{name}") == written, "run `make docs`"


def test_every_setting_is_documented_and_described() -> None:
    text = page("reference/settings.md")
    for name in setting_names(Settings):
        table, leaf = name.split(".")
        title = f"`[[{table[:-2]}]]`" if table.endswith("[]") else f"`[{table}]`"
        row = rows(section(text, title))[leaf]
        assert row.rstrip("| \n").rpartition("|")[2].strip(), f"{name} has no description"


def test_every_rule_is_documented() -> None:
    documented = page("reference/rules.md")
    shipped = [rule.name for rule in load_rules([], frozenset()).rules]
    assert shipped
    assert [name for name in shipped if f"`{name}`" not in documented] == []


def test_every_example_file_is_mentioned() -> None:
    text = page("reference/settings.md")
    for path in packaged_config("default.toml").parent.glob("*.toml"):
        assert f"`{path.name}`" in text


def all_metrics() -> Metrics:
    metrics = Metrics()
    metrics.watch(lambda: StatusSnapshot(upstreams=(UpstreamStatus("u", "k", up=True, n_ctx_slot=1),)))
    return metrics


def test_every_metric_is_documented_with_its_labels() -> None:
    documented = rows(page("reference/metrics.md"))
    for family in all_metrics().registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        row = documented[family.name + suffix]
        assert f"| {family.type} |" in row
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= set(re.findall(r"`(\w+)`", row.split("|")[3]))
    assert len(HELP) == sum(name.startswith("prefixproxy_") for name in documented)


def test_no_metric_is_documented_that_does_not_exist() -> None:
    names = {f"prefixproxy_{name}" for name in HELP} | {"prefixproxy_upstream_info"}
    for path in PAGES:
        text = re.sub(r"\b\w+:prefixproxy_\w+:\w+", "", path.read_text(encoding="utf-8"))
        text = re.sub(r"_(bucket|sum|count)\b", "", text)
        assert set(re.findall(r"\bprefixproxy_\w+", text)) <= names, path.name


@pytest.mark.parametrize("values", [REJECT_REASONS, WORK_OUTCOMES, tuple(SlotState)])
def test_every_closed_label_set_is_spelled_out(values: tuple[str, ...]) -> None:
    text = page("reference/metrics.md")
    assert [value for value in values if f"`{value}`" not in text] == []


@pytest.mark.parametrize(
    ("heading", "values"),
    [("Kinds", tuple(Kind)), ("Miss reasons", tuple(MissReason)), ("Outcomes", tuple(Outcome))],
)
def test_every_value_of_a_record_is_explained(heading: str, values: tuple[str, ...]) -> None:
    assert set(rows(section(page("reference/http.md"), heading))) == set(values)


def headings(text: str, level: str = "##") -> list[str]:
    return re.findall(rf"^{level} (.+)$", text, flags=re.MULTILINE)


def test_every_miss_reason_has_a_section_that_says_what_to_do() -> None:
    text = page("operate/miss-reasons.md")
    assert headings(text) == list(MissReason)
    assert set(rows(text)) == set(MissReason)
    for reason in MissReason:
        assert re.search(r"\*Do\*|\*If it keeps|Nothing to do", section(text, reason)), reason


def test_every_admission_setting_has_its_row_in_the_tuning_guide() -> None:
    documented = rows(section(page("operate/tuning-admission.md"), "What each setting does"))
    assert set(documented) == set(Admission.model_fields)


def shipped_rules() -> list[dict[str, str]]:
    files = sorted((ROOT / "deploy" / "prometheus").glob("*.rules.yml"))
    loaded = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in files]
    return [rule for file in loaded for group in file["groups"] for rule in group["rules"]]


def test_every_alert_has_a_runbook_and_every_recorded_series_is_explained() -> None:
    text, shipped = page("operate/alerts.md"), shipped_rules()
    assert headings(text) == ["Recording rules", *(rule["alert"] for rule in shipped if "alert" in rule)]
    assert set(rows(section(text, "Recording rules"))) == {rule["record"] for rule in shipped if "record" in rule}


def test_every_dashboard_has_a_section() -> None:
    text = page("operate/reading-the-dashboards.md")
    for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        title = json.loads(path.read_text(encoding="utf-8"))["title"].removeprefix("prefixproxy: ")
        assert title.capitalize() in headings(text)


def test_panels_and_files_that_the_guides_name_exist() -> None:
    shown = "".join(
        path.read_text(encoding="utf-8") for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
    )
    for name in ("alerts", "tuning-admission", "reading-the-dashboards", "miss-reasons"):
        text = page(f"operate/{name}.md")
        assert [
            f for f in re.findall(r"`((?:deploy|scripts|tests|config)/[\w./-]+)`", text) if not (ROOT / f).exists()
        ] == []
        assert [title for title in panel_names(text) if f'"title": "{title}"' not in shown] == []


def panel_names(text: str) -> set[str]:
    """Names in quotes that begin in upper case, and the first column of tables under "look at"."""
    tables = re.findall(r"^\| look at .*\n\|.*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    first = {line.split("|")[1].strip() for table in tables for line in table.splitlines()}
    return first | {" ".join(name.split()) for name in re.findall(r'"([A-Z][^"`]+)"', text)}


def test_every_field_of_a_record_is_explained() -> None:
    documented = section(page("reference/http.md"), "Journal record")
    assert set(RECORD_FIELDS) <= set(rows(documented))
    assert [source for source in CacheSource if f"`{source}`" not in documented] == []


def test_every_generating_path_is_documented() -> None:
    assert set(API_OF_PATH) <= {
        name.removeprefix("POST ") for name in rows(section(page("reference/http.md"), "Paths"))
    }


def test_every_header_is_documented() -> None:
    text = page("reference/http.md")
    assert set(rows(section(text, "Request headers"))) == {f"x-prefixproxy-{name}" for name in HINT_HEADERS}
    answers = set(rows(section(text, "Response headers")))
    assert answers == {"server-timing", *(f"x-prefixproxy-{name}" for name in ANSWER_HEADERS)}
    assert [priority for priority in Priority if f"`{priority}`" not in text] == []


def test_every_header_in_the_code_is_one_of_these() -> None:
    known = {*HINT_HEADERS, *ANSWER_HEADERS}
    found = {name for tree in sources() for name in our_headers(tree)}
    assert found
    assert found <= known


def sources() -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "prefixproxy").rglob("*.py"))]


def our_headers(tree: ast.AST) -> Iterator[str]:
    """Names that are put behind the OUR_HEADERS prefix, or written out whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name) and node.left.id == "OUR_HEADERS":
            if isinstance(node.right, ast.Constant) and isinstance(node.right.value, bytes):
                yield node.right.value.decode()
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
            whole = re.fullmatch(rb"x-prefixproxy-([a-z-]+)", node.value)
            if whole:
                yield whole.group(1).decode()


def test_every_error_code_is_documented_with_its_status() -> None:
    documented = section(page("reference/http.md"), "Errors")
    pairs = {(str(error.status), error.code) for error in error_classes(ProxyError)}
    for status, code in pairs:
        assert re.search(rf"^\| {status} \| `{code}` \|", documented, flags=re.MULTILINE), f"{status} {code}"
    written = {
        line.split("|")[2].strip(" `")
        for line in documented.splitlines()
        if line.startswith("| ") and line[2].isdigit()
    }
    used = {code for tree in sources() for code in code_arguments(tree)} | {code for _, code in pairs}
    assert used == written


def error_classes(base: type[ProxyError]) -> Iterator[type[ProxyError]]:
    yield base
    for sub in base.__subclasses__():
        if sub.__module__.startswith("prefixproxy."):
            yield from error_classes(sub)


def code_arguments(tree: ast.AST) -> Iterator[str]:
    """Every `code="..."` in a call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "code":
            yield from (
                each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        to = (path.parent / name).resolve() if name else path
        assert to.exists() or to == ROOT / "README.md", f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(to.read_text(encoding="utf-8")), f"{path.name}: {target}"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, open_pages = set[Path](), [DOCS / "index.md"]
    while open_pages:
        path = open_pages.pop()
        if path in reached or path.suffix != ".md" or not path.exists():
            continue
        reached.add(path)
        targets = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
        open_pages += [(path.parent / target).resolve() for target in targets if not re.match(r"[a-z]+:", target)]
    assert {path for path in PAGES if path.is_relative_to(DOCS)} <= reached


def test_decisions_are_numbered_without_gaps_and_titled_by_number() -> None:
    numbers = [path.name[:4] for path in DECISIONS]
    assert numbers == [f"{n:04}" for n in range(1, len(numbers) + 1)]
    for path in DECISIONS:
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {path.name[:4]}. ")
        assert re.search(r"^Status: (proposed|accepted|superseded by \d{4})$", text, flags=re.MULTILINE)
        assert [h for h in ("Context", "Choice", "Rejected", "Consequences") if not section(text, h).strip()] == []


def test_the_index_of_decisions_is_complete() -> None:
    index = page("decisions/README.md")
    for path in DECISIONS:
        text = path.read_text(encoding="utf-8")
        title = text.splitlines()[0].partition(". ")[2]
        status = re.search(r"^Status: (.+)$", text, flags=re.MULTILINE)
        assert status
        assert f"| [{path.name[:4]}]({path.name}) | {title} | {status.group(1)} |" in index


def test_decisions_that_are_referred_to_exist() -> None:
    numbers = {path.name[:4] for path in DECISIONS}
    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, *sorted((ROOT / "prefixproxy").rglob("*.py")))]
    referred = {number for text in texts for number in re.findall(r"\bdecision (\d{4})", text)}
    assert referred
    assert referred <= numbers


def test_pages_that_the_code_refers_to_exist() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "prefixproxy").rglob("*.py"))]
    referred = {name for text in texts for name in re.findall(r"\bdocs/[\w/.-]+\.md", text)}
    assert [name for name in sorted(referred) if not (ROOT / name).exists()] == []


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
