"""Asks an unused llama-server what becomes of a slot that is idle: whether another request that starts clears it, and
whether what displaces it leaves a copy in the server's RAM cache (`--cache-ram`). And whether it reuses anything for a
request that does not ask for that (`--no-cache-prompt`). No answer of the server tells any of these.

Prompts are sent without a slot. The server takes the slot that shares most with a prompt, if that is more than a tenth
of it, else the one left alone for longest (server-context.cpp, get_available_slot). When all is over that is the one it
would have begun with, unless there are too many.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prefixproxy.backends.llamacpp_memory import Evaluate

MOST_SLOTS = 8
"""With more slots than that nobody goes round them in the end: it takes too long."""
LEAST_EMPTIED = 2
HELD_TOKENS = 16
SHARED_TOKENS, OTHER_TOKENS = 4, 8
"""What displaces them shares so much that the server takes the same slot, and less than half: then it makes a copy."""
_FIRST_TOKEN = 200
"""Any vocabulary has token ids so low, and no prompt starts with them in a row; nor does a trial of the memory."""

Look = Callable[[], Awaitable[Sequence[Mapping[str, object]]]]
"""All slots."""


@dataclass(slots=True)
class Idle:
    """What was found; None: not tried, or it did not tell."""

    clears: bool | None = None
    host_cache: bool | None = None
    reuses_unasked: bool | None = None


async def idle_slots(
    found: Idle, evaluate: Evaluate, unasked: Evaluate, look: Look, used: Iterable[int], n_slots: int
) -> None:
    """Fills `found` in as it goes, so that what was found before a failure stays. `unasked`: does not ask for reuse.
    `used`: the slots of an earlier trial, in order. Some 40 tokens are evaluated, and one in each of few slots."""
    trial = _Trial(evaluate, list(used))
    held = trial.prompt(HELD_TOKENS)
    home, _ = await trial.send(held)
    found.clears = False if n_slots == 1 else await trial.empties(home, look)
    if found.clears is None:
        return
    # idle slots are cleared only once they were copied there
    found.host_cache = True if found.clears else await trial.finds_again(held, home)
    if n_slots <= MOST_SLOTS:
        await trial.go_round(n_slots)
    found.reuses_unasked = await trial.reuses(unasked)


class _Trial:
    """`order`: the slots that were used, the one left alone for longest first. `start`: the first ever."""

    def __init__(self, evaluate: Evaluate, used: list[int]) -> None:
        self._evaluate = evaluate
        self.order = used
        self.start = used[0] if used else None
        self.n_sent = 0
        self.last: Sequence[int] = ()
        self._next = _FIRST_TOKEN

    def prompt(self, n_tokens: int) -> list[int]:
        """Tokens that no other prompt of the trial has."""
        self._next += n_tokens
        return list(range(self._next - n_tokens, self._next))

    async def fill(self) -> int:
        """Use the slot that was left alone for longest."""
        return (await self.send(self.prompt(1)))[0]

    async def empties(self, home: int, look: Look) -> bool | None:
        """Whether a prompt in another slot empties this one."""
        if await self.fill() == home:
            return None
        left = next((slot.get("n_prompt_tokens") for slot in await look() if slot.get("id") == home), None)
        return None if left is None else left == 0

    async def finds_again(self, held: Sequence[int], home: int) -> bool | None:
        """Whether a prompt that was displaced from its slot is found elsewhere."""
        displacing = [*held[:SHARED_TOKENS], *self.prompt(OTHER_TOKENS)]
        if (await self.send(displacing))[0] != home:
            return None
        slot, reused = await self.send([*held, *self.prompt(1)])
        return None if reused is None or slot != home else reused >= len(held)

    async def go_round(self, n_slots: int) -> None:
        """Until every slot was used, and the next one is the one of a fresh server; or somebody else uses it by now."""
        most = self.n_sent + 2 * n_slots
        while self.n_sent < most and (len(self.order) < n_slots or self.order[0] != self.start):
            await self.fill()

    async def reuses(self, evaluate: Evaluate) -> bool | None:
        """Whether anything is reused for a prompt that begins with the last one."""
        slot, reused = await evaluate([*self.last, *self.prompt(1)])
        return None if reused is None or slot != self.order[-1] else reused > 0

    async def send(self, prompt: Sequence[int]) -> tuple[int, int | None]:
        slot, reused = await self._evaluate(prompt)
        self.last = prompt
        self.n_sent += 1
        self.start = slot if self.start is None else self.start
        self.order = [*(one for one in self.order if one != slot), slot]
        return slot, reused


def emptied(slots: Sequence[Mapping[str, object]]) -> int:
    """Slots that have answered and hold nothing now, where at most one holds anything. A server that clears idle slots
    leaves it at that. Erasing them one by one looks alike, and nobody does that to two of them."""
    used = [slot for slot in slots if isinstance(task := slot.get("id_task"), int) and task >= 0]
    empty = [slot for slot in used if slot.get("n_prompt_tokens") == 0 and not slot.get("is_processing")]
    return len(empty) if len(used) - len(empty) <= 1 and len(empty) >= LEAST_EMPTIED else 0


def shows_clearing(slots: Sequence[Mapping[str, object]]) -> bool | None:
    """What a look at a server that was used tells of it. The slot that ran last holds something still."""
    if len(slots) == 1:
        return False
    holds_any = any(slot.get("n_prompt_tokens") or slot.get("is_processing") for slot in slots)
    return True if holds_any and emptied(slots) else None
