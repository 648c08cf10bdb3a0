"""What was in the slots before us, or came there behind our back: a prompt may be found in it by the server alone.

A request that is sent without a slot goes where most of its prompt is. So as long as slots hold what nobody knows, a
prompt of which more may lie there than is known elsewhere goes without one: a few times, then it is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixproxy.schedule.ram import MIN_FOUND_TOKENS
from prefixproxy.schedule.slot import Slot

TRIES = 2
"""Requests for each such slot that are sent without one."""


@dataclass(slots=True)
class Strangers:
    """`tries`: so many more requests may go to see."""

    tries: int = 0

    def note(self, slots: Sequence[Slot], slot: Slot, n_tokens: int | None, *, ours: bool) -> None:
        """A look shows so many tokens in an idle slot. `ours`: a request of ours may have left them."""
        before, slot.strange = slot.strange, 0 if slot.held.tokens else n_tokens or 0
        if slot.strange > max(before, MIN_FOUND_TOKENS) and not ours:
            self.tries = min(self.tries + TRIES, TRIES * len(slots))

    def may_have(self, slots: Sequence[Slot], cached: int) -> bool:
        """Whether an idle slot may have so much more of a prompt than these tokens that it is worth a try."""
        return self.tries > 0 and any(slot.idle and slot.strange > cached + MIN_FOUND_TOKENS for slot in slots)
