"""One request's record with every field filled, for tests to vary with `dataclasses.replace`."""

from __future__ import annotations

from prefixproxy.types import CacheSource, Kind, MissReason, Outcome, Relocation, RequestRecord

RECORD = RequestRecord(
    id="r1",
    time=1.0,
    tenant="",
    path="/v1/chat/completions",
    model="m",
    upstream="local",
    stream=True,
    kind=Kind.FORK,
    family="f",
    lane="a",
    slot=2,
    outcome=Outcome.OK,
    status=200,
    prompt_tokens=1000,
    cache_n=800,
    prompt_n=200,
    cache_source=CacheSource.REPORTED,
    expected_cached=900,
    miss_reason=MissReason.SLOT_EVICTED,
    queue_ms=2000.0,
    overhead_ms=1.0,
    ttft_ms=3000.0,
    total_ms=5000.0,
    predicted_n=32,
    prompt_ms=400.0,
    fork=True,
    relocations=(Relocation("clock", "system[0]", 31), Relocation("clock", "system[1]", 9)),
)
