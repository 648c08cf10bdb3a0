"""What the Grafana dashboards show: one table of panels each. scripts/dashboards.py makes them into files."""

from __future__ import annotations

from dashboard_queries import (
    BYTES_RATE,
    COUNT,
    PER_SECOND,
    REQUESTS,
    SECONDS,
    SECONDS_RATE,
    SHARE,
    SWITCH,
    TOKEN_RATE,
    TOKENS,
    Chart,
    M,
    U,
    both,
    over_range,
    quantile,
    quantiles,
    rate,
    share,
)

CACHED = 'source="cached"'
EVALUATED = 'source="evaluated"'
RANGE_HITS = f"{over_range('prompt_tokens_total', both(M, CACHED))} / {over_range('prompt_tokens_total', M)}"

OVERVIEW = [
    Chart(
        "Hit rate",
        SHARE,
        "Share of all prompt tokens in the time range that came from the KV cache.",
        [(RANGE_HITS, "hit rate")],
        "number",
        4,
    ),
    Chart(
        "Tokens saved",
        TOKENS,
        "Prompt tokens that were reused instead of evaluated, in the time range.",
        [(over_range("prompt_tokens_total", both(M, CACHED)), "saved")],
        "number",
        4,
    ),
    Chart(
        "Prefill time saved",
        SECONDS,
        "Reused tokens times the measured time per evaluated token of the same model.",
        [(over_range("prefill_seconds_saved_total", M), "saved")],
        "number",
        4,
    ),
    Chart(
        "Time to first token, p95",
        SECONDS,
        "Arrival to first token for 95 % of the requests, queueing included.",
        [(quantile(0.95, "ttft_seconds", M), "p95")],
        "number",
        4,
    ),
    Chart("Waiting now", COUNT, "Requests in the queue.", [("sum(prefixproxy_queue_depth)", "waiting")], "number", 4),
    Chart(
        "Upstreams",
        SWITCH,
        "Whether each upstream answers and is ready.",
        [(f"min by (upstream) (prefixproxy_upstream_up{{{U}}})", "{{upstream}}")],
        "number",
        4,
    ),
    Chart(
        "Hit rate by model",
        SHARE,
        "Cached share of the prompt tokens. A drop means that clients or rules changed,"
        " or that slots lose their prefix: see the reasons beside it.",
        [(share("prompt_tokens_total", CACHED, M, "model"), "{{model}}")],
    ),
    Chart(
        "Misses by reason",
        REQUESTS,
        "Requests that evaluated a prefix they could have shared, by what was found to"
        " be the reason. docs/operate/miss-reasons.md says what to do about each.",
        [(rate("cache_misses_total", M, "reason"), "{{reason}}")],
        "stack",
    ),
    Chart(
        "Prompt tokens",
        TOKEN_RATE,
        "Prompt tokens per second, reused and evaluated, warm-ups included.",
        [(rate("prompt_tokens_total", M, "source"), "{{source}}")],
        "stack",
    ),
    Chart(
        "Expected and reported reuse",
        TOKEN_RATE,
        "What the scheduler expected to be cached against what the server"
        " reported. Expected well above reported: slots lose their prefix unseen.",
        [
            (rate("expected_cached_tokens_total", M), "expected"),
            (rate("prompt_tokens_total", both(M, CACHED)), "reported"),
        ],
    ),
    Chart(
        "Time to first token",
        SECONDS,
        "Arrival to first token by kind of request, 95th percentile. A root pays for"
        " its prefill; a continuation or fork should not.",
        [(quantile(0.95, "ttft_seconds", M, "kind"), "{{kind}}")],
    ),
    Chart(
        "Prefill saved and spent",
        SECONDS_RATE,
        "Seconds of prefill per second: spent as the server reported them, saved as estimated from them.",
        [(rate("prefill_seconds_saved_total", M), "saved"), (rate("prefill_seconds_total", M), "spent")],
    ),
    Chart(
        "Requests by kind",
        REQUESTS,
        "What requests are to the prompts before them. Many roots or rewrites: clients break their own prefixes.",
        [(rate("requests_total", M, "kind"), "{{kind}}")],
        "stack",
    ),
    Chart(
        "Requests by outcome",
        REQUESTS,
        "How requests ended.",
        [(rate("requests_total", M, "outcome"), "{{outcome}}")],
        "stack",
    ),
    Chart("Whole request", SECONDS, "Arrival to the end of the answer.", quantiles("request_seconds", M)),
    Chart(
        "Added by the proxy",
        SECONDS,
        "Time the proxy itself takes per request, by path: all but waiting for a slot and for the upstream.",
        [(quantile(0.95, "overhead_seconds", "", "path"), "{{path}}")],
    ),
    Chart(
        "Where the counts come from",
        REQUESTS,
        "Requests by source of their cached-token count. Only reported ones enter the token counters.",
        [(rate("cache_measurements_total", "", "cache_source"), "{{cache_source}}")],
        "stack",
    ),
    Chart(
        "What the upstreams are",
        COUNT,
        "Kind, build and model as each upstream says. The value is always 1.",
        [(f"prefixproxy_upstream_info{{{U}}}", "")],
        "table",
    ),
]

