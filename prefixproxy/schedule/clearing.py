"""Whether a request that starts clears the slots that are idle: llama-server does that where all slots share one pool
(`--kv-unified`, or no `-np`) and idle slots are copied to its RAM cache (`--cache-idle-slots`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple


class Left(NamedTuple):
    """What a slot's newest task left in it, as a look showed that was asked for then."""

    task: int
    n_tokens: int
    asked: float


@dataclass(slots=True)
class Clearing:
    """`blind`: a probe told that it does, so nobody looks at these slots. `known`: what two looks told, lastly.
    `started_at`: when the newest request was sent of those known to have started, `told_at`: when that was known.
    `left`: by the number of the slot."""

    blind: bool = False
    known: bool | None = None
    started_at: float = -inf
    told_at: float = -inf
    left: dict[int, Left] = field(default_factory=dict)

    def seen_or(self, probed: bool | None) -> bool | None:
        """What looks told, else what a probe did."""
        return probed if self.known is None else self.known

    def started(self, sent: float, now: float) -> None:
        """A request that was `sent` then has started."""
        if sent > self.started_at:
            self.started_at, self.told_at = sent, now

    def see(self, slot: int, task: int | None, n_tokens: int | None, asked: float) -> None:
        """A look shows a slot idle. If nothing ran in it since an earlier one, and a request started meanwhile, it
        tells by what is left."""
        if task is None or n_tokens is None:
            self.left.pop(slot, None)
            return
        before = self.left.get(slot)
        if before is not None and before.task == task and before.n_tokens:
            if before.asked < self.started_at and asked >= self.told_at:
                self.known = n_tokens == 0
        if before is None or before[:2] != (task, n_tokens):
            self.left[slot] = Left(task, n_tokens, asked)
