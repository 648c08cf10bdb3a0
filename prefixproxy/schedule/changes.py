"""What changed lately, by the first block of the prompts that it can matter to."""

from __future__ import annotations

from collections.abc import Sequence

from prefixproxy.schedule.slot import Slot

MOST_FAMILIES = 4096
"""First blocks whose changes are remembered; beyond it all are forgotten."""
LONGEST = 256
"""Changes remembered of each."""

Change = Slot | int | None
"""A slot that holds, or held, a prompt with this first block is another than it was; a root of such prompts, or a wait
for those who share one, has begun or ended on the upstream of this number; or (None) a snapshot came or went."""


class _Family:
    __slots__ = ("last", "log", "start")

    def __init__(self, start: int) -> None:
        self.start, self.last = start, start
        self.log: list[tuple[int, Change]] = []


class Changes:
    """Numbered: `now` is the number of the newest."""

    def __init__(self) -> None:
        self.now = 0
        self._forgotten = 0
        self._families: dict[int, _Family] = {}

    def note(self, blocks: Sequence[int], change: Change) -> None:
        if not blocks:
            return
        self.now += 1
        family = self._families.get(blocks[0])
        if family is None:
            if len(self._families) >= MOST_FAMILIES:
                self._families.clear()
                self._forgotten = self.now
            family = self._families[blocks[0]] = _Family(self._forgotten)
        family.log.append((self.now, change))
        family.last = self.now
        if len(family.log) > LONGEST:
            family.start = family.log[LONGEST // 2][0]
            del family.log[: LONGEST // 2 + 1]

    def since(self, first: int, number: int) -> Sequence[Change] | None:
        """All of this first block after a number, newest first; None: nobody knows."""
        family = self._families.get(first)
        if family is None:
            return () if number >= self._forgotten else None
        if family.last <= number:
            return ()
        if number < family.start:
            return None
        found = []
        for each, change in reversed(family.log):
            if each <= number:
                break
            found.append(change)
        return found
