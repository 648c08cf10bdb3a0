"""What was in the slots before us, came there behind our back, or came in another form: a prompt may be found in it by
the server alone.

A request that is sent without a slot goes where most of its prompt is. So as long as slots hold what nobody knows, a
prompt of which more may lie there than is known elsewhere goes without one: a few times, then it is given up. So it is
where the same prompts may come as chats, texts or tokens; as long as that finds some it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefixproxy.schedule.ram import MIN_FOUND_TOKENS
from prefixproxy.schedule.slot import Slot
from prefixproxy.types import Form

TRIES = 2
"""Requests for each such slot that are sent without one."""


@dataclass(slots=True)
class Strangers:
    """`tries`: so many more requests may go to see. `forms`: in which prompts were sent."""

    tries: int = 0
    forms: set[Form] = field(default_factory=set)

    def note(self, slots: Sequence[Slot], slot: Slot, n_tokens: int | None, *, ours: bool) -> None:
        """A look shows so many tokens in an idle slot. `ours`: a request of ours may have left them."""
        before, slot.strange = slot.strange, 0 if slot.held.tokens else n_tokens or 0
        if slot.strange > max(before, MIN_FOUND_TOKENS) and not ours:
            self._add(len(slots))

    def may_have(self, slots: Sequence[Slot], cached: int, form: Form) -> bool:
        """Whether an idle slot may have so much more of a prompt than these tokens that it is worth a try."""
        enough, other = cached + MIN_FOUND_TOKENS, self._came_otherwise(form)
        if not (self.tries or (other and form not in self.forms)):
            return False
        return any(slot.idle and slot.strange + (slot.held.tokens if other else 0) > enough for slot in slots)

    def _came_otherwise(self, form: Form) -> bool:
        return any(form.may_be(other) for other in self.forms)

    def meet(self, form: Form, n_slots: int) -> None:
        """A prompt of that form is sent."""
        if form not in self.forms:
            if self._came_otherwise(form):
                self.tries = TRIES * n_slots  # the first prompts may well be new ones
            self.forms.add(form)

    def found(self, form: Form, n_slots: int) -> None:
        """More of a prompt was where the server had it go than was known to be."""
        if self._came_otherwise(form):
            self._add(n_slots)

    def _add(self, n_slots: int) -> None:
        self.tries = min(self.tries + TRIES, TRIES * n_slots)
