"""Metrics: names and labels are the contract's, numbers are the server's, unknown is not counted as zero."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from records import RECORD

from prefixproxy.metrics import (
    HELP,
    MAX_FAMILIES,
    MAX_MODELS,
    RATE_MIN_TOKENS,
    Metrics,
    PrefillRate,
    StatusSnapshot,
    UpstreamStatus,
)
from prefixproxy.types import (
    CacheSource,
    MissReason,
    Outcome,
    Priority,
    RequestRecord,
    SlotState,
    Usage,
)

ONE_UPSTREAM = StatusSnapshot(
    queue_depth={Priority.INTERACTIVE: 3},
    upstreams=(
        UpstreamStatus(
            name="local",
            kind="llama-server",
            up=True,
            build="b1",
            model="m.gguf",
            n_slots=2,
            n_ctx_slot=4096,
            slots={SlotState.LEASED: 1, SlotState.IDLE: 1},
            slot_tokens={0: 10, 1: 2540},
        ),
    ),
)

# name -> (type, labels) as in the contract
CONTRACT = {
    "requests_total": ("counter", "path model kind outcome"),
    "prompt_tokens_total": ("counter", "model source"),
    "cached_ratio": ("histogram", "model kind"),
    "prompt_length_tokens": ("histogram", "model"),
    "cache_misses_total": ("counter", "model reason"),
    "cache_measurements_total": ("counter", "cache_source"),
    "expected_cached_tokens_total": ("counter", "model"),
    "prefill_seconds_total": ("counter", "model"),
    "prefill_seconds_saved_total": ("counter", "model"),
    "ttft_seconds": ("histogram", "model kind"),
    "request_seconds": ("histogram", "model kind"),
    "queue_seconds": ("histogram", "model kind"),
    "overhead_seconds": ("histogram", "path"),
    "queue_depth": ("gauge", "priority"),
    "admission_rejected_total": ("counter", "reason"),
    "slots": ("gauge", "upstream state"),
    "slot_tokens": ("gauge", "upstream slot"),
    "slot_prompt_tokens_total": ("counter", "upstream slot source"),
    "family_prompt_tokens_total": ("counter", "family source"),
    "warmups_total": ("counter", "upstream outcome"),
    "forks_total": ("counter", "upstream outcome"),
    "fork_seconds": ("histogram", "upstream"),
    "relocations_total": ("counter", "rule"),
    "relocated_bytes_total": ("counter", "rule"),
    "canary_requests_total": ("counter", "arm outcome"),
    "canary_ttft_seconds": ("histogram", "arm"),
    "canary_cached_ratio": ("histogram", "arm"),
    "canary_answer_tokens": ("histogram", "arm"),
    "upstream_up": ("gauge", "upstream"),
    "upstream_slots": ("gauge", "upstream"),
    "upstream_n_ctx_slot": ("gauge", "upstream"),
    "reuse_enabled": ("gauge", "upstream"),
    "upstream_info": ("info", "upstream kind build model"),
    "context_rejected_total": ("counter", "model"),
}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"prefixproxy_{name}", labels)


def observed(*records: RequestRecord) -> Metrics:
    metrics = Metrics()
    for record in records:
        metrics.observe(record)
    return metrics


def changed(**changes: object) -> RequestRecord:
    return dataclasses.replace(RECORD, **changes)  # type: ignore[arg-type]


def everything() -> Metrics:
    metrics = observed(changed(arm="on"))
    metrics.warmup("local", "ok")
    metrics.fork("local", "ok", 0.1)
    metrics.rejected("queue_full")
    metrics.context_rejected("m")
    metrics.watch(lambda: ONE_UPSTREAM)
    return metrics


def test_names_types_and_labels_are_the_contracts() -> None:
    body, content_type = everything().render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    found = {}
    for family in parse_openmetrics(body.decode()):  # type: ignore[no-untyped-call]
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        (labels,) = {frozenset(s.labels) - {"le"} for s in family.samples}
        found[family.name.removeprefix("prefixproxy_") + suffix] = (family.type, labels)
    assert found == {name: (type_, frozenset(labels.split())) for name, (type_, labels) in CONTRACT.items()}


def test_text_format_has_help_for_every_metric_and_no_created_series() -> None:
    body, content_type = everything().render("")
    assert content_type.startswith("text/plain")
    families = list(parse_text(body.decode()))
    assert all(family.documentation for family in families)
    assert not [s.name for family in families for s in family.samples if s.name.endswith("_created")]
    names = {family.name for family in families}
    assert len(names) == len(CONTRACT) == len(HELP)


def test_tokens_are_counted_by_model_slot_and_family() -> None:
    metrics = observed(RECORD, changed(slot=None, cache_n=10, prompt_n=1))
    assert value(metrics, "prompt_tokens_total", model="m", source="cached") == 810
    assert value(metrics, "prompt_tokens_total", model="m", source="evaluated") == 201
    assert value(metrics, "slot_prompt_tokens_total", upstream="local", slot="2", source="cached") == 800
    assert value(metrics, "family_prompt_tokens_total", family="f", source="evaluated") == 201
    assert value(metrics, "expected_cached_tokens_total", model="m") == 1800
    assert value(metrics, "cached_ratio_sum", model="m", kind="fork") == pytest.approx(0.8 + 10 / 11)


def test_times_are_in_seconds() -> None:
    metrics = observed(RECORD)
    assert value(metrics, "queue_seconds_sum", model="m", kind="fork") == 2.0
    assert value(metrics, "ttft_seconds_sum", model="m", kind="fork") == 3.0
    assert value(metrics, "request_seconds_sum", model="m", kind="fork") == 5.0
    assert value(metrics, "overhead_seconds_sum", path="/v1/chat/completions") == 0.001
    assert value(metrics, "prefill_seconds_total", model="m") == 0.4


def test_relocations_are_counted_by_rule() -> None:
    metrics = observed(RECORD)
    assert value(metrics, "relocations_total", rule="clock") == 2
    assert value(metrics, "relocated_bytes_total", rule="clock") == 40


@pytest.mark.parametrize("source", [CacheSource.INFERRED, CacheSource.UNKNOWN])
def test_only_reported_counts_enter_the_token_counters(source: CacheSource) -> None:
    metrics = observed(changed(cache_source=source))
    assert value(metrics, "cache_measurements_total", cache_source=source.value) == 1
    assert value(metrics, "prompt_tokens_total", model="m", source="cached") is None
    assert value(metrics, "expected_cached_tokens_total", model="m") is None
    assert value(metrics, "cache_misses_total", model="m", reason="slot_evicted") is None
    assert value(metrics, "prompt_length_tokens_count", model="m") == 1


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.BAD_REQUEST])
def test_prompts_that_did_not_fit_are_lengths_too(outcome: Outcome) -> None:
    """Whoever sizes slots by the histogram needs to see them."""
    refused = changed(outcome=outcome, context_exceeded=True, prompt_tokens=9000)
    metrics = observed(refused, changed(outcome=outcome, prompt_tokens=9000))
    assert value(metrics, "prompt_length_tokens_count", model="m") == 1
    assert value(metrics, "prompt_length_tokens_sum", model="m") == 9000
    assert value(metrics, "cache_measurements_total", cache_source="reported") in (None, 0)


def test_a_hit_is_no_miss() -> None:
    metrics = observed(changed(miss_reason=MissReason.NONE))
    assert value(metrics, "cache_misses_total", model="m", reason="none") is None


def test_unknown_numbers_leave_no_trace() -> None:
    metrics = observed(
        changed(prompt_tokens=None, cache_n=None, prompt_n=None, ttft_ms=None, prompt_ms=None, expected_cached=None)
    )
    assert value(metrics, "requests_total", path=RECORD.path, model="m", kind="fork", outcome="ok") == 1
    for name in ("prompt_length_tokens_count", "prefill_seconds_total"):
        assert value(metrics, name, model="m") is None
    assert value(metrics, "ttft_seconds_count", model="m", kind="fork") is None


def test_an_empty_prompt_has_no_ratio() -> None:
    metrics = observed(changed(cache_n=0, prompt_n=0))
    assert value(metrics, "cached_ratio_count", model="m", kind="fork") is None


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.BAD_REQUEST, Outcome.UPSTREAM_DOWN])
def test_requests_that_reached_no_upstream_do_not_make_it_look_fast(outcome: Outcome) -> None:
    metrics = observed(changed(outcome=outcome, queue_ms=0.0))
    assert value(metrics, "request_seconds_count", model="m", kind="fork") is None
    assert value(metrics, "queue_seconds_count", model="m", kind="fork") is None
    assert value(metrics, "requests_total", path=RECORD.path, model="m", kind="fork", outcome=outcome.value) == 1


def test_a_request_that_gave_up_waiting_counts_as_waiting() -> None:
    metrics = observed(changed(outcome=Outcome.REJECTED, queue_ms=600_000.0))
    assert value(metrics, "queue_seconds_sum", model="m", kind="fork") == 600.0


def test_saved_seconds_are_cached_tokens_times_the_measured_price() -> None:
    metrics = observed(changed(cache_n=0, prompt_n=1000, prompt_ms=5000.0))
    assert value(metrics, "prefill_seconds_saved_total", model="m") == 0
    metrics.observe(changed(cache_n=400, prompt_n=0, prompt_ms=0.0))
    assert value(metrics, "prefill_seconds_saved_total", model="m") == pytest.approx(2.0)


def test_nothing_is_saved_before_anything_was_measured() -> None:
    metrics = observed(changed(cache_n=800, prompt_n=RATE_MIN_TOKENS - 1, prompt_ms=100.0))
    assert value(metrics, "prefill_seconds_saved_total", model="m") is None


def test_the_price_of_one_model_says_nothing_about_another() -> None:
    metrics = observed(RECORD, changed(model="n", prompt_ms=None))
    assert value(metrics, "prefill_seconds_saved_total", model="n") is None


def test_the_prefill_rate_follows_the_recent_measurements() -> None:
    rate = PrefillRate()
    rate.measured(1000, 10.0)
    assert rate.seconds_per_token == pytest.approx(0.01)
    for _ in range(10):
        rate.measured(65536, 65.536)
    assert rate.seconds_per_token == pytest.approx(0.001, rel=0.01)
    rate.measured(1000, -1.0)
    assert rate.seconds_per_token == pytest.approx(0.001, rel=0.01)


def test_warmups_are_paid_for_like_any_other_prefill() -> None:
    metrics = Metrics()
    usage = Usage(2540, 0, 2540, 0, 5080.0, None, CacheSource.REPORTED)
    metrics.warmup("local", "ok", model="m", slot=0, usage=usage)
    metrics.warmup("local", "failed")
    metrics.warmup("local", "ok", model="m", usage=dataclasses.replace(usage, source=CacheSource.INFERRED))
    metrics.warmup("local", "ok", model="m", usage=dataclasses.replace(usage, cached_tokens=None))
    assert value(metrics, "warmups_total", upstream="local", outcome="ok") == 3
    assert value(metrics, "warmups_total", upstream="local", outcome="failed") == 1
    assert value(metrics, "prompt_tokens_total", model="m", source="evaluated") == 2540
    assert value(metrics, "slot_prompt_tokens_total", upstream="local", slot="0", source="evaluated") == 2540
    assert value(metrics, "prefill_seconds_total", model="m") == pytest.approx(5.08)


def test_forks_and_rejections() -> None:
    metrics = Metrics()
    metrics.fork("local", "ok", 0.106)
    metrics.fork("local", "something new", 0.1)
    metrics.fork("local", "timed_out", 0.0)
    metrics.no_effect("local", forked=True)
    metrics.no_effect("local", forked=False)
    metrics.rejected("queue_full")
    metrics.rejected("something new")
    metrics.relocation("clock", 5)
    assert value(metrics, "forks_total", upstream="local", outcome="ok") == 1
    assert value(metrics, "forks_total", upstream="local", outcome="other") == 1
    assert value(metrics, "forks_total", upstream="local", outcome="timed_out") == 1
    assert value(metrics, "forks_total", upstream="local", outcome="no_effect") == 1
    assert value(metrics, "warmups_total", upstream="local", outcome="no_effect") == 1
    assert value(metrics, "fork_seconds_sum", upstream="local") == pytest.approx(0.106), "only of those that worked"
    assert value(metrics, "admission_rejected_total", reason="queue_full") == 1
    assert value(metrics, "admission_rejected_total", reason="other") == 1
    assert value(metrics, "admission_rejected_total", reason="queue_timeout") == 0
    assert value(metrics, "relocated_bytes_total", rule="clock") == 5


def test_gauges_are_read_at_scrape_time() -> None:
    metrics, depth = Metrics(), [1]
    metrics.watch(lambda: StatusSnapshot({Priority.BATCH: depth[0]}))
    depth[0] = 7
    assert value(metrics, "queue_depth", priority="batch") == 7
    assert value(metrics, "queue_depth", priority="interactive") == 0
    metrics.watch(lambda: ONE_UPSTREAM)
    assert value(metrics, "queue_depth", priority="interactive") == 3


def test_registering_takes_no_snapshot() -> None:
    def not_yet() -> StatusSnapshot:
        raise AssertionError("a snapshot was taken before any scrape")

    Metrics().watch(not_yet)


def test_upstream_gauges() -> None:
    metrics = Metrics()
    metrics.watch(lambda: ONE_UPSTREAM)
    assert value(metrics, "upstream_up", upstream="local") == 1
    assert value(metrics, "upstream_n_ctx_slot", upstream="local") == 4096
    assert value(metrics, "slot_tokens", upstream="local", slot="1") == 2540
    states = [value(metrics, "slots", upstream="local", state=state.value) for state in SlotState]
    assert states == [1, 1, 0, 0, 0]
    assert value(metrics, "upstream_info", upstream="local", kind="llama-server", build="b1", model="m.gguf") == 1


def test_an_upstream_that_is_down_has_no_context_size() -> None:
    metrics = Metrics()
    down = UpstreamStatus("gone", "unknown", up=False, reuse_enabled=False)
    metrics.watch(lambda: StatusSnapshot(upstreams=(down,)))
    assert value(metrics, "upstream_up", upstream="gone") == 0
    assert value(metrics, "reuse_enabled", upstream="gone") == 0
    assert value(metrics, "upstream_n_ctx_slot", upstream="gone") is None


def test_labels_from_clients_stay_bounded() -> None:
    metrics = Metrics()
    for i in range(400):
        metrics.observe(changed(model=f"m{i}", family=f"f{i}", path=f"/v{i}"))
    values: dict[str, set[str]] = {"model": set(), "family": set(), "path": set()}
    for family in metrics.registry.collect():
        for sample in family.samples:
            for label, seen in values.items():
                seen |= {sample.labels[label]} if label in sample.labels else set()
    assert len(values["model"]) <= MAX_MODELS + 1
    assert len(values["family"]) <= MAX_FAMILIES + 1
    assert values["path"] == {"other"}
    total = sum(
        s.value
        for family in metrics.registry.collect()
        for s in family.samples
        if s.name == "prefixproxy_requests_total"
    )
    assert total == 400


def test_two_proxies_in_one_process_do_not_share_counters() -> None:
    one, two = observed(RECORD), Metrics()
    assert value(one, "prompt_tokens_total", model="m", source="cached") == 800
    assert value(two, "prompt_tokens_total", model="m", source="cached") is None


def test_the_arms_of_a_canary_are_told_apart() -> None:
    failed = changed(arm="off", outcome=Outcome.UPSTREAM_ERROR)
    metrics = observed(changed(arm="on", cache_n=800, prompt_tokens=1000, predicted_n=32), failed, RECORD)
    assert value(metrics, "canary_requests_total", arm="on", outcome="ok") == 1
    assert value(metrics, "canary_requests_total", arm="off", outcome="upstream_error") == 1
    assert value(metrics, "canary_cached_ratio_sum", arm="on") == 0.8
    assert value(metrics, "canary_answer_tokens_sum", arm="on") == 32
    assert value(metrics, "canary_ttft_seconds_count", arm="on") == 1
    assert value(metrics, "canary_ttft_seconds_count", arm="off") is None