FAMILIES = [
    Chart(
        "Hit rate by family",
        SHARE,
        "The ten families with the most prompt tokens. A family is all requests that"
        " share a root; its name is in the x-prefixproxy-family header and in the journal.",
        [
            (
                f"{share('family_prompt_tokens_total', CACHED, '', 'family')}"
                f" and topk(10, {rate('family_prompt_tokens_total', '', 'family')})",
                "{{family}}",
            )
        ],
    ),
    Chart(
        "Tokens evaluated by family",
        TOKEN_RATE,
        "Who costs the most prefill: the ten most expensive families.",
        [(f"topk(10, {rate('family_prompt_tokens_total', EVALUATED, 'family')})", "{{family}}")],
        "stack",
    ),
    Chart(
        "Evaluated in the time range",
        TOKENS,
        "Tokens evaluated by family, all of the time range.",
        [(f"topk(20, {over_range('family_prompt_tokens_total', EVALUATED, 'family')})", "{{family}}")],
        "bars",
    ),
    Chart(
        "Reused in the time range",
        TOKENS,
        "Tokens reused by family, all of the time range.",
        [(f"topk(20, {over_range('family_prompt_tokens_total', CACHED, 'family')})", "{{family}}")],
        "bars",
    ),
    Chart(
        "Misses by reason in the time range",
        COUNT,
        "How many requests each reason explains.",
        [(over_range("cache_misses_total", M, "reason"), "{{reason}}")],
        "bars",
    ),
    Chart(
        "Reused share by kind",
        SHARE,
        "Median cached share of one prompt, by kind. A continuation should be near 100 %, a fork near root / prompt.",
        [(quantile(0.5, "cached_ratio", M, "kind"), "{{kind}}")],
    ),
    Chart(
        "How much of a prompt was reused",
        COUNT,
        "Requests by the share of their prompt that was cached. Two humps,"
        " at 0 and near 1, are healthy; a hump in between is text that changes within a root.",
        [(rate("cached_ratio_bucket", M, "le"), "{{le}}")],
        "heatmap",
    ),
    Chart(
        "Text moved, by rule",
        PER_SECOND,
        "Pieces of volatile text moved behind the root. A rule that stops acting"
        " after a client update is a frequent cause of a lower hit rate.",
        [(rate("relocations_total", "", "rule"), "{{rule}}")],
        "stack",
    ),
    Chart(
        "Bytes moved, by rule",
        BYTES_RATE,
        "Bytes of volatile text moved behind the root.",
        [(rate("relocated_bytes_total", "", "rule"), "{{rule}}")],
        "stack",
    ),
]

SLOTS = [
    Chart(
        "Slots by state",
        COUNT,
        "idle: free. leased: one request. reserved: a warm-up or copy. draining: cancelled,"
        " not yet seen idle. foreign: busy with a request that did not come through the proxy.",
        [(f"sum by (state) (prefixproxy_slots{{{U}}})", "{{state}}")],
        "stack",
    ),
    Chart(
        "Tokens in each slot",
        TOKENS,
        "What is believed to be in each slot's KV cache.",
        [(f"max by (upstream, slot) (prefixproxy_slot_tokens{{{U}}})", "{{upstream}} {{slot}}")],
    ),
    Chart(
        "Hit rate by slot",
        SHARE,
        "Cached share of the prompt tokens each slot took. One slot far below the others"
        " takes what has no home: side traffic, single prompts.",
        [(share("slot_prompt_tokens_total", CACHED, U, "upstream, slot"), "{{upstream}} {{slot}}")],
    ),
    Chart(
        "Tokens evaluated by slot",
        TOKEN_RATE,
        "Where the prefill is done.",
        [(rate("slot_prompt_tokens_total", both(U, EVALUATED), "upstream, slot"), "{{upstream}} {{slot}}")],
        "stack",
    ),
    Chart(
        "Forks by outcome",
        PER_SECOND,
        "Roots copied into another slot. no_effect: it went through, but nothing was reused afterwards.",
        [(rate("forks_total", U, "outcome"), "{{outcome}}")],
        "stack",
    ),
    Chart(
        "Time per fork",
        SECONDS,
        "One copy of a root. It pays while this is far below the prefill of the root.",
        quantiles("fork_seconds", U),
    ),
    Chart(
        "Warm-ups by outcome",
        PER_SECOND,
        "Cold roots evaluated once, alone, for the requests waiting on them.",
        [(rate("warmups_total", U, "outcome"), "{{outcome}}")],
        "stack",
    ),
    Chart(
        "Reuse",
        SWITCH,
        "Whether prefixes are reused on each upstream.",
        [(f"min by (upstream) (prefixproxy_reuse_enabled{{{U}}})", "{{upstream}}")],
        "number",
        6,
    ),
    Chart(
        "Slots",
        COUNT,
        "Slots each upstream has.",
        [(f"max by (upstream) (prefixproxy_upstream_slots{{{U}}})", "{{upstream}}")],
        "number",
        6,
    ),
]

