"""A llama-server without a model: its slots, its RAM cache and its saved slots, on a virtual clock.

What it does follows docs/explanation/llama-server.md: which slot an unpinned request gets, when the RAM cache is asked,
what a slot keeps. It has its own idea of who is busy: whatever is sent to a busy slot is noted in `violations`, as it
would corrupt the request that runs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple

from prefixproxy.schedule.slot import BATCH_TOKENS, LAST_TOKENS
from prefixproxy.schedule.types import SlotSeen
from prefixproxy.simulate.text import EMPTY, Text
from prefixproxy.types import UpstreamFacts

SIMILAR = 0.1
"""--slot-prompt-similarity: the share of a new prompt that a slot must hold to count as similar."""
KEPT_ENOUGH = 0.5
"""A slot of which less stays is saved to the RAM cache first (server-context.cpp get_available_slot)."""
LEAST_KEPT = 0.25
"""An entry of the RAM cache of which less would be used is not loaded (server-task.cpp, prompt cache load)."""


Checkpoints = tuple[int, ...]


@dataclass(slots=True)
class Row:
    """One slot. `checkpoints`: tokens at which its state can be taken up again, where it cannot be cut back. `task`:
    the newest one; -1 as long as there was none."""

    text: Text = EMPTY
    checkpoints: Checkpoints = ()
    busy: bool = False
    last_used: float = -1.0
    task: int = -1


class Taken(NamedTuple):
    """A prompt that is being evaluated: where, tokens reused, and when its first token comes."""

    slot: int
    cached: int
    ready: float


class RamCache:
    """The server's own cache of slot contents in host memory: entries are moved out when loaded, oldest go first."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit = limit_tokens
        self._entries: dict[Text, Checkpoints] = {}
        self._by_first: dict[int, dict[Text, None]] = {}
        self._tokens = 0

    def publish(self, text: Text, checkpoints: Checkpoints = ()) -> None:
        """Keep a copy, unless an entry already begins with it; those it begins with go."""
        if not len(text) or len(text) > self._limit:
            return
        for entry in list(self._alike(text)):
            shared = entry.common(text)
            if shared == len(text):
                return
            if shared == len(entry):
                self._drop(entry)
        while self._tokens + len(text) > self._limit:
            self._drop(next(iter(self._entries)))
        self._entries[text] = checkpoints
        self._by_first.setdefault(text.spans[0][0], {})[text] = None
        self._tokens += len(text)

    def load(self, prompt: Text, held: Text) -> tuple[Text, Checkpoints] | None:
        """Move out the entry that serves `prompt` best, if one serves it better than what the slot holds."""
        best, shared = None, held.common(prompt)
        kept = shared / len(held) if len(held) else 0.0
        for entry in self._alike(prompt):
            common = entry.common(prompt)
            if common / len(entry) >= LEAST_KEPT and common / len(entry) > kept and common > shared:
                best, shared, kept = entry, common, common / len(entry)
        if best is None:
            return None
        found = best, self._entries[best]
        self._drop(best)
        return found

    def _alike(self, text: Text) -> Mapping[Text, None]:
        return self._by_first.get(text.spans[0][0], {}) if text.spans else {}

    def _drop(self, entry: Text) -> None:
        del self._entries[entry]
        alike = self._by_first[entry.spans[0][0]]
        del alike[entry]
        if not alike:
            del self._by_first[entry.spans[0][0]]
        self._tokens -= len(entry)


