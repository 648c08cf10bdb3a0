"""Prometheus metrics: one `observe` per finished request, a few events, and gauges read at scrape time.

Rules. Unknown is not zero: a number the server did not report is not counted, and `cache_measurements_total` says how
often that was so. Labels come from closed sets, from the settings, or from a bounded `Labels` set. Nothing here knows
the scheduler: it hands in a callable that gives a `StatusSnapshot`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from prefixproxy.labels import OTHER, Labels
from prefixproxy.tallies import Spread, Tallies, Tally
from prefixproxy.types import (
    API_OF_PATH,
    CacheSource,
    MissReason,
    Outcome,
    Priority,
    RequestRecord,
    SlotState,
    Usage,
)

MAX_FAMILIES = 50
MAX_MODELS = 20
MAX_RULES = 200
MAX_SLOTS = 1024

REJECT_REASONS = ("queue_full", "queue_timeout", "upstream_unavailable", "tenant_limit")
WORK_OUTCOMES = ("ok", "failed", "timed_out", "no_effect")
"""How a warm or a fork ended; `no_effect`: it went through, which counted as `ok`, but `cache_n` later showed that
hardly anything of it was reused, and it counts once more."""

RATE_MIN_TOKENS = 64
"""A prefill of fewer tokens is mostly fixed cost and says nothing about seconds per token."""
RATE_HALF_LIFE_TOKENS = 65536
"""After this many evaluated tokens an old measurement of the prefill speed counts half."""

RATIO_BUCKETS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1.0)
LENGTH_BUCKETS = tuple(256 << i for i in range(11))
ANSWER_BUCKETS = tuple(8 << i for i in range(12))
WAIT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1)
FORK_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

HELP = {
    "requests_total": "Finished requests, by what they were to the prompts before them (kind) and how they ended.",
    "prompt_tokens_total": "Prompt tokens as the server reported them: reused from the KV cache (cached) or evaluated"
    " (evaluated, warm-ups included). The hit rate is cached / all.",
    "cached_ratio": "Share of a prompt that came from the KV cache, one observation per request with a reported count.",
    "prompt_length_tokens": "Length of the prompts in tokens.",
    "cache_misses_total": "Requests that evaluated a prefix they could have shared, by the reason found (cold_root:"
    " nobody had evaluated it before).",
    "cache_measurements_total": "Finished requests by where their cached-token count comes from; only reported ones"
    " enter the token counters.",
    "expected_cached_tokens_total": "Cached tokens the proxy expected, of requests whose count was reported. Far above"
    " the cached ones of prompt_tokens_total: slots lose their prefix unseen.",
    "prefill_seconds_total": "Seconds the server spent evaluating prompts, as it reported them, warm-ups included.",
    "prefill_seconds_saved_total": "Cached tokens times the measured seconds per evaluated token of the same model."
    " Starts counting with the first measured prefill of 64 tokens or more.",
    "ttft_seconds": "Arrival of a request to its first token on the way to the client, queueing included.",
    "request_seconds": "Arrival of a request to the end of its answer, for requests that reached an upstream.",
    "queue_seconds": "Wait for a slot, for requests that got one or gave up waiting.",
    "overhead_seconds": "Time the proxy itself added to a request: everything but waiting for slot and upstream.",
    "queue_depth": "Requests waiting for a slot right now.",
    "admission_rejected_total": "Requests refused before they reached an upstream.",
    "slots": "Slots by state: idle, leased (one request), reserved (warm-up or copy running), draining (cancelled, not"
    " yet seen idle), foreign (busy with somebody else's request).",
    "slot_tokens": "Tokens believed to be in the slot's KV cache.",
    "slot_prompt_tokens_total": "Prompt tokens by the slot that took them, cached or evaluated, as reported.",
    "family_prompt_tokens_total": "Prompt tokens by prompt family (requests that share a root), cached or evaluated, as"
    " reported. The busiest families have a label, the rest is `other`.",
    "warmups_total": "Cold roots evaluated once, alone, for the requests waiting on them.",
    "forks_total": "Roots copied into another slot instead of being evaluated there.",
    "fork_seconds": "Time one copy of a root took.",
    "relocations_total": "Pieces of volatile text moved behind the root, by rule.",
    "relocated_bytes_total": "Bytes of volatile text moved behind the root, by rule.",
    "upstream_up": "1 when the upstream answers and is ready to serve.",
    "upstream_slots": "Slots the upstream has.",
    "upstream_n_ctx_slot": "Context of one slot in tokens; absent while the upstream has not said.",
    "reuse_enabled": "1 while prefixes are reused on this upstream, 0 when it was switched off.",
    "upstream": "What the upstream said about itself.",
    "canary_requests_total": "Finished requests of a canary by arm: on (reuse) or off, and how they ended.",
    "canary_ttft_seconds": "Arrival to first token of a canary's requests, by arm.",
    "canary_cached_ratio": "Share of a canary's prompts that came from the KV cache, by arm.",
    "canary_answer_tokens": "Length of a canary's answers in tokens, by arm: reuse must not change it.",
    "context_rejected_total": "Prompts refused because they do not fit into a slot.",
}
"""The help text of every metric, by name less `prefixproxy_`. `upstream` is exposed as `upstream_info`."""

_NOT_SERVED = frozenset({Outcome.REJECTED, Outcome.BAD_REQUEST, Outcome.UPSTREAM_DOWN})


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """One upstream at scrape time. `slots` counts by state, `slot_tokens` maps slot number to resident tokens."""

    name: str
    kind: str
    up: bool
    build: str = ""
    model: str = ""
    n_slots: int = 0
    n_ctx_slot: int | None = None
    reuse_enabled: bool = True
    slots: Mapping[SlotState, int] = field(default_factory=dict)
    slot_tokens: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """What the gauges show, plain values taken in one moment."""

    queue_depth: Mapping[Priority, int] = field(default_factory=dict)
    upstreams: tuple[UpstreamStatus, ...] = ()


class Metrics:
    """All metrics of one proxy, in a registry of its own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._family, self._model = Labels(MAX_FAMILIES), Labels(MAX_MODELS)
        self._rule, self._slot = Labels(MAX_RULES), Labels(MAX_SLOTS)
        self._prefill_rates: dict[str, PrefillRate] = {}
        self._gauges: _Gauges | None = None
        self._tallies = Tallies()

        self._requests = self._counter("requests_total", "path", "model", "kind", "outcome")
        self._measurements = self._counter("cache_measurements_total", "cache_source")
        self._misses = self._counter("cache_misses_total", "model", "reason")
        self._rejected = self._counter("admission_rejected_total", "reason")
        self._context_rejected = self._counter("context_rejected_total", "model")

        self._tokens = self._counter("prompt_tokens_total", "model", "source")
        self._slot_tokens = self._counter("slot_prompt_tokens_total", "upstream", "slot", "source")
        self._family_tokens = self._counter("family_prompt_tokens_total", "family", "source")
        self._expected = self._counter("expected_cached_tokens_total", "model")
        self._ratio = self._histogram("cached_ratio", RATIO_BUCKETS, "model", "kind")
        self._length = self._histogram("prompt_length_tokens", LENGTH_BUCKETS, "model")

        self._prefill = self._counter("prefill_seconds_total", "model")
        self._saved = self._counter("prefill_seconds_saved_total", "model")
        self._ttft = self._histogram("ttft_seconds", WAIT_BUCKETS, "model", "kind")
        self._total = self._histogram("request_seconds", WAIT_BUCKETS, "model", "kind")
        self._queue = self._histogram("queue_seconds", WAIT_BUCKETS, "model", "kind")
        self._overhead = self._histogram("overhead_seconds", OVERHEAD_BUCKETS, "path")

        self._warmups = self._counter("warmups_total", "upstream", "outcome")
        self._forks = self._counter("forks_total", "upstream", "outcome")
        self._fork_seconds = self._histogram("fork_seconds", FORK_BUCKETS, "upstream")
        self._relocations = self._counter("relocations_total", "rule")
        self._relocated_bytes = self._counter("relocated_bytes_total", "rule")
        self._canary = self._counter("canary_requests_total", "arm", "outcome")
        self._canary_ttft = self._histogram("canary_ttft_seconds", WAIT_BUCKETS, "arm")
        self._canary_ratio = self._histogram("canary_cached_ratio", RATIO_BUCKETS, "arm")
        self._canary_answer = self._histogram("canary_answer_tokens", ANSWER_BUCKETS, "arm")
        self._show_zeros()
        self.registry.register(self._tallies)

    def observe(self, record: RequestRecord) -> None:
        """Count one finished request. Called exactly once per request that came in on a generating path."""
        path, model, kind = _path(record.path), self._model(record.model), record.kind.value
        self._requests.add(1, path, model, kind, record.outcome.value)
        self._overhead.add(record.overhead_ms / 1000, path)
        for relocation in record.relocations:
            rule = self._rule(relocation.rule)
            self._relocations.add(1, rule)
            self._relocated_bytes.add(relocation.bytes, rule)
        if record.arm:
            self._observe_arm(record)
        served = record.outcome not in _NOT_SERVED
        if served or record.queue_ms > 0:
            self._queue.add(record.queue_ms / 1000, model, kind)
        if not served:
            # without those that did not fit, the histogram would end where the slots do
            if record.context_exceeded and record.prompt_tokens is not None:
                self._length.add(record.prompt_tokens, model)
            return
        self._total.add(record.total_ms / 1000, model, kind)
        if record.ttft_ms is not None:
            self._ttft.add(record.ttft_ms / 1000, model, kind)
        self._measurements.add(1, record.cache_source.value)
        self._observe_prompt(record, model, kind)

    def _observe_arm(self, record: RequestRecord) -> None:
        self._canary.add(1, record.arm, record.outcome.value)
        if record.outcome is not Outcome.OK:
            return
        if record.ttft_ms is not None:
            self._canary_ttft.add(record.ttft_ms / 1000, record.arm)
        if record.cache_source is CacheSource.REPORTED and record.prompt_tokens and record.cache_n is not None:
            self._canary_ratio.add(record.cache_n / record.prompt_tokens, record.arm)
        if record.predicted_n is not None:
            self._canary_answer.add(record.predicted_n, record.arm)

    def _observe_prompt(self, record: RequestRecord, model: str, kind: str) -> None:
        if record.prompt_tokens is not None:
            self._length.add(record.prompt_tokens, model)
        cached, evaluated = record.cache_n, record.prompt_n
        if record.cache_source is not CacheSource.REPORTED or cached is None or evaluated is None:
            return
        self._count_tokens(model, record.upstream, record.slot, cached, evaluated)
        self._count_family(record.family, cached, evaluated)
        if cached + evaluated > 0:
            self._ratio.add(cached / (cached + evaluated), model, kind)
        if record.expected_cached is not None:
            self._expected.add(record.expected_cached, model)
        if record.miss_reason is not MissReason.NONE:
            self._misses.add(1, model, record.miss_reason.value)
        self._count_prefill(model, cached, evaluated, record.prompt_ms)

    def rejected(self, reason: str) -> None:
        """A request refused before it reached an upstream; `reason` is the error code it got."""
        self._rejected.add(1, reason if reason in REJECT_REASONS else OTHER)

    def context_rejected(self, model: str) -> None:
        """A prompt that does not fit into a slot."""
        self._context_rejected.add(1, self._model(model))

    def relocation(self, rule: str, n_bytes: int) -> None:
        """A piece of text moved outside any request's record, such as by a rule tried on its own."""
        label = self._rule(rule)
        self._relocations.add(1, label)
        self._relocated_bytes.add(n_bytes, label)

    def warmup(
        self, upstream: str, outcome: str, model: str = "", slot: int | None = None, usage: Usage | None = None
    ) -> None:
        """A root evaluated for the requests waiting on it. Its tokens were paid for like any others and count as such,
        so that these counters add up to the engine's own."""
        self._warmups.add(1, upstream, _work_outcome(outcome))
        if usage is None or usage.source is not CacheSource.REPORTED:
            return
        if usage.cached_tokens is None or usage.evaluated_tokens is None:
            return
        label = self._model(model)
        self._count_tokens(label, upstream, slot, usage.cached_tokens, usage.evaluated_tokens)
        self._count_prefill(label, 0, usage.evaluated_tokens, usage.prompt_ms)

    def fork(self, upstream: str, outcome: str, seconds: float) -> None:
        """A root copied into another slot, in `seconds` from command to confirmation."""
        self._forks.add(1, upstream, _work_outcome(outcome))
        if outcome == "ok":
            self._fork_seconds.add(seconds, upstream)

    def no_effect(self, upstream: str, *, forked: bool) -> None:
        """A warm-up, or a copy, of which the request that it was for reused hardly anything."""
        (self._forks if forked else self._warmups).add(1, upstream, "no_effect")

    def tried(self, upstream: str, model: str, slot: int | None, usage: Usage) -> None:
        """What a probe had the engine evaluate."""
        self._count_tokens(self._model(model), upstream, slot, usage.cached_tokens or 0, usage.evaluated_tokens or 0)

    def cut_short(self, upstream: str, model: str, slot: int, family: str, cached: int, evaluated: int) -> None:
        """What a request had cost that was broken off within its prefill, once that is known: behind its `observe`."""
        self._count_tokens(self._model(model), upstream, slot, cached, evaluated)
        self._count_family(family, cached, evaluated)

    def watch(self, snapshot: Callable[[], StatusSnapshot]) -> None:
        """Take the gauges from `snapshot`, which is called at each scrape. The last one given counts."""
        if self._gauges is not None:
            self.registry.unregister(self._gauges)
        self._gauges = _Gauges(snapshot)
        self.registry.register(self._gauges)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The scrape answer and its content type: OpenMetrics where `accept` asks for it, else the text format."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def seconds_per_token(self, model: str) -> float | None:
        """The measured prefill rate of a model, None before its first measurement."""
        rate = self._prefill_rates.get(model or "unknown")
        return rate.seconds_per_token if rate else None

    def _count_tokens(self, model: str, upstream: str, slot: int | None, cached: int, evaluated: int) -> None:
        self._tokens.add(cached, model, "cached")
        self._tokens.add(evaluated, model, "evaluated")
        if slot is not None:
            label = self._slot(str(slot))
            self._slot_tokens.add(cached, upstream, label, "cached")
            self._slot_tokens.add(evaluated, upstream, label, "evaluated")

    def _count_family(self, family: str, cached: int, evaluated: int) -> None:
        label = self._family(family)
        self._family_tokens.add(cached, label, "cached")
        self._family_tokens.add(evaluated, label, "evaluated")

    def _count_prefill(self, model: str, cached: int, evaluated: int, prompt_ms: float | None) -> None:
        rate = self._prefill_rates.setdefault(model, PrefillRate())
        if prompt_ms is not None:
            self._prefill.add(prompt_ms / 1000, model)
            rate.measured(evaluated, prompt_ms / 1000)
        if rate.seconds_per_token is not None:
            self._saved.add(cached * rate.seconds_per_token, model)

    def _show_zeros(self) -> None:
        """Series of closed sets exist from the start: a rate over a series that is not there yet is no zero."""
        for source in CacheSource:
            self._measurements.add(0, source.value)
        for reason in (*REJECT_REASONS, OTHER):
            self._rejected.add(0, reason)

    def _counter(self, name: str, *labels: str) -> Tally:
        return self._tallies.counter(f"prefixproxy_{name}", HELP[name], labels)

    def _histogram(self, name: str, bounds: tuple[float, ...], *labels: str) -> Spread:
        return self._tallies.histogram(f"prefixproxy_{name}", HELP[name], labels, bounds)


