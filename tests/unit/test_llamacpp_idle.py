"""What llama-servers with different caches answer to the trial of their idle slots, and what is concluded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from prefixproxy.backends.llamacpp_idle import HELD_TOKENS, MOST_SLOTS, OTHER_TOKENS, Idle, idle_slots, shows_clearing
from prefixproxy.backends.llamacpp_memory import rolls_back
from prefixproxy.prefix import shared_length


class Server:
    """Takes the slot that shares most with a prompt, else the one left alone for longest; the last of those that were
    never used. `ram`: what loses its slot is kept; `clears`: and so is what is idle when another one starts. `reuses`:
    also for a prompt that does not ask for it."""

    def __init__(
        self, n_slots: int, *, clears: bool = False, ram: bool = True, counts: bool = True, reuses: bool = True
    ) -> None:
        self.held: list[list[int]] = [[] for _ in range(n_slots)]
        self.order = list(reversed(range(n_slots)))
        self.kept: list[list[int]] = []
        self.clears, self.ram, self.counts, self.reuses = clears, ram, counts, reuses
        self.evaluated = self.n_requests = 0

    async def evaluate(self, prompt: Sequence[int]) -> tuple[int, int | None]:
        self.n_requests += 1
        shared = [shared_length(held, list(prompt)) for held in self.held]
        slot = shared.index(max(shared)) if max(shared) > 0.1 * len(prompt) else self.order[0]
        if self.ram and shared[slot] < len(self.held[slot]) / 2:
            self.kept.append(self.held[slot])
            self.held[slot] = max(self.kept, key=lambda held: shared_length(held, list(prompt)))
        if self.clears:
            self.kept += [held for other, held in enumerate(self.held) if held and other != slot]
            self.held = [held if other == slot else [] for other, held in enumerate(self.held)]
        reused = min(shared_length(self.held[slot], list(prompt)), len(prompt) - 1)
        self.held[slot] = list(prompt)
        self.evaluated += len(prompt) - reused
        self.order = [*(one for one in self.order if one != slot), slot]
        return slot, reused if self.counts else None

    async def unasked(self, prompt: Sequence[int]) -> tuple[int, int | None]:
        slot, reused = await self.evaluate(prompt)
        return slot, reused if self.reuses else 0

    async def look(self) -> Sequence[Mapping[str, object]]:
        return [{"id": number, "n_prompt_tokens": len(held)} for number, held in enumerate(self.held)]


def tried(server: Server, used: Sequence[int] = ()) -> Idle:
    found = Idle()
    asyncio.run(idle_slots(found, server.evaluate, server.unasked, server.look, used, len(server.held)))
    return found


@pytest.mark.parametrize("n_slots", [2, 3, 4, MOST_SLOTS])
@pytest.mark.parametrize(("clears", "ram"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("after_the_memory", [False, True])
def test_each_cache_is_told_and_the_next_slot_is_the_one_of_a_fresh_server(
    n_slots: int, *, clears: bool, ram: bool, after_the_memory: bool
) -> None:
    server = Server(n_slots, clears=clears, ram=ram)
    used = []
    if after_the_memory:
        assert asyncio.run(rolls_back(server.evaluate)) is True
        used = [server.order[-1]]
    before = server.evaluated
    assert tried(server, used) == Idle(clears, ram, reuses_unasked=True)
    assert server.order[0] == n_slots - 1
    assert server.evaluated - before <= (1 if ram else 2) * HELD_TOKENS + OTHER_TOKENS + 2 * n_slots + 1


@pytest.mark.parametrize("ram", [False, True])
def test_one_slot_tells_of_the_cache_too(*, ram: bool) -> None:
    assert tried(Server(1, ram=ram)) == Idle(clears=False, host_cache=ram, reuses_unasked=True)


@pytest.mark.parametrize("ram", [False, True])
def test_of_many_slots_two_are_tried(*, ram: bool) -> None:
    server = Server(MOST_SLOTS + 1, ram=ram)
    assert tried(server) == Idle(clears=False, host_cache=ram, reuses_unasked=True)
    assert server.n_requests == 5


def test_a_server_that_reuses_only_what_it_is_asked_to_is_told() -> None:
    assert tried(Server(4, reuses=False)) == Idle(clears=False, host_cache=True, reuses_unasked=False)


def test_a_server_that_counts_nothing_tells_what_its_slots_show() -> None:
    assert tried(Server(4, counts=False)) == Idle(clears=False, host_cache=None)


def test_slots_that_are_taken_otherwise_tell_nothing_and_it_comes_to_an_end() -> None:
    class Always(Server):
        async def evaluate(self, prompt: Sequence[int]) -> tuple[int, int | None]:
            await super().evaluate(prompt)
            return 1, 0

    class Two(Server):
        async def evaluate(self, prompt: Sequence[int]) -> tuple[int, int | None]:
            await super().evaluate(prompt)
            return self.n_requests % 2, 0

        async def look(self) -> Sequence[Mapping[str, object]]:
            return [{"id": number, "n_prompt_tokens": HELD_TOKENS} for number in range(4)]

    assert tried(Always(4)) == Idle()
    busy = Two(4)
    assert tried(busy) == Idle(clears=False, host_cache=None)
    assert busy.n_requests < 20


def slot(task: int, n_tokens: int, *, busy: bool = False) -> dict[str, object]:
    return {"id_task": task, "n_prompt_tokens": n_tokens, "is_processing": busy}


@pytest.mark.parametrize(
    ("slots", "clears"),
    [
        ([slot(4, 0), slot(5, 0), slot(6, 200)], True),
        ([slot(4, 0), slot(5, 0), slot(6, 0, busy=True)], True),
        ([slot(4, 0), slot(6, 200)], None),
        ([slot(0, 0), slot(0, 0), slot(0, 0)], None),  # nothing ran, or all were erased
        ([slot(4, 0), slot(-1, 0), slot(6, 200)], None),
        ([slot(4, 0), slot(5, 0), slot(6, 200), slot(7, 200)], None),  # two may have run at once
        ([slot(4, 200)], False),
    ],
)
def test_a_look_at_a_used_server_may_tell_that_it_clears_idle_slots(
    slots: Sequence[dict[str, object]], clears: bool | None
) -> None:
    assert shows_clearing(slots) is clears