@dataclass
class VirtualServer:
    """`rate`: prompt tokens per second, one prompt after the other; `decode_s`: seconds per answer token, in each slot.
    `rollback`: False for a recurrent model, which reuses a slot that holds more than a prefix from a checkpoint on.
    `max_checkpoints`: of one slot (--ctx-checkpoints). `ram_tokens`: what fits into its RAM cache, 0 = off. `kv_bytes`:
    of one token, in a saved slot. `warms`: warm-ups succeed. `save_rate`, `restore_rate`: bytes per second, beside the
    seconds of each call."""

    facts: UpstreamFacts
    rate: float = 200.0
    decode_s: float = 0.02
    rollback: bool = True
    max_checkpoints: int = 32
    ram_tokens: int = 0
    kv_bytes: int = 20_000
    save_s: float = 0.05
    restore_s: float = 0.03
    save_rate: float = inf
    restore_rate: float = inf
    drain_s: float = 0.3
    warms: bool = True
    rows: list[Row] = field(default_factory=list)
    files: dict[str, Text] = field(default_factory=dict)
    evaluated: int = 0
    violations: list[str] = field(default_factory=list)
    free_at: float = 0.0

    def __post_init__(self) -> None:
        self.rows = [Row() for _ in range(self.facts.n_slots)]
        self._ram = RamCache(self.ram_tokens) if self.ram_tokens else None
        self._unpublished: set[int] = set()
        self._tasks = count()

    def take(self, slot: int | None, prompt: Text, now: float, what: str, head: int = 0) -> Taken | None:
        """Start evaluating; None if no slot is free for an unpinned prompt. `head`: tokens before its first message."""
        similar = True
        if slot is None:
            chosen = self._choose(prompt)
            if chosen is None:
                return None
            slot, similar = chosen
        row = self.rows[slot]
        if row.busy:
            self.violations.append(f"{now:.3f}: {what} on busy slot {slot}")
        self._exchange(row, prompt, similar)
        cached = min(row.text.common(prompt), len(prompt) - 1)
        if not self.rollback and cached < len(row.text):
            cached = max((n for n in row.checkpoints if n <= cached), default=0)
        cached = max(0, cached)
        row.checkpoints = self._checkpoints(row.checkpoints, cached, len(prompt), head)
        row.busy, row.text, row.task = True, prompt, next(self._tasks)
        self._publish_idle()
        self.evaluated += len(prompt) - cached
        self.free_at = max(self.free_at, now) + (len(prompt) - cached) / self.rate
        return Taken(slot, cached, self.free_at)

    def _checkpoints(self, before: Checkpoints, cached: int, n_tokens: int, head: int) -> Checkpoints:
        """Those that stay, and those taken behind the head and near the end (server-context.cpp)."""
        taken = (head, n_tokens - LAST_TOKENS - BATCH_TOKENS, n_tokens - LAST_TOKENS)
        kept = sorted({*(n for n in before if n <= cached), *(n for n in taken if n > cached)})
        return tuple(kept[len(kept) - min(len(kept), self.max_checkpoints) :])

    def _choose(self, prompt: Text) -> tuple[int, bool] | None:
        """The most similar idle slot, else the least recently used; and whether it is similar."""
        idle = [i for i, row in enumerate(self.rows) if not row.busy]
        similar = [(self.rows[i].text.common(prompt), i) for i in idle]
        similar = [(shared, -i) for shared, i in similar if shared > SIMILAR * len(prompt)]
        if similar:
            return -max(similar)[1], True
        lru = min(idle, key=lambda i: (self.rows[i].last_used, -i), default=None)
        return None if lru is None else (lru, False)

    def _exchange(self, row: Row, prompt: Text, similar: bool) -> None:
        """What the slot held goes to the RAM cache and something better comes from there, where little would stay. A
        pin to an empty slot does neither: its similarity is 0/0."""
        if self._ram is None or (similar and not len(row.text)):
            return
        shared = row.text.common(prompt)
        kept = shared / len(row.text) if similar and shared > SIMILAR * len(prompt) else 0.0
        if kept < KEPT_ENOUGH:
            self._ram.publish(row.text, row.checkpoints)
            row.text, row.checkpoints = self._ram.load(prompt, row.text) or (row.text, row.checkpoints)

    def _publish_idle(self) -> None:
        """--cache-idle-slots, on by default: idle slots are copied whenever a prompt starts."""
        if self._ram is None:
            return
        for i in sorted(self._unpublished):
            if not self.rows[i].busy:
                self._ram.publish(self.rows[i].text, self.rows[i].checkpoints)
                self._unpublished.discard(i)

    def copy_s(self, n_bytes: int) -> tuple[float, float]:
        """How long it takes to save and to restore so much: a call, and the bytes."""
        return self.save_s + n_bytes / self.save_rate, self.restore_s + n_bytes / self.restore_rate

    def spread(self, further: int) -> list[int]:
        """Take the lowest idle slots for further answers to one prompt, and clear them (n > 1)."""
        children = [i for i, row in enumerate(self.rows) if not row.busy][:further] if further > 0 else []
        for child in children:
            self.rows[child].busy, self.rows[child].text, self.rows[child].task = True, EMPTY, next(self._tasks)
        return children

    def release(self, slot: int, now: float, text: Text | None = None) -> None:
        """The slot is idle again, and holds `text` if that is given, else what was evaluated in it."""
        row = self.rows[slot]
        row.busy, row.last_used = False, now
        row.text = row.text if text is None else text
        self._unpublished.add(slot)

    def save(self, slot: int, file: str, now: float) -> int:
        """Write a slot's content to a file; its bytes."""
        self._check_idle(slot, "save", now)
        self.files[file] = self.rows[slot].text
        return len(self.files[file]) * self.kv_bytes

    def restore(self, slot: int, file: str, now: float) -> bool:
        """Read a file into a slot; whether the server says it did."""
        self._check_idle(slot, "restore", now)
        self.rows[slot].text, self.rows[slot].checkpoints = self.files[file], ()
        self._unpublished.add(slot)
        return True

    def seen(self) -> dict[int, SlotSeen]:
        """What GET /slots shows."""
        return {i: SlotSeen(row.busy, len(row.text), row.task) for i, row in enumerate(self.rows)}

    def _check_idle(self, slot: int, what: str, now: float) -> None:
        if self.rows[slot].busy:
            self.violations.append(f"{now:.3f}: {what} on busy slot {slot}")
