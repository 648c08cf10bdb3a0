"""The panels that compare the arms of a canary (`reuse.mode`), on the overview; empty without one."""

from __future__ import annotations

from dashboard_queries import SECONDS, SHARE, TOKENS, Chart, quantile, rate, share

CANARY = [
    Chart(
        "Canary: requests that failed",
        SHARE,
        "Share of each arm that did not end well. Both the same, or reuse does harm.",
        [(share("canary_requests_total", 'outcome!="ok"', by="arm"), "{{arm}}")],
    ),
    Chart(
        "Canary: time to first token",
        SECONDS,
        "Half of each arm's requests were faster. The gap is what reuse saves.",
        [(quantile(0.5, "canary_ttft_seconds", by="arm"), "{{arm}}")],
    ),
    Chart(
        "Canary: share from the cache",
        SHARE,
        "Mean share of a prompt that was reused. Off must be 0.",
        [(f"{rate('canary_cached_ratio_sum', by='arm')} / {rate('canary_cached_ratio_count', by='arm')}", "{{arm}}")],
    ),
    Chart(
        "Canary: length of answers",
        TOKENS,
        "Half of each arm's answers were shorter. Reuse must not change it.",
        [(quantile(0.5, "canary_answer_tokens", by="arm"), "{{arm}}")],
    ),
]
