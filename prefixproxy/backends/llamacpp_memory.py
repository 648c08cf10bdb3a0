"""Asks an unused llama-server whether its model's memory can be cut back to a prefix.

Neither /props nor /v1/models names the architecture, so two or three tiny prompts are evaluated, each the beginning of
the one before with another tail. Plain attention keeps the shared part. A recurrent or hybrid state and a sliding
window (without --swa-full) keep nothing of so short a prompt, and differ in the checkpoint that the server takes 4
tokens before a prompt's end (server-context.cpp): a recurrent state is restored at its last position, a window, whose
first position is still 0, one token before that. A window can be cut back once prompts are longer than it, so nothing
is concluded there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

FIRST_TOKENS = 32
KEPT_TOKENS = 18
"""More than half of the first, or the server's RAM cache would have a say."""
TAIL_TOKENS = 6
CHECKPOINT_TOKENS = 4
"""So far before a prompt's end the server takes its last checkpoint."""
_FIRST_TOKEN = 100
_OTHER_TOKEN = 160
"""Any vocabulary has token ids so low, and no prompt starts with them in a row."""

Evaluate = Callable[[Sequence[int]], Awaitable[tuple[int, int | None]]]
"""Evaluates a prompt in a slot of the server's choice: that slot, and the tokens that were reused."""


async def rolls_back(evaluate: Evaluate) -> bool | None:
    """True if a short prompt's memory could be cut back anywhere, False if it is a recurrent state, None if this does
    not tell. At most 62 tokens are evaluated."""
    first = list(range(_FIRST_TOKEN, _FIRST_TOKEN + FIRST_TOKENS))
    second = first[:KEPT_TOKENS] + list(range(_OTHER_TOKEN, _OTHER_TOKEN + TAIL_TOKENS))
    checkpoint = len(second) - CHECKPOINT_TOKENS
    third = second[:checkpoint] + first[:CHECKPOINT_TOKENS]
    slot, _ = await evaluate(first)
    match await evaluate(second):
        case chosen, reused if chosen == slot and reused == KEPT_TOKENS:
            return True
        case chosen, 0 if chosen == slot and await evaluate(third) == (slot, checkpoint):
            return False
    return None


def never_used(slots: Sequence[Mapping[str, object]]) -> bool:
    """Whether nothing ran in any of these `/slots` entries since the server started: only then they name no task and
    no count of tokens."""
    return bool(slots) and all(not slot.get("is_processing") and "n_prompt_tokens" not in slot for slot in slots)
