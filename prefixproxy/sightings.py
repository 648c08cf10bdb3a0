"""A prompt reduced to digests and sizes: enough to say where two prompts part, with no text kept.

Digests are Python's own 64-bit hashes (SipHash, keyed by the process): fast, hard to collide on purpose, meaningless
outside this process, so they are never stored.

A prompt is a row of parts (tools, system, each message). Its *marks* are running digests, one behind each part, so
two prompts share a mark exactly when they share every part before it. A raw prompt has no parts that mean anything
(label "prompt[0]", or none for a body that was not understood): its blocks stand in for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from prefixproxy.prefix import BLOCK_ENDS, PrefixChain, shared_length


@dataclass(frozen=True, slots=True)
class Sight:
    """One request as it is sent. `labels` name `parts` one by one ("system[0]", "tools", "assistant[2]"); the first
    `n_head` of them are the root. `side`: found to be a title, a summary, an autocomplete."""

    request_id: str
    model: str
    family: str
    lane: str
    parts: tuple[bytes, ...]
    labels: tuple[str, ...]
    n_head: int
    chain: PrefixChain
    side: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What is kept of a request. `digests` are of each part alone (none for blocks), `marks` of all parts up
    to it, `ends` in bytes."""

    request_id: str
    model: str
    family: str
    lane: str
    labels: tuple[str, ...]
    digests: tuple[int, ...]
    marks: tuple[int, ...]
    ends: tuple[int, ...]
    n_head: int
    chain: PrefixChain
    side: bool

    @property
    def n_bytes(self) -> int:
        return self.chain.n_bytes

    @property
    def head_bytes(self) -> int:
        return self.bytes_before(self.n_head)

    @property
    def head_mark(self) -> int | None:
        return self.marks[self.n_head - 1] if self.n_head else None

    def bytes_before(self, part: int) -> int:
        return self.ends[part - 1] if part else 0

    def part_bytes(self, part: int) -> int:
        return self.ends[part] - self.bytes_before(part)

    def common_parts(self, other: Entry) -> int:
        """How many leading parts both share."""
        return shared_length(self.marks, other.marks)


def entry_of(sight: Sight) -> Entry:
    if not sight.labels or sight.labels[0].startswith("prompt"):
        return _entry_of_raw(sight)
    digests = tuple(map(hash, sight.parts))
    marks = tuple(accumulate(digests, _next_mark, initial=hash(sight.model)))[1:]
    ends = tuple(accumulate(map(len, sight.parts)))
    return _entry(sight, sight.labels, digests, marks, ends, sight.n_head)


def lines_of(head: tuple[bytes, ...]) -> frozenset[int]:
    """The lines and sentences of a head as hashes. A JSON string carries its line ends as two characters; a head of one
    long line is told apart by its sentences."""
    text = b"\n".join(head).replace(b"\\n", b"\n").replace(b". ", b".\n")
    return frozenset(map(hash, text.split(b"\n")))


def _entry_of_raw(sight: Sight) -> Entry:
    chain = sight.chain
    label = sight.labels[0] if sight.labels else "prompt"
    marks = chain.hashes or (chain.digest,)
    ends = BLOCK_ENDS[: len(chain.hashes)] or (chain.n_bytes,)
    return _entry(sight, (label,) * len(marks), (), marks, ends, 0)


def _entry(
    sight: Sight,
    labels: tuple[str, ...],
    digests: tuple[int, ...],
    marks: tuple[int, ...],
    ends: tuple[int, ...],
    n_head: int,
) -> Entry:
    return Entry(
        sight.request_id,
        sight.model,
        sight.family,
        sight.lane,
        labels,
        digests,
        marks,
        ends,
        n_head,
        replace(sight.chain, ends={}),  # `ends` of an entry say it already
        sight.side,
    )


def _next_mark(mark: int, digest: int) -> int:
    return hash((mark, digest))
