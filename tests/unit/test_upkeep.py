"""An upstream is probed until it answers, then looked at now and then: never as fast as the loop turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest

from prefixproxy.backends import Backend, SlotReading
from prefixproxy.errors import UpstreamFailed, UpstreamLoading, UpstreamUnavailable
from prefixproxy.types import Capabilities, UpstreamFacts
from prefixproxy.upkeep import (
    FIRST_PAUSE_S,
    LOADING_PAUSE_S,
    LONGEST_PAUSE_S,
    Health,
    Listener,
    Upkeep,
    UpstreamState,
)

pytestmark = pytest.mark.anyio

FACTS = UpstreamFacts("local", "llama-server", 2, capabilities=Capabilities(pin=True, observe=True))


class Scripted:
    """A backend that says what it is told to."""

    name = "local"
    url = "http://box:8080"

    def __init__(self) -> None:
        self.facts = FACTS
        self.probe_fails: Exception | None = None
        self.slots_fail: Exception | None = None
        self.looks = 0
        self.probes = 0
        self.asked = 0
        self.says: object = "as before"
        self.health_fails: Exception | None = None
        self.facts = FACTS

    async def probe(self) -> UpstreamFacts:
        self.probes += 1
        if self.probe_fails is not None:
            raise self.probe_fails
        return self.facts

    async def health(self) -> object:
        self.asked += 1
        if self.health_fails is not None:
            raise self.health_fails
        return self.says

    async def slots(self) -> Mapping[int, SlotReading]:
        self.looks += 1
        if self.slots_fail is not None:
            raise self.slots_fail
        return {0: SlotReading(False, 7), 1: SlotReading(True, None)}


class Heard:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.read_at: list[float] = []

    def listener(self) -> Listener:
        return Listener(
            up=lambda facts: self.events.append("up"),
            lost=lambda name: self.events.append("lost"),
            read=lambda name, reading, asked_at: self.read_at.append(asked_at),
            not_coming=lambda: self.events.append("not coming"),
        )


@asynccontextmanager
async def kept(backend: Scripted, heard: Heard) -> AsyncIterator[Upkeep]:
    keeper = Upkeep(UpstreamState(cast(Backend, backend)), heard.listener(), asyncio.get_running_loop().time)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(keeper.run())
        try:
            yield keeper
        finally:
            task.cancel()


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells when a loop has come round
            await asyncio.sleep(0)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_live_upstream_asked_to_be_probed_is_looked_at_once_not_for_ever() -> None:
    backend, heard = Scripted(), Heard()
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.UP)
        keeper.state.probe_now.set()
        await until(lambda: backend.asked == 2)
        await turns(200)
        assert (backend.asked, backend.looks, backend.probes) == (2, 0, 1)


async def test_a_look_asked_for_is_one_look_however_many_asked() -> None:
    backend, heard = Scripted(), Heard()
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.UP)
        before = asyncio.get_running_loop().time()
        for _ in range(5):
            keeper.read_soon()
        await until(lambda: heard.read_at)
        await turns(200)
        assert (backend.looks, len(heard.read_at)) == (1, 1)
        assert heard.read_at[0] >= before, "the reading carries the moment it was asked for"


async def test_a_loading_upstream_is_told_from_one_that_is_not_there() -> None:
    backend, heard = Scripted(), Heard()
    backend.probe_fails = UpstreamLoading("loading")
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.LOADING)
        backend.probe_fails = UpstreamUnavailable("refused")
        keeper.state.probe_now.set()
        await until(lambda: keeper.state.health is Health.STARTING)
        backend.probe_fails = None
        keeper.state.probe_now.set()
        await until(lambda: keeper.state.health is Health.UP)
    assert heard.events[-1] == "up"
    assert "lost" not in heard.events


async def test_a_server_that_loads_is_asked_often_however_long_it_was_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[str, float]] = []
    backend = Scripted()
    backend.probe_fails = UpstreamUnavailable("nobody there")

    async def wait(keeper: Upkeep, event: asyncio.Event, seconds: float) -> None:
        waited.append((type(backend.probe_fails).__name__, seconds))
        await asyncio.sleep(0)
        if len(waited) == 20:
            backend.probe_fails = UpstreamLoading("Loading model")

    monkeypatch.setattr(Upkeep, "_wait", wait)
    async with kept(backend, Heard()):
        await until(lambda: len(waited) >= 40)
    gone = [seconds for why, seconds in waited[:40] if why == "UpstreamUnavailable"]
    loading = {seconds for why, seconds in waited[:40] if why == "UpstreamLoading"}
    assert (gone[0], gone[-1]) == (FIRST_PAUSE_S, LONGEST_PAUSE_S)
    assert loading == {LOADING_PAUSE_S}


async def test_a_look_that_fails_loses_the_upstream_until_a_probe_succeeds() -> None:
    backend, heard = Scripted(), Heard()
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.UP)
        backend.slots_fail, backend.probe_fails = UpstreamUnavailable("refused"), UpstreamUnavailable("refused")
        keeper.read_soon()
        await until(lambda: "lost" in heard.events)
        backend.slots_fail = backend.probe_fails = None
        await until(lambda: heard.events.count("up") == 2)
    assert [e for e in heard.events if e != "not coming"] == ["up", "lost", "up"]


async def test_the_log_says_once_that_it_is_down_and_once_that_it_is_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "prefixproxy.upkeep")
    backend, heard = Scripted(), Heard()
    backend.probe_fails = UpstreamUnavailable("nobody listens")
    async with kept(backend, heard) as keeper:
        await probed(backend, keeper, 3)
        backend.probe_fails = None
        await up_again(keeper)
        for _ in range(2):
            backend.slots_fail = backend.probe_fails = UpstreamUnavailable("refused")
            keeper.read_soon()
            await probed(backend, keeper, 2)
            backend.slots_fail = backend.probe_fails = None
            await up_again(keeper)
    down = ("WARNING", "upstream local (http://box:8080) is not up: nobody listens")
    lost = ("WARNING", "upstream local (http://box:8080) is lost: refused")
    up = ("INFO", "upstream local is up: llama-server, 2 slots")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [down, up, lost, up, lost, up]


async def probed(backend: Scripted, keeper: Upkeep, times: int) -> None:
    goal = backend.probes + times

    def again() -> bool:
        keeper.state.probe_now.set()
        return backend.probes >= goal

    await until(again)


async def up_again(keeper: Upkeep) -> None:
    keeper.state.probe_now.set()
    await until(lambda: keeper.state.health is Health.UP)


async def test_that_a_server_clears_its_idle_slots_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    backend, heard = Scripted(), Heard()
    backend.facts = replace(FACTS, capabilities=replace(FACTS.capabilities, clears_idle=True))
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.UP)
        keeper.failed("it is gone")
        await up_again(keeper)
    assert heard.events.count("up") == 2
    warned = [record.getMessage() for record in caplog.records if "idle slots" in record.getMessage()]
    assert len(warned) == 1
    assert warned[0].startswith("upstream local clears its idle slots whenever a request starts")


async def test_a_server_that_loads_is_no_reason_to_warn_until_it_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    backend, heard = Scripted(), Heard()
    backend.probe_fails = UpstreamLoading("loading")
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.LOADING)
        assert caplog.records == []
        backend.probe_fails = UpstreamUnavailable("refused")
        keeper.state.probe_now.set()
        await until(lambda: keeper.state.health is Health.STARTING)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_a_server_that_shows_no_slots_is_asked_for_its_health_while_there_is_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prefixproxy.upkeep.LOOK_EVERY_S", 0.0)
    backend, asked = Scripted(), asyncio.Event()
    facts = replace(FACTS, capabilities=Capabilities())

    async def probe() -> UpstreamFacts:
        return facts

    async def health() -> None:
        asked.set()

    monkeypatch.setattr(backend, "probe", probe)
    monkeypatch.setattr(backend, "health", health)
    async with kept(backend, Heard()) as keeper:
        keeper.used()
        async with asyncio.timeout(10):
            await asked.wait()
    assert backend.looks == 0


NATIVE = replace(FACTS, capabilities=Capabilities(pin=True, observe=True, native=True))


async def test_what_is_held_against_reuse_is_told_once_and_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    backend, heard = Scripted(), Heard()
    backend.facts = NATIVE
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.UP)
        assert keeper.reuse_off == ""
        keeper.against_reuse = lambda facts: "it was seen to corrupt"
        for _ in range(2):
            keeper.reconsider()
        assert (keeper.reuse_off, heard.events) == ("it was seen to corrupt", ["up", "up"])
        keeper.against_reuse = lambda facts: ""
        keeper.reconsider()
        assert (keeper.reuse_off, heard.events) == ("", ["up", "up", "up"])
    assert [r.message for r in caplog.records if "reuse and forks" in r.message] == [
        "upstream local: reuse and forks are off: it was seen to corrupt"
    ]


async def test_only_a_server_that_can_be_asked_for_no_reuse_is_said_to_have_none() -> None:
    backend, heard = Scripted(), Heard()
    async with kept(backend, heard) as keeper:
        keeper.against_reuse = lambda facts: "it was seen to corrupt"
        keeper.reconsider()
        await until(lambda: keeper.state.health is Health.UP)
        assert (keeper.reuse_off, heard.events) == ("", ["up"])


async def test_a_server_that_says_something_else_of_itself_is_probed_anew_and_not_lost() -> None:
    """It was started anew between two looks, with another model or other slots."""
    backend, heard = Scripted(), Heard()
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.UP)
        backend.facts, backend.says = replace(FACTS, n_slots=5, model="other"), "something else"
        keeper.state.probe_now.set()
        await until(lambda: heard.events.count("up") == 2)
        assert keeper.state.facts == backend.facts
        assert keeper.state.back_since is not None
        backend.says = None
        keeper.state.probe_now.set()
        await until(lambda: not keeper.state.probe_now.is_set())
        await turns(200)
    assert heard.events == ["up", "up"]


async def test_more_models_on_the_same_server_are_no_restart() -> None:
    backend, heard = Scripted(), Heard()
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.UP)
        backend.facts, backend.says = replace(FACTS, models=("new",)), "something else"
        keeper.state.probe_now.set()
        await until(lambda: heard.events.count("up") == 2)
        assert (keeper.state.facts, keeper.state.back_since) == (backend.facts, None)


async def test_slots_that_are_not_shown_in_time_are_no_end_of_a_server_that_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend, heard = Scripted(), Heard()
    async with kept(backend, heard) as keeper:
        await until(lambda: keeper.state.health is Health.UP)
        backend.slots_fail = UpstreamFailed("broke off before it answered")
        for looks in (1, 2):
            keeper.read_soon()
            await until(lambda looks=looks: backend.looks == looks)
            await turns(20)
        assert (keeper.state.health, heard.events) == (Health.UP, ["up"])
        backend.health_fails = backend.probe_fails = UpstreamUnavailable("refused")
        keeper.read_soon()
        await until(lambda: "lost" in heard.events)
    told = [record.getMessage() for record in caplog.records if "slots" in record.getMessage()]
    assert told == ["upstream local serves, but does not show its slots: broke off before it answered"]


@pytest.mark.parametrize(("asked", "used"), [(0, 2), (1, 1), (2, 2), (5, 2)])
async def test_no_more_slots_are_used_than_a_server_shows(
    asked: int, used: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An id beyond its last would hit another slot."""
    backend = Scripted()
    keeper = Upkeep(UpstreamState(cast(Backend, backend)), Heard().listener(), lambda: 0.0, slots=asked)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(keeper.run())
        await until(lambda: keeper.state.facts)
        task.cancel()
    assert keeper.state.facts is not None
    assert keeper.state.facts.n_slots == used
    assert ("upstream local has 2 slots, not 5 (upstreams[].slots)" in caplog.text) == (asked > 2)


async def test_who_waits_is_told_that_it_is_coming_as_long_as_it_loads() -> None:
    backend, heard = Scripted(), Heard()
    coming: list[str] = []
    backend.probe_fails = UpstreamLoading("loading")
    listener = replace(heard.listener(), coming=coming.append)
    keeper = Upkeep(UpstreamState(cast(Backend, backend)), listener, asyncio.get_running_loop().time)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(keeper.run())
        await probed(backend, keeper, 3)
        task.cancel()
    assert set(coming) == {"local"}
    assert len(coming) >= 2
