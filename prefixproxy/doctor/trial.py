"""Finding out by trying what no answer of llama-server tells: whether an idle slot keeps what it holds, whether a
restored slot is reused, whether the RAM cache is on.

Only for a server that nobody uses. Prompts of a few dozen tokens are sent without a slot, so that the server takes one
that is free, and nothing is ever pinned. Slots are read in between. One saved file stays behind, always the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

PROMPT_TOKENS = 48
TAIL_TOKENS = 5
FILE = "prefixproxy-doctor.bin"
MOST_SLOTS = 16
"""With more, filling them all to see what the RAM cache kept would take too long."""
_FIRST_TOKEN, _STEP = 100, 60
"""Any vocabulary has token ids so low, and no prompt starts with them in a row."""
LONGEST_WINDOW = 2048
ENOUGH = 0.75
"""Of a prefix's tokens: a server that reuses it keeps all but the last, or all up to its last checkpoint."""


class Server(Protocol):
    """What the trial asks of a server."""

    async def evaluate(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Evaluates a prompt in a slot of the server's choice: that slot, and the tokens that were reused."""
        ...

    async def held(self) -> Mapping[int, int]:
        """Tokens in each slot."""
        ...

    async def save(self, slot: int, file: str) -> int:
        """Tokens that were saved."""
        ...

    async def restore(self, slot: int, file: str) -> int:
        """Tokens that were restored."""
        ...

    async def erase(self, slot: int) -> None: ...


@dataclass(slots=True)
class Trial:
    """What was found; None: not tried, or it did not tell. `restored`: tokens that a restored slot should have given
    and those it gave. `keeps_idle`: whether a slot keeps its tokens while another one works."""

    keeps_idle: bool | None = None
    restored: tuple[int, int] | None = None
    restore_failed: str = ""
    ram_cache: bool | None = None
    not_tried: str = ""
    """Why nothing was tried."""
    emptied: int = 0
    """Slots that have answered and hold nothing now, where at most one holds anything."""

    @property
    def restore_works(self) -> bool | None:
        if self.restored is None:
            return False if self.restore_failed else None
        expected, given = self.restored
        return given >= ENOUGH * expected


async def attempt(server: Server, trial: Trial, n_slots: int, *, can_save: bool, n_swa: int = 0) -> None:
    """Fills `trial` in as it goes, so that what was found before a failure stays. `n_swa`: the model's window; what is
    saved is to reach beyond it, if that does not take too long."""
    prompts = _Prompts()
    first, _ = await server.evaluate(prompts.next())
    root = prompts.next()
    if 0 < n_swa <= LONGEST_WINDOW:
        root *= 1 + -(-n_swa // PROMPT_TOKENS)
    second, _ = await server.evaluate(root)
    if second != first:
        trial.keeps_idle = (await server.held()).get(first, 0) >= PROMPT_TOKENS
    if can_save:
        trial.restored = await _restored(server, root, second, first)
    if n_slots <= MOST_SLOTS:
        trial.ram_cache = await _ram_cache(server, prompts, n_slots)


async def _restored(server: Server, root: Sequence[int], holder: int, target: int) -> tuple[int, int] | None:
    """Whether a root that only a restored slot holds is found there. None if another slot was taken."""
    saved = await server.save(holder, FILE)
    await server.erase(holder)
    if target != holder:
        await server.erase(target)
    await server.restore(target, FILE)
    slot, reused = await server.evaluate([*root, *_tail(root)])
    return (saved, reused) if slot == target else None


async def _ram_cache(server: Server, prompts: _Prompts, n_slots: int) -> bool:
    """Whether a prompt that every slot has lost meanwhile is still there."""
    lost = prompts.next()
    await server.evaluate(lost)
    for _ in range(n_slots):
        await server.evaluate(prompts.next())
    _, reused = await server.evaluate([*lost, *_tail(lost)])
    return reused >= ENOUGH * len(lost)


class _Prompts:
    """Token prompts that share not even their first token."""

    def __init__(self) -> None:
        self._next = _FIRST_TOKEN

    def next(self) -> list[int]:
        first, self._next = self._next, self._next + _STEP
        return list(range(first, first + PROMPT_TOKENS))


def _tail(prompt: Sequence[int]) -> list[int]:
    """Tokens that follow no prompt of ours."""
    return [prompt[0]] * TAIL_TOKENS
