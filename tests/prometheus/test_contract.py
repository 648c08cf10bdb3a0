"""The metrics are exactly those of the contract: names, types, labels; and promtool finds nothing to say."""

from __future__ import annotations

from dataclasses import replace

from prom import promtool
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families
from records import RECORD

from prefixproxy.metrics import Metrics, StatusSnapshot, UpstreamStatus
from prefixproxy.types import (
    CacheSource,
    Priority,
    Relocation,
    RequestRecord,
    SlotState,
    Usage,
)

CONTRACT = """
requests_total                 counter    path model kind outcome
prompt_tokens_total            counter    model source
cached_ratio                   histogram  model kind
prompt_length_tokens           histogram  model
cache_misses_total             counter    model reason
cache_measurements_total       counter    cache_source
expected_cached_tokens_total   counter    model
prefill_seconds_total          counter    model
prefill_seconds_saved_total    counter    model
ttft_seconds                   histogram  model kind
request_seconds                histogram  model kind
queue_seconds                  histogram  model kind
overhead_seconds               histogram  path
queue_depth                    gauge      priority
admission_rejected_total       counter    reason
slots                          gauge      upstream state
slot_tokens                    gauge      upstream slot
slot_prompt_tokens_total       counter    upstream slot source
family_prompt_tokens_total     counter    family source
warmups_total                  counter    upstream outcome
forks_total                    counter    upstream outcome
fork_seconds                   histogram  upstream
relocations_total              counter    rule
relocated_bytes_total          counter    rule
upstream_up                    gauge      upstream
upstream_slots                 gauge      upstream
upstream_n_ctx_slot            gauge      upstream
reuse_enabled                  gauge      upstream
upstream_info                  info       upstream kind build model
context_rejected_total         counter    model
canary_requests_total          counter    arm outcome
canary_ttft_seconds            histogram  arm
canary_cached_ratio            histogram  arm
canary_answer_tokens           histogram  arm
"""
TYPE_SUFFIX = {"counter": "_total", "info": "_info"}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

Families = dict[str, tuple[str, frozenset[str]]]


def contract() -> Families:
    rows = (line.split() for line in CONTRACT.strip().splitlines())
    return {f"prefixproxy_{name}": (kind, frozenset(labels)) for name, kind, *labels in rows}


def used() -> Metrics:
    """Metrics in which every series has been counted once."""
    metrics = Metrics()
    upstream = UpstreamStatus(
        "local", "llama-server", up=True, build="b1", model="m", n_slots=1, n_ctx_slot=4096, slot_tokens={0: 7}
    )
    metrics.watch(lambda: StatusSnapshot(queue_depth={Priority.BATCH: 1}, upstreams=(upstream,)))
    metrics.observe(record())
    metrics.rejected("queue_full")
    metrics.context_rejected("m")
    metrics.warmup("local", "ok", "m", 0, Usage(70, 0, 70, 1, 30.0, 0.0, CacheSource.REPORTED))
    metrics.fork("local", "ok", 0.1)
    metrics.cut_short("local", "m", 0, "f", 5, 6)
    return metrics


def record() -> RequestRecord:
    return replace(
        RECORD,
        id="1",
        time=0.0,
        lane="",
        slot=0,
        cache_n=900,
        prompt_n=100,
        queue_ms=1.0,
        ttft_ms=1.0,
        total_ms=1.0,
        predicted_n=1,
        prompt_ms=50.0,
        arm="on",
        relocations=(Relocation("clock", "system[0]", 9),),
    )


def openmetrics(body: bytes) -> list[Metric]:
    """As the strict parser of OpenMetrics reads it."""
    return list(openmetrics_families(body.decode()))  # type: ignore[no-untyped-call]


def test_every_metric_has_the_name_type_and_labels_of_the_contract() -> None:
    body, _ = used().render(OPENMETRICS)
    found: Families = {}
    for family in openmetrics(body):
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        found[family.name + TYPE_SUFFIX.get(family.type, "")] = (family.type, labels)
    assert found == contract()


def test_the_text_format_says_the_same_but_for_the_info() -> None:
    body, _ = used().render()
    families = {f.name + TYPE_SUFFIX.get(f.type, ""): f for f in text_families(body.decode())}
    assert families["prefixproxy_upstream_info"].type == "gauge"
    del families["prefixproxy_upstream_info"]
    expected = contract()
    del expected["prefixproxy_upstream_info"]
    assert {name: family.type for name, family in families.items()} == {n: kind for n, (kind, _) in expected.items()}


def test_the_closed_label_sets_are_the_contracts() -> None:
    body, _ = used().render(OPENMETRICS)
    samples = [s for family in openmetrics(body) for s in family.samples]
    states = {s.labels["state"] for s in samples if s.name == "prefixproxy_slots"}
    assert states == {"idle", "leased", "reserved", "draining", "foreign"} == set(SlotState)
    sources = {s.labels["source"] for s in samples if s.name.endswith("prompt_tokens_total")}
    assert sources == {"cached", "evaluated"}
    lengths = [float(s.labels["le"]) for s in samples if s.name == "prefixproxy_prompt_length_tokens_bucket"]
    assert (lengths[0], lengths[-2]) == (256, 262144)


def test_promtool_has_nothing_to_say() -> None:
    """It reads the text format and checks names, units and help texts; what it cannot read it refuses."""
    body, content_type = used().render()
    assert content_type.startswith("text/plain")
    promtool("check", "metrics", given=body.decode())


def test_the_openmetrics_text_ends_as_it_must_and_has_no_exemplars() -> None:
    body, content_type = used().render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert b" # {" not in body
