"""Which of all upstreams is ready for a request, and which one is waited for."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from prefixproxy.backends import Backend
from prefixproxy.errors import UpstreamUnavailable
from prefixproxy.fleet import Fleet
from prefixproxy.types import Capabilities, UpstreamFacts
from prefixproxy.upkeep import Health, Upkeep, UpstreamState

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PATIENCE_S = 300.0


def keeper(name: str, health: Health, *models: str, since: float = 0.0) -> Upkeep:
    """One that lists `models`; without any it was never up."""
    backend = cast(Backend, type("Named", (), {"name": name}))
    facts = UpstreamFacts(name, "llama-server", 2, models=models, capabilities=Capabilities(native=True))
    state = UpstreamState(backend, health, facts if models else None, failure=f"{name} is {health}")
    state.loading_since = since
    return cast(Upkeep, type("Keeper", (), {"state": state}))


def fleet(now: float, *keepers: Upkeep) -> Fleet:
    return Fleet({each.state.backend.name: each for each in keepers}, lambda: now, PATIENCE_S)


async def waits(made: Fleet, model: str) -> bool:
    """Whether a request for `model` waits for an upstream, instead of going to one at once."""
    try:
        async with asyncio.timeout(0):
            await made.until_served(model, CHAT, deadline=1e9)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize(
    ("now", "model", "waiting"),
    [(299.0, "other", True), (299.0, "small", False), (299.0, "", False), (301.0, "other", False)],
)
async def test_an_unknown_name_waits_for_a_first_load_and_not_for_one_that_never_ends(
    now: float, model: str, waiting: bool
) -> None:
    made = fleet(now, keeper("a", Health.UP, "small"), keeper("b", Health.LOADING))
    assert await waits(made, model) is waiting


async def test_a_model_waits_for_its_own_server_while_that_loads() -> None:
    assert await waits(fleet(0.0, keeper("a", Health.UP, "small"), keeper("b", Health.LOADING, "large")), "large")


@pytest.mark.parametrize("others", [[], [keeper("c", Health.LOADING)]])
async def test_a_model_whose_server_is_gone_is_refused_at_once(others: list[Upkeep]) -> None:
    made = fleet(0.0, keeper("a", Health.UP, "small"), keeper("b", Health.LOST, "large"), *others)
    with pytest.raises(UpstreamUnavailable, match=r"no upstream that serves 'large' is ready \(.*b: b is lost"):
        await waits(made, "large")


async def test_nobody_waits_for_a_server_that_is_not_there() -> None:
    with pytest.raises(UpstreamUnavailable, match=r"no upstream is ready \(a: a is starting\)"):
        await waits(fleet(0.0, keeper("a", Health.STARTING)), "")


async def test_a_server_that_was_not_asked_yet_is_waited_for() -> None:
    """The proxy listens before it knows its upstreams: its first clients are not told that these are down."""
    asked = keeper("a", Health.STARTING)
    asked.state.failure = ""
    assert await waits(fleet(0.0, asked), "")
    assert not await waits(fleet(0.0, asked, keeper("b", Health.UP, "small")), "small")


async def test_who_waits_goes_as_soon_as_it_is_up() -> None:
    coming = keeper("b", Health.LOADING)
    made = fleet(0.0, keeper("a", Health.UP, "small"), coming)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(made.until_served("other", CHAT, deadline=1e9))
        await asyncio.sleep(0)
        coming.state.health = Health.UP
        coming.state.facts = UpstreamFacts("b", "llama-server", 2, models=("other",))
        made.tell_news()
    assert made.backend_for("other", CHAT).name == "b"


def unasked(name: str) -> Upkeep:
    found = keeper(name, Health.STARTING)
    found.state.failure = ""
    return found


async def is_asked(made: Fleet, *, all_of_them: bool = False) -> bool:
    """Whether what takes no slot goes on at once."""
    try:
        async with asyncio.timeout(0):
            await made.until_asked("", CHAT, PATIENCE_S, all_of_them=all_of_them)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("keepers", "one", "every"),
    [
        ([unasked("a")], False, False),
        ([unasked("a"), keeper("b", Health.UP, "small")], True, False),
        ([keeper("a", Health.STARTING), keeper("b", Health.UP, "small")], True, True),
        ([keeper("a", Health.STARTING), keeper("b", Health.LOADING)], True, True),
    ],
    ids=["not asked", "one is up", "one is not there", "none is up"],
)
async def test_what_takes_no_slot_waits_for_first_probes_alone(keepers: list[Upkeep], one: bool, every: bool) -> None:
    made = fleet(0.0, *keepers)
    assert (await is_asked(made), await is_asked(made, all_of_them=True)) == (one, every)


async def test_the_wait_for_a_first_probe_has_an_end() -> None:
    await fleet(0.0, unasked("a")).until_asked("", CHAT, 0.0)
