"""One slot, and what it or a snapshot holds. Its upstream alone writes to it (`slots`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import exp2, inf

from prefixproxy.prefix import PrefixChain, bytes_of
from prefixproxy.schedule.types import Ticket
from prefixproxy.types import RootId, SlotId, SlotState, TicketId

LAST_TOKENS, BATCH_TOKENS = 4, 512
"""Tokens before the end of a prompt, and those of one batch (--ubatch-size)."""
MAX_CUTS = 32
"""--ctx-checkpoints."""
MIN_TOKEN_BYTES = 2
"""Text has more bytes than that for each token, nearly always."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A checkpoint behind so many bytes of a prompt; `digest` of these, where they are whole parts, else 0."""

    n_bytes: int
    digest: int = 0

    def serves(self, prompt: PrefixChain, blocks: int) -> bool:
        """Whether it lies in front of where a prompt that shares so many blocks differs. Where that is not known
        exactly it is hoped to: somewhere in the next block the two differ."""
        if self.digest:
            return self.n_bytes <= bytes_of(blocks) or self.digest in prompt.ends
        return self.n_bytes < bytes_of(blocks + 1)


@dataclass(frozen=True, slots=True)
class Held:
    """What a slot or a snapshot holds: `chain` covers `prompt_tokens` of its `tokens`; the rest is an answer. `cuts`:
    where the server has a checkpoint, if it cannot be cut back elsewhere."""

    chain: PrefixChain
    prompt_tokens: int
    tokens: int
    cuts: tuple[Cut, ...] = ()

    @property
    def answered(self) -> bool:
        """Whether an answer stands behind the prompt."""
        return self.tokens > self.prompt_tokens

    def tokens_at(self, blocks: int) -> int:
        """The tokens in its first `blocks` blocks, taken as evenly spread."""
        return self.prompt_tokens * bytes_of(blocks) // self.chain.n_bytes if blocks else 0

    def cut(self, blocks: int, tokens: int) -> Held:
        """The same, with only its first `blocks` blocks left."""
        cuts = tuple(cut for cut in self.cuts if cut.n_bytes <= bytes_of(blocks))
        return Held(self.chain.head(blocks), self.tokens_at(blocks), tokens, cuts) if blocks else NOTHING

    def cut_for(self, prompt: PrefixChain, blocks: int, *, starts: bool) -> int:
        """Bytes before the last checkpoint that lies in what a prompt shares with it: so many blocks, and whole parts;
        0 if there is none. `starts`: those at the starts of messages count too."""
        cuts = (cut for cut in self.cuts if starts or not cut.digest)
        return max((cut.n_bytes for cut in cuts if cut.serves(prompt, blocks)), default=0)


def cuts_of(prompt: PrefixChain, n_tokens: int, starts: Iterable[int], before: Held) -> tuple[Cut, ...]:
    """The checkpoints of a prompt that was evaluated over what was there `before`: llama-server takes them at the
    starts of its first and its last user message (`starts`: digests up to there), one batch before its end and four
    tokens before it, and keeps those in front of where the two differ (server-context.cpp)."""
    shared = prompt.common_blocks(before.chain)
    cuts = {Cut(prompt.ends[digest], digest) for digest in starts if digest in prompt.ends}
    cuts |= {cut for cut in before.cuts if cut.serves(prompt, shared)}
    ends = (n_tokens - LAST_TOKENS - BATCH_TOKENS, n_tokens - LAST_TOKENS)
    cuts |= {Cut(prompt.n_bytes * end // n_tokens) for end in ends if end > 0}
    return tuple(sorted(cuts, key=lambda cut: cut.n_bytes)[-MAX_CUTS:])


UNSTARTED_SETTLE_S = 0.25
"""A request we gave up before the server was seen to start it may still be on its way: one idle look is trusted
only this long after."""


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
    launches: int = 0
    """Prompts that its upstream had started when it came free."""
    number: int = 0
    """Grows with the upstream, then with the slot, over all upstreams."""
    strange: int = 0
    """Tokens that a look showed in it of which nobody knows what they are."""

    @property
    def idle(self) -> bool:
        return self.state is SlotState.IDLE

    @property
    def settled_at(self) -> float:
        """From when on an idle look at it, while it drains, is to be believed."""
        return self.since + (0.0 if self.started else UNSTARTED_SETTLE_S)


@dataclass(slots=True)
class Settling:
    """An unpinned request whose `need` slots the server is choosing: any idle one, most likely one of `seen_busy`.
    `before`: the newest task in each slot when it was granted, where that is known."""

    ticket: TicketId
    need: int
    since: float
    seen_busy: set[SlotId] = field(default_factory=set)
    tenant: str = ""
    before: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Cleared:
    """Requests for several answers had the `n` first slots cleared, lastly at `at`."""

    n: int = 0
    at: float = -inf

    def note(self, n: int, now: float) -> None:
        self.n, self.at = max(n, self.n), now

    def chance(self, slot: Slot, half_life_s: float, now: float) -> float:
        """That what is brought into a slot now is cleared before it is asked for."""
        return exp2((self.at - now) / half_life_s) if slot.id.slot < self.n else 0.0


def continues(ticket: Ticket, held: Held, blocks: int) -> bool:
    """Whether a ticket that shares `blocks` blocks with `held` can be its next turn, which carries its answer too.
    Another question on the same root can differ in the last, partial block alone; a prompt without parts does not tell
    that."""
    answer = held.tokens - held.prompt_tokens
    long_enough = ticket.chain.n_bytes >= held.chain.n_bytes + MIN_TOKEN_BYTES * answer
    if blocks < len(held.chain.hashes) or not long_enough:
        return False
    return len(ticket.chain.ends) < 2 or ticket.chain.goes_on(held.chain)


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
    if n_tokens >= held.prompt_tokens or (n_tokens and slot.first_token_at is not None):
        # a prompt that was answered is there as a whole, so it has fewer tokens than was estimated
        return Held(held.chain, min(held.prompt_tokens, n_tokens), n_tokens, held.cuts)
    share = len(held.chain.hashes)
    while share and held.tokens_at(share) > 0.98 * n_tokens:
        share -= 1
    return held.cut(share, n_tokens)
