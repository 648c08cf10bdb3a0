"""Hundreds of requests whose clients leave, beside others who use the server directly (more: `make soak`)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import running_proxy, until_quiet
from soak import Way, alone, deviation, plan, run, same_context

from prefixproxy.types import Outcome

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(900)]

N_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "200"))
SEED = int(os.environ.get("SOAK_SEED", "1"))


@pytest.mark.parametrize("strangers", [True, False], ids=["beside strangers", "alone"])
async def test_nobody_is_lost_and_nobody_reads_anothers_context(
    engine_factory: Callable[..., RunningEngine], tiny_models: Callable[[str], Path], *, strangers: bool
) -> None:
    engine, planned = engine_factory(model=tiny_models("attentive")), plan(N_REQUESTS, SEED, strangers=strangers)
    waited = [request for request in planned if request.way in (Way.JSON, Way.STREAM, Way.SEVERAL)]
    asked = [request.number for request in waited]
    # llama-server closes a connection after 100 requests without a word, so the straight client uses one for each.
    single = httpx.Limits(max_keepalive_connections=0)
    async with (
        running_proxy(engine.url, admission__root_threshold=0.01, journal__keep=N_REQUESTS) as running,
        httpx.AsyncClient(base_url=engine.url, timeout=240, limits=single) as straight,
        httpx.AsyncClient(base_url=running.url, timeout=240, limits=httpx.Limits(max_connections=None)) as client,
    ):
        report = await run(client, straight, planned)
        await until_quiet(running)
        journal = (await client.get("/prefixproxy/requests", params={"limit": N_REQUESTS})).json()["requests"]
        slots = running.proxy.parts.dispatcher.snapshot().slots
        control = await alone(straight, waited)
        metrics = (await straight.get("/metrics")).text

    others = [number for number in asked if not same_context(report.answers[number], control[number])]
    assert {number: deviation(report.answers[number], control[number]) for number in others} == {}
    alike = [number for number in asked if same_context(report.answers[number], control[asked[0]])]
    assert len(alike) < len(asked) // 10, "the model must tell the requests apart"
    assert report.statuses == {200: len(asked) + report.ways[Way.DIRECT]}
    outcomes = Counter(record["outcome"] for record in journal)
    left = report.ways[Way.LEAVES_EARLY] + report.ways[Way.LEAVES_MIDWAY]  # some before their request was sent whole
    assert 0 <= outcomes[Outcome.OK] - len(asked) <= left
    assert left // 2 <= outcomes[Outcome.CLIENT_GONE] <= left
    assert set(outcomes) == {Outcome.OK, Outcome.CLIENT_GONE}
    assert [slot.id.slot for slot in slots] == [0, 1, 2, 3]
    assert "requests_deferred 0" in metrics
