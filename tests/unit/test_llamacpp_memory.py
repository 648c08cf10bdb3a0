"""What llama-servers with different memories answer to the trial, and what is concluded from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from prefixproxy.backends.llamacpp_memory import never_used, rolls_back
from prefixproxy.prefix import shared_length

Reused = Callable[[int, int], int]
"""From the length of the prompt before and of what the next one shares with it, the tokens that are reused."""


def anywhere(length: int, shared: int) -> int:
    return shared


def at_checkpoints(length: int, shared: int) -> int:
    """A recurrent state."""
    return length - 4 if length - 4 <= shared else 0


def in_a_window(length: int, shared: int) -> int:
    """Longer than the prompts."""
    return length - 5 if length - 4 <= shared else 0


def never(length: int, shared: int) -> int:
    """A recurrent state on a server without checkpoints."""
    return 0


def a_little(length: int, shared: int) -> int:
    return shared - 3


class Server:
    """`slots`: those it chooses, one after the other; the last one again and again."""

    def __init__(self, reused: Reused, slots: Sequence[int] = (3,)) -> None:
        self._reused = reused
        self._slots = list(slots)
        self._held: list[int] = []
        self.evaluated = 0

    async def evaluate(self, prompt: Sequence[int]) -> tuple[int, int | None]:
        reused = self._reused(len(self._held), shared_length(self._held, list(prompt))) if self._held else 0
        self._held = list(prompt)
        self.evaluated += len(prompt) - reused
        return self._slots.pop(0) if len(self._slots) > 1 else self._slots[0], reused


@pytest.mark.parametrize(
    ("reused", "expected"),
    [(anywhere, True), (at_checkpoints, False), (in_a_window, None), (never, None), (a_little, None)],
)
def test_each_kind_of_memory_is_told_or_left_open(reused: Reused, expected: bool | None) -> None:
    server = Server(reused)
    assert asyncio.run(rolls_back(server.evaluate)) is expected
    assert server.evaluated <= (62 if expected is not None else 80)


@pytest.mark.parametrize("slots", [(3, 2), (3, 3, 2)])
def test_nothing_is_concluded_where_the_server_chose_another_slot(slots: Sequence[int]) -> None:
    assert asyncio.run(rolls_back(Server(at_checkpoints, slots).evaluate)) is None


def test_a_server_that_shows_no_count_of_reused_tokens_tells_nothing() -> None:
    async def evaluate(prompt: Sequence[int]) -> tuple[int, int | None]:
        return 0, None

    assert asyncio.run(rolls_back(evaluate)) is None


@pytest.mark.parametrize(
    ("slots", "unused"),
    [
        ([{"id": 0, "is_processing": False}, {"id": 1, "is_processing": False}], True),
        ([{"id": 0, "is_processing": False}, {"id": 1, "is_processing": False, "n_prompt_tokens": 0}], False),
        ([{"id": 0, "is_processing": False}, {"id": 1, "is_processing": True}], False),
        ([], False),
    ],
)
def test_a_server_counts_as_unused_only_if_no_slot_ever_ran_anything(
    slots: Sequence[dict[str, object]], unused: bool
) -> None:
    assert never_used(slots) is unused
