"""A warm-up or a copy that hangs is given up by whoever runs it, before the scheduler stops waiting for it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from running_proxy import proxied_stub
from stub_upstream import Exchange, StubUpstream

from prefixproxy import slotwork
from prefixproxy.schedule.types import COPY_WORK_S, WARM_WORK_S, Policy

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BRIEFING = "Rules of the house. " * 200


def lane(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": BRIEFING}, {"role": "user", "content": question}]}


def test_the_work_gives_up_before_the_scheduler_does() -> None:
    assert 0 < WARM_WORK_S < Policy().max_warm_s
    assert 0 < COPY_WORK_S < Policy().max_copy_s


@pytest.mark.parametrize("hangs", ["a warm-up", "a save"])
async def test_work_that_hangs_is_given_up_and_the_request_goes_on(
    hangs: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "WARM_WORK_S" if hangs == "a warm-up" else "COPY_WORK_S"
    monkeypatch.setattr(slotwork, limit, 0.05)
    stub = StubUpstream(n_slots=2)

    async def hang(exchange: Exchange) -> None:
        if b"no/such" in exchange.request.body:
            return await exchange.json(400, {"error": {"code": 400, "message": "Invalid filename", "type": "x"}})
        await exchange.request.connection_gone.wait()

    for path in ["/completion"] if hangs == "a warm-up" else ["/slots/0", "/slots/1"]:
        stub.routes[path] = hang
    async with (
        proxied_stub(stub, admission__root_threshold=0.0) as (_, running),
        httpx.AsyncClient(base_url=running.url, timeout=60) as client,
    ):
        answer = await client.post(CHAT, json=lane("Who sweeps the yard?"))
        assert answer.json()["choices"][0]["message"]["content"] == "Fine."
    assert f"{hangs} on local took longer than 0.05 s" in caplog.text
