"""Write deploy/grafana/*.json: the dashboards, built with Grafana's own library from the tables of panels below.

tests/test_dashboards.py fails while a file differs from what this would write (`make docs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dashboard_canary import CANARY
from dashboard_panels import ADMISSION, CONTEXT, FAMILIES, OVERVIEW, SLOTS
from dashboard_queries import SHARE, Chart, Shape
from grafana_foundation_sdk.builders import bargauge, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
DOCS = "https://github.com/prefixproxy/prefixproxy/blob/main/docs/operate/reading-the-dashboards.md"
DASHBOARDS = {
    "overview": (
        "prefixproxy: overview",
        "Is the cache hitting, what does it save, why does it miss?",
        [*OVERVIEW, *CANARY],
    ),
    "families": ("prefixproxy: families", "Which prompts hit, which cost, and what the stabiliser moves.", FAMILIES),
    "slots": ("prefixproxy: slots and forks", "What is in the slots, and whether copying roots works.", SLOTS),
    "admission": (
        "prefixproxy: admission",
        "Queue, waits and rejections: what to tune, and what it brings.",
        ADMISSION,
    ),
    "context": ("prefixproxy: context", "How long prompts are, against what a slot holds.", CONTEXT),
}

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

BUILDERS: dict[Shape, Any] = {
    "lines": timeseries.Panel,
    "stack": timeseries.Panel,
    "number": stat.Panel,
    "bars": bargauge.Panel,
    "table": table.Panel,
    "heatmap": heatmap.Panel,
}
HEIGHTS: dict[Shape, int] = {"number": 4}


def built(name: str) -> dashboard.Dashboard:
    title, description, charts = DASHBOARDS[name]
    page = (
        dashboard.Dashboard(title)
        .uid(f"prefixproxy-{name}")
        .description(description)
        .tags(["prefixproxy"])
        .link(
            dashboard.DashboardLink("The other dashboards")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["prefixproxy"])
            .keep_time(True)
        )
        .link(dashboard.DashboardLink("How to read this").type(DashboardLinkType.LINK).url(DOCS).target_blank(True))
        .refresh("10s")
        .time("now-1h", "now")
        .timezone(kinds.TimeZoneBrowser)
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(_variable("upstream", "prefixproxy_upstream_up"))
        .with_variable(_variable("model", "prefixproxy_requests_total"))
    )
    for chart in charts:
        page = page.with_panel(_panel(chart))
    return page


def _variable(label: str, metric: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(label)
        .label(label.capitalize())
        .datasource(SOURCE)
        .query({"qryType": 1, "query": f"label_values({metric}, {label})", "refId": label})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _panel(chart: Chart) -> Any:
    panel = (
        BUILDERS[chart.shape]()
        .title(chart.title)
        .description(chart.description)
        .unit(chart.unit)
        .datasource(SOURCE)
        .span(chart.width)
        .height(HEIGHTS.get(chart.shape, 8))
    )
    if chart.shape in ("lines", "stack"):
        panel = panel.min(0.0).span_nulls(False)
        panel = panel.legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    if chart.shape == "stack":
        panel = panel.fill_opacity(30).stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL))
    if chart.unit == SHARE and chart.shape != "table":
        panel = panel.min(0.0).max(1.0)
    for number, (expression, legend) in enumerate(chart.queries):
        panel = panel.with_target(_query(chart, expression, legend, "ABCDE"[number]))
    return panel


def _query(chart: Chart, expression: str, legend: str, ref_id: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(expression).ref_id(ref_id).datasource(SOURCE)
    if legend:
        query = query.legend_format(legend)
    if chart.shape == "heatmap":
        query = query.format(PromQueryFormat.HEATMAP)
    if chart.shape == "table":
        query = query.format(PromQueryFormat.TABLE)
    return query.instant() if chart.shape in ("table", "bars", "number") else query.range()


def rendered(name: str) -> str:
    """The file's content, with panel ids in order: Grafana links and alerts name a panel by its id."""
    page = built(name).build()
    for number, panel in enumerate(page.panels or ()):
        panel.id_val = number + 1
    return JSONEncoder(sort_keys=True, indent=2).encode(page) + "\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(rendered(name), encoding="utf-8")


if __name__ == "__main__":
    main()