AT_ONCE = 'le="1.0"'
WAITED = f"{rate('queue_seconds_bucket', both(M, AT_ONCE))} / {rate('queue_seconds_count', M)}"
BUSY = f'sum(prefixproxy_slots{{{U}, state!="idle"}}) / sum(prefixproxy_slots{{{U}}})'

ADMISSION = [
    Chart(
        "Requests waiting",
        COUNT,
        "Queue depth by priority. Batch waits while anything interactive does.",
        [("sum by (priority) (prefixproxy_queue_depth)", "{{priority}}")],
        "stack",
    ),
    Chart("Wait for a slot", SECONDS, "How long requests waited before they were sent.", quantiles("queue_seconds", M)),
    Chart(
        "Wait by kind",
        SECONDS,
        "95th percentile. A fork waits for its root to be warmed: that wait replaces a prefill.",
        [(quantile(0.95, "queue_seconds", M, "kind"), "{{kind}}")],
    ),
    Chart(
        "Waits against prefill saved",
        SECONDS_RATE,
        "Seconds waited and seconds of prefill saved, per second. Waits"
        " far above what they save: add slots, or raise the concurrency.",
        [(rate("queue_seconds_sum", M), "waited"), (rate("prefill_seconds_saved_total", M), "prefill saved")],
    ),
    Chart(
        "Refused",
        REQUESTS,
        "Requests refused before they reached an upstream, by reason.",
        [(rate("admission_rejected_total", "", "reason"), "{{reason}}")],
        "stack",
    ),
    Chart(
        "Slots in use",
        SHARE,
        "Share of the slots that is not idle. Low while requests wait: concurrency or side slots hold them back.",
        [(BUSY, "in use")],
    ),
    Chart(
        "Slots by state",
        COUNT,
        "Beside the queue: what the slots do while requests wait.",
        [(f"sum by (state) (prefixproxy_slots{{{U}}})", "{{state}}")],
        "stack",
    ),
    Chart(
        "Started within a second",
        SHARE,
        "Share of the requests that waited one second at most.",
        [(WAITED, "within 1 s")],
    ),
    Chart(
        "Wait and first token",
        SECONDS,
        "95th percentiles: how much of the time to the first token is waiting.",
        [(quantile(0.95, "ttft_seconds", M), "first token"), (quantile(0.95, "queue_seconds", M), "wait")],
    ),
]

CONTEXT = [
    Chart(
        "Prompt length",
        TOKENS,
        "Prompt lengths against the context of the smallest slot. Lengths are in buckets"
        " that double, so a percentile is exact to a factor of two.",
        [*quantiles("prompt_length_tokens", M), (f"min(prefixproxy_upstream_n_ctx_slot{{{U}}})", "context of a slot")],
        width=24,
    ),
    Chart(
        "Prompts by length",
        COUNT,
        "Prompts in each length bucket, in the time range.",
        [(rate("prompt_length_tokens_bucket", M, "le"), "{{le}}")],
        "heatmap",
    ),
    Chart(
        "Context of a slot",
        TOKENS,
        "n_ctx_slot as each upstream reports it.",
        [(f"min by (upstream) (prefixproxy_upstream_n_ctx_slot{{{U}}})", "{{upstream}}")],
        "number",
    ),
    Chart(
        "Fill of the fullest slot",
        SHARE,
        "Tokens in the fullest slot against its context. Near 100 %: conversations are about to be cut off or refused.",
        [
            (
                f"max by (upstream) (prefixproxy_slot_tokens{{{U}}} / on (instance, upstream) group_left"
                f" prefixproxy_upstream_n_ctx_slot{{{U}}})",
                "{{upstream}}",
            )
        ],
    ),
    Chart(
        "Refused for their length",
        REQUESTS,
        "Prompts that do not fit into a slot.",
        [(rate("context_rejected_total", M, "model"), "{{model}}")],
    ),
]
