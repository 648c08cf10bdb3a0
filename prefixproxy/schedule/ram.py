"""What the server's own cache in host memory (llama-server's `--cache-ram`) is believed to hold: conversations that
lost their slot. It is not shown anywhere, so this follows what the server does, and what came of it is learned.

Of use where slots cannot be cut back: an entry keeps its checkpoints, which a slot file does not, so a conversation
goes on from there whether or not its next prompt repeats the last answer token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.slot import Held, Slot
from prefixproxy.types import DEFAULT_RAM_MIB, RootId, TicketId

MAX_ENTRIES = 32
KEPT_ENOUGH = 0.5
"""A slot of which a new prompt keeps this share is cut back in place: nothing is stored, nothing is looked for
(server-context.cpp get_available_slot)."""
LEAST_KEPT = 0.25
"""An entry of which less would be kept is not loaded (server-task.cpp, prompt cache load)."""
MOST_MISSES = 2
MIN_FOUND_TOKENS = 48
"""What is reused beyond these does not come from what a template begins every chat with."""
MANY = 8
"""An entry stays for long if so many of its size have room."""
ASSUMED_BYTES_PER_TOKEN = 128 * 1024
"""Until a file was saved. Of a model with 7 to 8 billion parameters that shares keys and values between heads, in 16
bits; few are larger by more than the factor above allows."""


class Loads(NamedTuple):
    """An entry, and the tokens of a prompt that the server should find in it."""

    held: Held
    tokens: int


@dataclass(slots=True)
class HostCache:
    """`entries`: the newest last. `limit`: so many of the newest are counted on, fewer after a miss, none if the first
    one missed: perhaps it is switched off. `proven`: there is such a cache; until that is known one prompt at a time
    finds that out. `counted`: requests and warm-ups under way that count on an entry, with the tokens expected of it
    and how many entries were newer. `launches`: prompts that were started. `mib`: its size, -1 for no limit, 0 if
    there is none. `missed`: prompts in a row that counted on the newest entry, and did not get it."""

    entries: list[Held] = field(default_factory=list)
    limit: int = MAX_ENTRIES
    proven: bool = False
    launches: int = 0
    mib: int = 0
    missed: int = 0
    counted: dict[TicketId | RootId, tuple[int, int]] = field(default_factory=dict)

    def find(self, prompt: PrefixChain, reuse: Callable[[Held], int]) -> Loads | None:
        """The conversation of which a prompt can `reuse` the most tokens, if any may be counted on: what has in common
        the template's first words alone would tell nothing of the cache."""
        if not self.limit or (self.counted and not self.proven):
            return None
        answered = (held for held in self.entries[-self.limit :] if held.answered)
        found = (Loads(held, reuse(held)) for held in answered if kept(held, prompt) >= LEAST_KEPT)
        best = max(found, key=lambda loads: loads.tokens, default=None)
        return best if best is not None and best.tokens >= MIN_FOUND_TOKENS else None

    def most_of(self, prompt: PrefixChain, reuse: Callable[[Held], int]) -> int:
        """Tokens of a prompt that may be had from an entry, whether or not there was one before."""
        return max((reuse(held) for held in self.entries if kept(held, prompt) >= LEAST_KEPT), default=0)

    def count_on(self, loads: Loads, who: TicketId | RootId) -> None:
        """A prompt is about to be sent where the server should load it."""
        self.counted[who] = loads.tokens, len(self.entries) - 1 - self.entries.index(loads.held)

    def start(self, prompt: PrefixChain, held: Held) -> None:
        """A prompt starts in a slot that holds `held`: that is stored, and what serves the prompt best moves out."""
        self.launches += 1
        if not held.tokens or kept(held, prompt) >= KEPT_ENOUGH:
            return
        best = max(self.entries, key=lambda entry: entry.tokens_at(prompt.common_blocks(entry.chain)), default=None)
        if best is not None and kept(best, prompt) >= LEAST_KEPT:
            self.entries.remove(best)
        self.store(held)

    def displace(self, slot: Slot) -> None:
        """A restore takes its place: there is a copy if any prompt started since it came free (--cache-idle-slots)."""
        if slot.held.tokens and self.launches > slot.launches:
            self.store(slot.held)

    def store(self, held: Held) -> None:
        """A copy of a slot goes there; entries that it begins with are dropped."""
        self.entries = [entry for entry in self.entries if not held.chain.goes_on(entry.chain)]
        self.entries.append(held)
        del self.entries[:-MAX_ENTRIES]

    def has_room_for(self, held: Held, bytes_per_token: float | None) -> bool:
        """Whether a copy of it will stay for long: there is room for many of its size."""
        n_bytes = held.tokens * (bytes_per_token or ASSUMED_BYTES_PER_TOKEN)
        return self.mib < 0 or n_bytes * MANY <= self.mib * 2**20

    def note_reuse(self, before: Held, expected: int, reused: int) -> None:
        """More of a prompt was reused than the slot had that it was sent to: it must have come from here, unless it is
        known that there is none."""
        if self.limit and not self.mib and before.tokens and reused > 2 * expected + MIN_FOUND_TOKENS:
            self.mib = DEFAULT_RAM_MIB

    def learn(self, who: TicketId | RootId, reused: int | None) -> None:
        """So many tokens of it were reused; None if that is not known."""
        tokens, newer = self.counted.pop(who, (0, 0))
        if not tokens or reused is None:
            return
        if was_there(tokens, reused):
            self.proven, self.missed = True, 0
        elif self.proven and not newer and self.missed < MOST_MISSES:
            self.missed += 1  # the newest entry is there: less of the prompt was in it than was estimated
        else:
            self.limit = min(self.limit, newer) if self.proven else 0


def was_there(expected: int, reused: int) -> bool:
    """Whether so much of a prompt was reused that the entry it counted on was loaded."""
    return reused >= expected / 2


def kept(held: Held, prompt: PrefixChain) -> float:
    """The share of it that a prompt has too."""
    return held.tokens_at(prompt.common_blocks(held.chain)) / held.tokens
