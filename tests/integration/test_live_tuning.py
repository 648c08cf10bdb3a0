"""PATCH /prefixproxy/admission while requests wait and run: effective at once, for these too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest
from running_proxy import RunningProxy, eventually, proxied_stub
from stub_upstream import Exchange, StubUpstream, timings_of

from prefixproxy.schedule.types import HoldReason

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ADMISSION = "/prefixproxy/admission"


@dataclass
class Busy:
    """Two slots, both taken until `free` is set; `waiting` requests in the queue, oldest first."""

    stub: StubUpstream
    running: RunningProxy
    client: httpx.AsyncClient
    free: asyncio.Event
    group: asyncio.TaskGroup
    asked: list[asyncio.Task[httpx.Response]] = field(default_factory=list)

    async def ask(self, count: int) -> list[asyncio.Task[httpx.Response]]:
        """So many more requests, one after the other, each in the queue or at the server before the next."""
        for _ in range(count):
            before = self.known()
            body = {"messages": [{"role": "user", "content": f"question {len(self.asked)}"}]}
            self.asked.append(self.group.create_task(self.client.post(CHAT, json=body)))
            await eventually(partial(self.more_than, before))
        return self.asked[-count:]

    def known(self) -> int:
        snapshot = self.running.proxy.parts.dispatcher.snapshot()
        return snapshot.running + len(snapshot.waiting)

    def more_than(self, before: int) -> bool:
        return self.known() > before

    def holds(self) -> list[HoldReason]:
        return [waiting.hold for waiting in self.running.proxy.parts.dispatcher.snapshot().waiting]

    async def tune(self, **changes: Any) -> None:
        answer = await self.client.patch(ADMISSION, json=changes)
        assert answer.status_code == 200
        assert {**answer.json(), **changes} == answer.json()

    def answered(self) -> list[tuple[int, str]]:
        done = [task.result() for task in self.asked if task.done()]
        return [(one.status_code, one.json().get("error", {}).get("code", "")) for one in done]


@asynccontextmanager
async def busy(waiting: int, **settings: Any) -> AsyncIterator[Busy]:
    free = asyncio.Event()
    async with (
        proxied_stub(**settings) as (stub, running),
        httpx.AsyncClient(base_url=running.url) as client,
        asyncio.TaskGroup() as group,
    ):

        async def hold(exchange: Exchange) -> None:
            await free.wait()
            await exchange.json(200, stub.chat_answer(exchange.request))

        stub.routes = {}
        stub.answer = hold  # type: ignore[method-assign]
        made = Busy(stub, running, client, free, group)
        await made.ask(2 + waiting)
        yield made
        free.set()


async def test_a_shorter_timeout_ends_the_wait_of_those_that_wait_already() -> None:
    async with busy(waiting=3) as now:
        await now.tune(queue_timeout=0.001)
        await asyncio.wait(now.asked[2:])
        assert now.answered() == [(503, "queue_timeout")] * 3
        assert now.known() == 2
        await now.tune(queue_timeout=600.0)
        [late] = await now.ask(1)
        assert now.holds() == [HoldReason.NO_SLOT]
        now.free.set()
        assert (await late).status_code == 200


async def test_a_limit_below_what_is_queued_turns_the_newest_away() -> None:
    async with busy(waiting=5) as now:
        await now.tune(queue_limit=2)
        await asyncio.wait(now.asked[4:])
        assert now.answered() == [(429, "queue_full")] * 3
        assert not any(task.done() for task in now.asked[:4])
        now.free.set()
        assert [(await task).status_code for task in now.asked[:4]] == [200] * 4


async def test_fewer_at_once_than_slots_and_back() -> None:
    async with busy(waiting=0) as now:
        await now.tune(concurrency=1)
        now.free.set()
        await asyncio.wait(now.asked)
        now.free.clear()
        await now.ask(3)
        await now.stub.arrived(3)  # a slot that was just given back is looked at first
        await eventually(lambda: now.holds() == [HoldReason.CONCURRENCY] * 2)
        assert len(now.stub.generating()) == 3
        await now.tune(concurrency=0)
        await now.stub.arrived(4)
        assert now.holds() == [HoldReason.NO_SLOT]


async def test_a_slot_kept_for_side_requests_from_now_on_is_taken_from_the_others() -> None:
    async with busy(waiting=0) as now:
        await now.tune(side_slots=1)
        now.free.set()
        await asyncio.wait(now.asked)
        now.free.clear()
        await now.ask(2)
        await now.stub.arrived(3)
        await eventually(lambda: now.holds() == [HoldReason.NO_SLOT])
        assert len(now.stub.generating()) == 3
        await now.tune(side_slots=0)
        await now.stub.arrived(4)


@pytest.mark.parametrize("changes", [{"fork": False}, {"policy": "fifo"}, {"root_threshold": 3600.0}])
async def test_a_change_in_the_middle_of_a_warm_up_leaves_nobody_behind(changes: dict[str, Any]) -> None:
    warming, go_on = asyncio.Event(), asyncio.Event()

    async def warm(exchange: Exchange) -> None:
        warming.set()
        await go_on.wait()
        n_tokens = len(exchange.request.json()["prompt"])
        await exchange.json(200, {"tokens_cached": n_tokens, "timings": timings_of(n_tokens)})

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        stub.routes["/completion"] = warm
        root = {"role": "system", "content": "You are one of many. " * 100}
        async with asyncio.TaskGroup() as group:
            lanes = [{"messages": [root, {"role": "user", "content": f"lane {i}"}]} for i in range(4)]
            asked = [group.create_task(client.post(CHAT, json=lane)) for lane in lanes]
            await warming.wait()
            answer = await client.patch(ADMISSION, json=changes)
            assert answer.status_code == 200
            go_on.set()
        assert [task.result().status_code for task in asked] == [200] * 4
        saves = [seen for seen in stub.requests if seen.target.endswith("action=save")]
        names = {seen.json()["filename"] for seen in saves} - {"no/such.bin"}
        assert bool(names) == ("fork" not in changes)
        reason = running.proxy.parts.dispatcher.snapshot().upstreams[0].snapshots_off_because
        assert reason == ("switched off" if "fork" in changes else "")


async def test_changes_at_the_same_time_all_count_and_are_all_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixproxy.admission")
    changes: list[dict[str, Any]] = [{"queue_limit": n, "queue_timeout": float(n)} for n in range(1, 21)]
    changes += [{"side_slots": 1}, {"concurrency": 3}, {"policy": "fifo"}]
    async with proxied_stub() as (_, running), httpx.AsyncClient(base_url=running.url) as client:
        answers = await asyncio.gather(*(client.patch(ADMISSION, json=change) for change in changes))
        now = (await client.get(ADMISSION)).json()
    assert [answer.status_code for answer in answers] == [200] * len(changes)
    assert now["queue_limit"] == now["queue_timeout"]
    assert (now["side_slots"], now["concurrency"], now["policy"]) == (1, 3, "fifo")
    assert sum("admission settings changed by 127.0.0.1: " in record.message for record in caplog.records) == 23


async def test_a_request_of_which_one_part_is_wrong_changes_nothing() -> None:
    async with proxied_stub() as (_, running), httpx.AsyncClient(base_url=running.url) as client:
        before = (await client.get(ADMISSION)).json()
        answer = await client.patch(ADMISSION, json={"queue_limit": 3, "side_slots": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_setting")
        assert "at most 1 of the 2 there are (got 2)" in answer.json()["error"]["message"]
        assert (await client.get(ADMISSION)).json() == before


async def test_without_a_threshold_every_root_is_warmed_and_no_slot_gets_two_at_once() -> None:
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        assert (await client.patch(ADMISSION, json={"root_threshold": 0})).status_code == 200
        for wave in range(12):
            root = {"role": "system", "content": f"{wave} " + "word " * 100}
            lanes = [{"messages": [root, {"role": "user", "content": "q"}], "max_tokens": n} for n in range(1, 7)]
            answers = await asyncio.gather(*(client.post(CHAT, json=lane) for lane in lanes))
            assert [answer.status_code for answer in answers] == [200] * 6
        assert stub.violations == []
