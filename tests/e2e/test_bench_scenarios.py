"""`make bench-scenarios`: patterns that cost more than without the proxy once, and do no longer. In these, requests
come one by one, so each run evaluates the same."""

from __future__ import annotations

import pytest
from bench_report import bench_report

ONCE_WORSE = "log_that_slides,slots_named_by_clients,text_and_tokens,rendered_by_the_client,tools_in_some_turns"
WAYS = ("proxy", "same_flags", "before_np")


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("tokenizer_source")
def test_patterns_that_were_worse_than_stock_once() -> None:
    options = ("--models", "llama", "--ways", ",".join(WAYS), "--only", ONCE_WORSE)
    report, done = bench_report("scenarios.py", *options)
    assert len(report["arms"]) == len(WAYS) * len(ONCE_WORSE.split(","))
    assert all(arm["evaluated_tokens"] > 100 for arm in report["arms"]), done.stderr
    assert report["ok"], done.stderr
    assert done.returncode == 0
