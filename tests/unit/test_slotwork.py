"""How warm-ups and copies that did not come about are told: too slow is not the same as refused."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from prefixproxy import slotwork
from prefixproxy.backends import Backend, CopyResult
from prefixproxy.errors import UpstreamFailed, UpstreamUnavailable
from prefixproxy.schedule.types import Restore, Warm
from prefixproxy.types import RootId, SlotId
from prefixproxy.warming import Rendering


class Told:
    """A watch that writes down what it is told."""

    def __init__(self) -> None:
        self.forks: list[tuple[Any, ...]] = []
        self.warmups: list[str] = []
        self.done: CopyResult | None = None

    def fork(self, *told: Any) -> None:
        self.forks.append(told)

    def warmup(self, upstream: str, outcome: str, *more: Any) -> None:
        self.warmups.append(outcome)


class Server:
    """Its copies end as they are told to."""

    name = "u"

    def __init__(self, end: BaseException | CopyResult | None) -> None:
        self._end = end

    async def restore(self, slot: SlotId, file: str) -> CopyResult:
        if self._end is None:
            await asyncio.Event().wait()
        if isinstance(self._end, BaseException):
            raise self._end
        assert isinstance(self._end, CopyResult)
        return self._end

    async def tokens(self, path: str, body: Any) -> list[int]:
        return [1, 2, 3]

    async def warm(self, slot: SlotId, tokens: list[int]) -> None:
        await self.restore(slot, "")


def told_by(end: BaseException | CopyResult | None) -> Told:
    told, lost = Told(), list[str]()
    work = slotwork.SlotWork(cast(Any, told), lambda backend, failure: lost.append(backend.name), lambda name: "m")
    restore = Restore(RootId("r"), SlotId("u", 2), "f", source=SlotId("u", 0), n_bytes=100)
    told.done = asyncio.run(cast(Any, work.restore(cast(Backend, Server(end)), restore)))
    if not isinstance(end, CopyResult):
        warm = Warm(RootId("r"), SlotId("u", 2), (), whole=True)
        lane = Rendering("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}')
        asyncio.run(cast(Any, work.warm(cast(Backend, Server(end)), warm, [lane])))
    assert lost == (["u", "u"] if isinstance(end, UpstreamUnavailable) else [])
    return told


def test_a_copy_is_told_with_both_its_slots() -> None:
    assert told_by(CopyResult(n_tokens=10, n_bytes=100, seconds=0.25)).forks == [("u", "ok", 0.25, 2, 0)]


def test_a_file_of_another_length_is_not_the_one_that_was_saved() -> None:
    """Somebody else wrote to it, or was writing while it was read."""
    told = told_by(CopyResult(n_tokens=10, n_bytes=99, seconds=0.25))
    assert told.done is None
    assert told.forks == [("u", "failed", 0.0, 2, 0)]


@pytest.mark.parametrize("failure", [UpstreamFailed("no"), UpstreamUnavailable("gone"), KeyError("n_restored")])
def test_what_fails_is_told_as_failed(failure: Exception) -> None:
    told = told_by(failure)
    assert told.forks == [("u", "failed", 0.0, 2, 0)]
    assert told.warmups == ["failed"]


def test_what_takes_too_long_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slotwork, "COPY_WORK_S", 0.0)
    monkeypatch.setattr(slotwork, "WARM_WORK_S", 0.0)
    told = told_by(None)
    assert told.forks == [("u", "timed_out", 0.0, 2, 0)]
    assert told.warmups == ["timed_out"]
