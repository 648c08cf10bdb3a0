"""Clients that name their conversations: side requests in the same name stay out of the lane's slot, and the names keep
apart what nothing else does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from running_proxy import RunningProxy, proxied_stub
from stub_upstream import StubUpstream

from prefixproxy.types import Kind, RequestRecord

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SYSTEM = "You write code in small steps. " * 40
NAMES = ["x-session-id", "x-claude-code-session-id", "thread-id"]


async def send(running: RunningProxy, name: str, system: str, turns: list[str], **more: Any) -> RequestRecord:
    said = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    body = {"messages": [{"role": "system", "content": system}, *said], **more}
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        answer = await client.post(CHAT, json=body, headers={name: "ses_1"})
    assert answer.status_code == 200
    return running.proxy.parts.telemetry.journal.newest(1)[0]


@pytest.mark.parametrize("name", NAMES)
async def test_a_title_in_the_name_of_a_lane_leaves_the_lanes_slot_alone(name: str) -> None:
    async with proxied_stub(StubUpstream(n_slots=2, reuses=True)) as (stub, running):
        first = await send(running, name, SYSTEM, ["Fix the bug."], tools=TOOLS)
        title = await send(running, name, "Give this conversation a short name.", ["Fix the bug."])
        second = await send(running, name, SYSTEM, ["Fix the bug.", "Done.", "Now test it."], tools=TOOLS)
        assert (first.kind, title.kind, second.kind) == (Kind.ROOT, Kind.SIDE, Kind.CONTINUATION)
        assert title.slot != first.slot == second.slot
        # The names are the client's and go upstream as they are.
        assert {seen.header(name.encode()) for seen in stub.generating()} == {b"ses_1"}


async def test_the_same_request_without_a_name_is_a_lane_of_its_own() -> None:
    async with proxied_stub(StubUpstream(n_slots=2)) as (_, running):
        await send(running, "x-other", SYSTEM, ["Fix the bug."], tools=TOOLS)
        title = await send(running, "x-other", "Give this conversation a short name.", ["Fix the bug."])
        assert title.kind is not Kind.SIDE
