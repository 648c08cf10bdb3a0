"""Several lanes on /v1/messages, which names no slot, on the real engine: with tools, streamed and not, each keeps its
prefix from turn to turn, the slot it ran in is found out, and the counts are the server's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from chat_template import TOOLS_AND_REASONING
from prometheus_client.parser import text_string_to_metric_families
from running_engine import RunningEngine
from running_proxy import RunningProxy, running_proxy, until_quiet

from prefixproxy.types import CacheSource, Outcome, RequestRecord

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

LIMIT_S = 120.0
N_LANES, N_TURNS = 4, 3
TOOL = {
    "name": "find_sheet",
    "description": "Where a sheet lies",
    "input_schema": {"type": "object", "properties": {"sheet": {"type": "integer"}}, "required": ["sheet"]},
}


def system_of(lane: int) -> str:
    """A root of its own for each lane, long beside the tools that all share: the server takes a slot for a tenth."""
    return f"Lane {lane} keeps archive {lane * 31}. " + " ".join(f"Rule {n} of {lane}: shelf {n}." for n in range(120))


class Lane:
    """One conversation, its answers and tool results sent back as an agent does."""

    def __init__(self, running: RunningProxy, number: int) -> None:
        self._running = running
        self._number = number
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": f"Where is sheet {number}?"}]
        self.usage: list[dict[str, int]] = []

    async def turn(self, number: int) -> None:
        stream = (number + self._number) % 2 == 0
        body = {
            "model": "m",
            "system": [{"type": "text", "text": system_of(self._number), "cache_control": {"type": "ephemeral"}}],
            "tools": [TOOL],
            "messages": self._messages,
            "max_tokens": 24,
            "temperature": 0,
            "stream": stream,
        }
        headers = {"x-claude-code-session-id": f"session-{self._number}"}
        async with httpx.AsyncClient(base_url=self._running.url, timeout=LIMIT_S) as client:
            answer = await client.post("/v1/messages?beta=true", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        text, usage = streamed(answer.content) if stream else whole(answer.json())
        self.usage.append(usage)
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "find_sheet", "input": {"sheet": number}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"Shelf {number}"}
        self._messages += [
            {"role": "assistant", "content": [{"type": "text", "text": text or "Hm"}, call]},
            {"role": "user", "content": [result]},
        ]


def whole(answer: dict[str, Any]) -> tuple[str, dict[str, int]]:
    return "".join(block.get("text", "") for block in answer["content"]), answer["usage"]


def streamed(content: bytes) -> tuple[str, dict[str, int]]:
    events = [orjson.loads(line[6:]) for line in content.split(b"\n") if line.startswith(b"data: ")]
    usage: dict[str, int] = {}
    for event in events:
        usage |= event.get("usage") or event.get("message", {}).get("usage") or {}
    return "".join(event["delta"].get("text", "") for event in events if "delta" in event), usage


@asynccontextmanager
async def four_slots(start: Callable[..., RunningEngine], model: Path) -> AsyncIterator[RunningProxy]:
    extra: dict[str, int | str] = {"cpuparams.n_threads": 1, "chat_template": TOOLS_AND_REASONING}
    engine = start(model=model, parallel=N_LANES, ctx=N_LANES * 4096, extra=extra)
    async with running_proxy(engine.url) as running:
        yield running


async def tokens(url: str, cached: str, evaluated: str) -> tuple[float, float]:
    async with httpx.AsyncClient() as client:
        families = list(text_string_to_metric_families((await client.get(url)).text))
    samples = [s for family in families for s in family.samples]

    def sum_of(name: str) -> float:
        name, _, source = name.partition("/")
        return sum(s.value for s in samples if s.name == name and s.labels.get("source", "") == source)

    return sum_of(cached), sum_of(evaluated)


async def test_each_lane_keeps_its_prefix(
    engine_factory: Callable[..., RunningEngine], tiny_models: Callable[[str], Path]
) -> None:
    async with four_slots(engine_factory, tiny_models("attentive")) as running:
        lanes = [Lane(running, number) for number in range(N_LANES)]
        for number in range(N_TURNS):
            async with asyncio.TaskGroup() as group:
                for lane in lanes:
                    group.create_task(lane.turn(number))
            await until_quiet(running)
        records = running.proxy.parts.telemetry.journal.newest(100)
        engine = f"{running.url}/prefixproxy/upstreams/local/metrics"
        theirs = await tokens(engine, "llamacpp:prompt_tokens_cached_total", "llamacpp:prompt_tokens_total")
        name = "prefixproxy_prompt_tokens_total"
        ours = await tokens(f"{running.url}/metrics", f"{name}/cached", f"{name}/evaluated")

    assert {record.outcome for record in records} == {Outcome.OK}
    assert {record.cache_source for record in records} == {CacheSource.REPORTED}
    assert ours == theirs
    by_lane = grouped(records)
    assert len(by_lane) == N_LANES
    for lane in lanes:
        first, *later = lane.usage
        length = first["input_tokens"] + first["cache_read_input_tokens"]
        for usage in later:
            assert usage["cache_read_input_tokens"] >= 0.95 * length
            length = usage["input_tokens"] + usage["cache_read_input_tokens"]
    # A request that is over before a look finds it has no slot in its record; what was found is one slot a lane.
    found = [{turn.slot for turn in turns if turn.slot is not None} for turns in by_lane.values()]
    assert all(len(slots) <= 1 for slots in found), found
    known = [slot for slots in found for slot in slots]
    assert known
    assert len(set(known)) == len(known)


def grouped(records: list[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """By family, as each lane has a root of its own."""
    by_family: dict[str, list[RequestRecord]] = {}
    for record in reversed(records):
        by_family.setdefault(record.family, []).append(record)
    return by_family
