"""`make bench-conversations` holds its targets, where the machine is busy nearly: forty conversations on four slots."""

from __future__ import annotations

import pytest
from bench_report import bench_report


@pytest.mark.e2e
@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("tokenizer_source")
def test_forty_conversations_on_four_slots_cost_little_more_than_the_least() -> None:
    report, done = bench_report("conversations.py", "--ways", "proxy")
    ratios = {arm["model"]: arm["ratio"] for arm in report["arms"]}
    assert ratios.keys() == report["targets"].keys() == {"llama", "mamba", "hybrid"}
    assert all(1.0 <= ratio <= report["targets"][model] for model, ratio in ratios.items()), done.stderr
