"""Sends the lanes of one wave at once and measures each as its client sees it.

Slot, cache_n and prompt_n are what the server reported; the times are taken here, on the client's side of the socket.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from prefixproxy.backends import UpstreamResponse
from prefixproxy.backends.http import HttpUpstream
from prefixproxy.errors import ProxyError, UpstreamFailed
from prefixproxy.sse import SSEReader, object_of
from prefixproxy.types import Api, Usage
from prefixproxy.usage import usage_from

PATH = "/v1/chat/completions"
LANE_TIMEOUT_S = 900.0
PAID_SHARE = 0.9
"""A lane that evaluated this share of the root has paid for it: a few tokens in front of it (the template's) may have
been found, and two briefings differ by a few."""
CALL_TIMEOUT_S = 30.0
_HEADERS = [(b"content-type", b"application/json")]
_EVALUATED = re.compile(rb"^llamacpp:prompt_tokens_total (\d+)", re.MULTILINE)
_TEXT_KEYS = ("content", "reasoning_content", "tool_calls")


@dataclass(slots=True, eq=False)
class LaneRun:
    """One lane on its way. What nobody has reported yet is None; `ttft_s` and `wall_s` count from the moment the
    request was sent."""

    number: int
    slot: int | None = None
    usage: Usage = field(default_factory=Usage)
    ttft_s: float | None = None
    wall_s: float | None = None
    failure: str = ""

    @property
    def state(self) -> str:
        if self.failure:
            return "failed"
        if self.wall_s is not None:
            return "done"
        return "sent" if self.ttft_s is None else "answering"


@dataclass(slots=True, eq=False)
class Wave:
    """Lanes that are sent together. `evaluated_tokens` is by how much the server's own counter rose meanwhile: it
    counts what no lane reports too, such as a warm-up."""

    name: str
    title: str
    lanes: list[LaneRun]
    started: float | None = None
    wall_s: float | None = None
    evaluated_tokens: int | None = None

    @property
    def failed(self) -> bool:
        return any(lane.failure for lane in self.lanes)

    @property
    def beside_lanes_tokens(self) -> int | None:
        """Tokens evaluated in no lane of ours."""
        told = [lane.usage.evaluated_tokens for lane in self.lanes]
        if self.evaluated_tokens is None or None in told:
            return None
        return self.evaluated_tokens - sum(tokens or 0 for tokens in told)

    def roots_evaluated(self, root_tokens: int) -> int | None:
        """How often a root of this length was evaluated: by a lane, or beside them."""
        beside = self.beside_lanes_tokens
        if beside is None or root_tokens <= 0:
            return None
        paid = sum((lane.usage.evaluated_tokens or 0) >= PAID_SHARE * root_tokens for lane in self.lanes)
        return paid + round(beside / root_tokens)

    def lanes_that_reused(self, root_tokens: int) -> int:
        """Lanes that found the root in their slot; its last token may be evaluated again."""
        return sum((lane.usage.cached_tokens or 0) >= root_tokens - 1 for lane in self.lanes)


Tell = Callable[[Wave, LaneRun], None]
"""Called when a lane's first token comes, and when it ends."""


async def run_wave(wave: Wave, url: str, engine_url: str, bodies: Sequence[Mapping[str, Any]], tell: Tell) -> None:
    """Send `bodies` to `url` at once, one for each lane, and wait for them all. Failures are noted in the lanes;
    raises ProxyError only if the server is not there at all."""
    before = await evaluated_total(engine_url)
    client = HttpUpstream("server", url)
    try:
        wave.started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for lane, body in zip(wave.lanes, bodies, strict=True):
                group.create_task(run_lane(client, lane, body, lambda lane: tell(wave, lane)))
        wave.wall_s = time.monotonic() - wave.started
    finally:
        await client.close()
    after = await evaluated_total(engine_url)
    wave.evaluated_tokens = None if before is None or after is None else after - before


async def evaluated_total(engine_url: str) -> int | None:
    """Prompt tokens the server has evaluated since it started, None if it does not count them."""
    client = HttpUpstream("server", engine_url)
    try:
        response = await client.open("GET", "/metrics", read_timeout_s=CALL_TIMEOUT_S)
        try:
            found = _EVALUATED.search(await response.read())
        finally:
            await response.close()
    finally:
        await client.close()
    return int(found[1]) if found else None


async def run_lane(
    client: HttpUpstream, lane: LaneRun, body: Mapping[str, Any], tell: Callable[[LaneRun], None]
) -> None:
    """Send one lane's body and note what comes back; a failure is noted in the lane."""
    started = time.monotonic()
    payload = orjson.dumps(body)
    headers = [*_HEADERS, (b"content-length", str(len(payload)).encode())]
    try:
        async with asyncio.timeout(LANE_TIMEOUT_S):
            response = await client.open("POST", PATH, headers, payload)
            try:
                await _read_answer(response, lane, started, tell)
            finally:
                await response.close()
    except ProxyError as failure:
        lane.failure = failure.message
    except TimeoutError:
        lane.failure = f"no end of the answer within {LANE_TIMEOUT_S:g} s"
    lane.wall_s = time.monotonic() - started
    tell(lane)


async def _read_answer(
    response: UpstreamResponse, lane: LaneRun, started: float, tell: Callable[[LaneRun], None]
) -> None:
    if response.status != 200:
        text = b"".join([chunk async for chunk in response.chunks()])
        raise UpstreamFailed(f"status {response.status}: {text[:300].decode(errors='replace')}")
    reader = SSEReader()
    async for chunk in response.chunks():
        for event in reader.feed(chunk):
            value = object_of(event)
            if value is None:
                continue
            if "error" in value:
                raise UpstreamFailed(f"the stream ended in an error: {value['error']}")
            if lane.ttft_s is None and _carries_token(value):
                lane.ttft_s = time.monotonic() - started
                tell(lane)
            _learn(lane, value)
    if lane.usage.cached_tokens is None:
        raise UpstreamFailed("the stream ended without saying what it cost")


def _learn(lane: LaneRun, value: dict[str, Any]) -> None:
    usage = usage_from(Api.CHAT, [value])
    if usage.cached_tokens is not None:
        lane.usage = usage
    verbose = value.get("__verbose")
    slot = verbose.get("id_slot") if isinstance(verbose, dict) else None
    if isinstance(slot, int) and slot >= 0:
        lane.slot = slot


def _carries_token(value: dict[str, Any]) -> bool:
    """Whether the event brings text, or the end of an answer that has none."""
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    delta = choice.get("delta") or {}
    return bool(choice.get("finish_reason")) or any(delta.get(key) for key in _TEXT_KEYS)
