"""What `prefixproxy simulate` takes for its numbers, and what it says of the others."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import orjson
import pytest
from records import RECORD

from prefixproxy.errors import UsageError
from prefixproxy.journal import record_json
from prefixproxy.simulate.command import SimulateOptions, run

MADE_UP = SimulateOptions(synthetic="mixed", requests=30, slots="2", policies="cost", prefill_rate=2000.0)


@pytest.mark.parametrize(
    ("option", "told", "values"),
    [
        ("requests", "--requests: from 1 to 10,000,000", [0, -1, 10**9]),
        ("rate", "--rate: from 0.0001 to 1,000,000", [0.0, -1.0, 1e-300, 1e300, nan, inf]),
        ("servers", "--servers: from 1 to 1,000", [0, 1_000_000]),
        ("prefill_rate", "--prefill-rate: from 1 to 10,000,000", [0.0, 1e-9, 1e300, nan, inf, -inf]),
        ("decode_rate", "--decode-rate: from 0.1 to 1,000,000", [0.0, 1e-9, 1e300, nan, inf]),
        ("kv_bytes", "--kv-bytes: from 1 to 100,000,000", [0, 10**12]),
        ("queue_limit", "--queue-limit: from 1 to 65,536", [0, -1, 10**9]),
        ("queue_timeout_s", "--queue-timeout: from 0.001 to 86,400", [0.0, -1.0, 1e9, nan, inf]),
        ("side_slots", "--side-slots: from 0 to 1,024", [-1, 10**6]),
        ("root_threshold_s", "--root-threshold: from 0 to 86,400", [-1.0, nan, inf]),
    ],
)
def test_a_senseless_number_is_told_with_what_is_allowed(option: str, told: str, values: list[float]) -> None:
    for value in values:
        changed: dict[str, Any] = {option: value}
        with pytest.raises(UsageError) as failure:
            run(replace(MADE_UP, **changed))
        assert str(failure.value).startswith(f"{told} (got {value:g})")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"side_slots": 2, "slots": "4,2"},
            "--side-slots: must leave a slot for other requests: "
            "fewer than the 2 of the smallest server (got 2; --slots)",
        ),
        (
            {"servers": 1000, "slots": "1,101"},
            "--servers: 1,000 of 101 slots each are more than 100,000 slots",
        ),
    ],
)
def test_what_only_makes_no_sense_together(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as failure:
        run(replace(MADE_UP, **options))
    assert str(failure.value) == told


@pytest.mark.parametrize(
    "edge",
    [
        {"rate": 0.0001},
        {"rate": 1_000_000.0},
        {"prefill_rate": 10_000_000.0},
        {"decode_rate": 0.1},
        {"decode_rate": 1_000_000.0},
        {"kv_bytes": 1},
        {"kv_bytes": 100_000_000},
        {"queue_limit": 1},
        {"queue_timeout_s": 0.001},
        {"side_slots": 1},
        {"root_threshold_s": 86_400.0},
        {"servers": 10, "slots": "100"},
    ],
    ids=str,
)
def test_at_the_edge_of_what_is_allowed_it_ends(edge: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    options = replace(MADE_UP, json=True, **edge)
    assert run(options) == 0
    (outcome,) = orjson.loads(capsys.readouterr().out)["outcomes"]
    assert outcome["answered"] + sum(outcome["rejected"].values()) == options.requests


def test_the_slowest_server_ends_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(replace(MADE_UP, requests=5, prefill_rate=1.0, json=True)) == 0
    assert orjson.loads(capsys.readouterr().out)["outcomes"]


def test_a_trace_that_shows_no_sensible_rate_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(RECORD, prompt_tokens=1000, prompt_n=1000, cache_n=0, prompt_ms=1e9)
    trace = tmp_path / "journal.jsonl"
    trace.write_bytes(orjson.dumps(record_json(slow)))
    options = replace(MADE_UP, trace=str(trace), synthetic=None, prefill_rate=None)
    with pytest.raises(UsageError) as failure:
        run(options)
    told = "it shows 0.001 tokens/s, which nothing can be played at: give --prefill-rate"
    assert str(failure.value) == f"{trace}: {told}"
    assert run(replace(options, prefill_rate=100.0)) == 0
    assert "1 requests of" in capsys.readouterr().out