class PrefillRate:
    """Seconds per evaluated token of one model, from the server's own numbers, recent ones counting more."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def measured(self, tokens: int, seconds: float) -> None:
        if tokens < RATE_MIN_TOKENS or seconds < 0:
            return
        kept = 0.5 ** (tokens / RATE_HALF_LIFE_TOKENS)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds

    @property
    def seconds_per_token(self) -> float | None:
        return self._seconds / self._tokens if self._tokens else None


class _Gauges(Collector):
    """The gauges, made from one snapshot per scrape."""

    def __init__(self, snapshot: Callable[[], StatusSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Names without values, so that registering does not take a snapshot."""
        return self._families(StatusSnapshot())

    def collect(self) -> Iterable[Metric]:
        return self._families(self._snapshot())

    def _families(self, snapshot: StatusSnapshot) -> Iterable[Metric]:
        depth = _gauge("queue_depth", "priority")
        for priority in Priority:
            depth.add_metric([priority.value], snapshot.queue_depth.get(priority, 0))
        info = InfoMetricFamily("prefixproxy_upstream", HELP["upstream"], labels=["upstream", "kind", "build", "model"])
        up, reuse = _gauge("upstream_up", "upstream"), _gauge("reuse_enabled", "upstream")
        n_slots, n_ctx = _gauge("upstream_slots", "upstream"), _gauge("upstream_n_ctx_slot", "upstream")
        slots, tokens = _gauge("slots", "upstream", "state"), _gauge("slot_tokens", "upstream", "slot")
        for upstream in snapshot.upstreams:
            name = upstream.name
            info.add_metric([name, upstream.kind, upstream.build, upstream.model], {})
            up.add_metric([name], upstream.up)
            reuse.add_metric([name], upstream.reuse_enabled)
            n_slots.add_metric([name], upstream.n_slots)
            if upstream.n_ctx_slot is not None:
                n_ctx.add_metric([name], upstream.n_ctx_slot)
            for state in SlotState:
                slots.add_metric([name, state.value], upstream.slots.get(state, 0))
            for slot, held in sorted(upstream.slot_tokens.items()):
                tokens.add_metric([name, str(slot)], held)
        return (depth, slots, tokens, up, n_slots, n_ctx, reuse, info)


def _gauge(name: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"prefixproxy_{name}", HELP[name], labels=list(labels))


def _path(path: str) -> str:
    return path if path in API_OF_PATH else OTHER


def _work_outcome(outcome: str) -> str:
    return outcome if outcome in WORK_OUTCOMES else OTHER
