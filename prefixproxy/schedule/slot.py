"""One slot, and what it or a snapshot holds. Its upstream alone writes to it (`slots`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from prefixproxy.prefix import PrefixChain, bytes_of
from prefixproxy.types import RootId, SlotId, SlotState, TicketId


@dataclass(frozen=True, slots=True)
class Held:
    """What a slot or a snapshot holds: `chain` covers `prompt_tokens` of its `tokens`; the rest is an answer."""

    chain: PrefixChain
    prompt_tokens: int
    tokens: int

    def tokens_at(self, blocks: int) -> int:
        """The tokens in its first `blocks` blocks, taken as evenly spread."""
        return self.prompt_tokens * bytes_of(blocks) // self.chain.n_bytes if blocks else 0

    def cut(self, blocks: int, tokens: int) -> Held:
        """The same, with only its first `blocks` blocks left."""
        return Held(self.chain.head(blocks), self.tokens_at(blocks), tokens) if blocks else NOTHING


class Work(StrEnum):
    """What a reserved slot is reserved for."""

    WARM = "warm"
    SAVE = "save"
    RESTORE = "restore"
    DECODE = "decode"


NOTHING = Held(PrefixChain((), 0, 0), 0, 0)


@dataclass(slots=True)
class Slot:
    """One row. `since`: when `state` last changed. `before`: what it held before the request that runs. `tenant`: whose
    request runs or drains in it, or it is prepared for. `doubt`: what it holds if it is the slot an unpinned request
    took unseen. `uncached`: tokens its request was expected to evaluate. `quiet`: its first token will not show.
    `promised`: the ticket it was restored or warmed for. `source`: the root that was restored into it, `warmed`: one
    was warmed in it, and nothing ran since. `until`: when the warm-up, save or restore in it counts as failed. `ended`:
    its request ended by itself, so whatever keeps it busy is not ours. `task`: the newest one known to have been in it
    since nothing of ours was; None while that is not known."""

    id: SlotId
    state: SlotState
    since: float
    held: Held = NOTHING
    before: Held = NOTHING
    doubt: Held | None = None
    dirty: bool = False
    last_used: float = 0.0
    turn: int = 0
    ticket: TicketId | None = None
    family: str = ""
    tenant: str = ""
    started: bool = False
    first_token_at: float | None = None
    quiet: bool = False
    uncached: int = 0
    promised: TicketId | None = None
    source: RootId | None = None
    warmed: bool = False
    work: Work | None = None
    root: RootId | None = None
    until: float = inf
    ended: bool = False
    task: int | None = None
    counted: bool = False
    """A look has shown how many tokens it holds. From then on every look does, until the server forgets its slots."""
    number: int = 0
    """Grows with the upstream, then with the slot, over all upstreams."""

    @property
    def idle(self) -> bool:
        return self.state is SlotState.IDLE


def left_over(slot: Slot, n_tokens: int | None) -> Held:
    """What a slot holds after its request was cut off. The server keeps what it had evaluated until then
    (server-context.cpp release()), so the count tells how far it came; without one, only what the request
    shared with the content before it is certain."""
    held, before = slot.held, slot.before
    if not held.tokens:
        return NOTHING
    if n_tokens is None:
        return before.cut(before.chain.common_blocks(held.chain), 0)
    if not slot.started and n_tokens == before.tokens:
        return before
    if n_tokens >= held.prompt_tokens:
        return Held(held.chain, held.prompt_tokens, n_tokens)
    share = len(held.chain.hashes)
    while share and held.tokens_at(share) > 0.98 * n_tokens:
        share -= 1
    return held.cut(share, n_tokens)
