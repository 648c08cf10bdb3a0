"""What a request is to the prompts before it, and, once it was answered, why it was not cheaper.

Evidence only: digests of the parts of earlier prompts, which of them a server has evaluated, and what the server said
it reused. Pure: time is an argument, no text is kept.

Kinds, first match wins (`History._kind`):
 1. side          the caller found it to be a title, a summary, an autocomplete
 2. continuation  a known prompt leads it whole, root and at least one message; or the same prompt again
 3. reducer       it quotes the answers of two or more requests of other lanes
 4. compaction    same lane and root, or messages of a known prompt recur behind the first difference; and it is shorter
 5. rewrite       the same, and it is not shorter
 6. fork          its root is known
 7. root          it has a root that is not known
 8. unique        it has no root, and shares less than a quarter with any known prompt

Why it missed: see `misses`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice

from prefixproxy.misses import Evaluated, Evidence, Verdict, first_difference, miss_reason
from prefixproxy.quotes import Quotes
from prefixproxy.sightings import Entry, Sight, entry_of, lines_of
from prefixproxy.types import FirstDifference, Kind, MissReason

MIN_TELLING_BYTES = 64
"""A shorter message ("continue", "yes") recurs by chance and is no evidence of a shared history."""
SIMILAR_HEAD = 0.8
"""Share of lines two heads must have in common for one to be a changed version of the other."""
MIN_LINES = 4
MAX_HEADS = 64
SHARED_QUARTER = 4
"""A prompt without a root is a fork if it shares at least one part in so many with a known one."""


@dataclass(slots=True)
class _Mark:
    """A prefix that was seen: in how many entries, whose the newest is, when it was first and last evaluated."""

    newest: Entry
    holders: int = 0
    first_evaluated: float | None = None
    last_evaluated: float | None = None


class History:
    """A bounded memory of recent requests; the oldest is forgotten first."""

    def __init__(self, max_entries: int = 1000) -> None:
        self._max_entries = max(1, max_entries)
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._marks: dict[int, _Mark] = {}
        self._newest: dict[Hashable, Entry] = {}
        """The newest entry by each thing it may be found by: see `_names`."""
        self._heads: OrderedDict[int, tuple[frozenset[int], Entry]] = OrderedDict()
        self._quotes = Quotes(self._max_entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def remembered_marks(self) -> int:
        """How many distinct prefixes are known: what the memory's size grows with."""
        return len(self._marks)

    def classify(self, sight: Sight) -> Verdict:
        """Decide what a request is and remember it. Call it when the request is sent, and once: a second call for the
        same id replaces the first."""
        self.forget(sight.request_id)
        entry = entry_of(sight)
        kind, reference = self._kind(entry, sight)
        self._remember(entry)
        if kind is not Kind.SIDE and entry.head_mark is not None:
            self._remember_head(entry, sight)
        return Verdict(kind, entry, reference)

    def explain_miss(
        self, verdict: Verdict, evidence: Evidence, now: float
    ) -> tuple[MissReason, FirstDifference | None]:
        """The reason for what a request evaluated, and where its prompt parted from the one it belongs to. From here
        on its prompt counts as evaluated."""
        before = self._evaluated_before(verdict.entry, evidence)
        reason = miss_reason(verdict, evidence, before)
        if evidence.cached_tokens is not None:
            self.evaluated(verdict.entry.request_id, now)
        return reason, first_difference(verdict, evidence.prompt_tokens)

    def evaluated(self, request_id: str, now: float) -> None:
        """A server has worked through this prompt, so that what follows may find it in a slot."""
        entry = self._entries.get(request_id)
        for mark in entry.marks if entry else ():
            known = self._marks[mark]
            known.first_evaluated = now if known.first_evaluated is None else known.first_evaluated
            known.last_evaluated = now

    def answered(self, request_id: str, answer: str) -> None:
        """The text of an answer, to recognise it when a reducer quotes it. Only hashes of it are kept."""
        if request_id in self._entries:
            self._quotes.remember(request_id, answer)

    def forget(self, request_id: str) -> None:
        """A request that was never sent is in nobody's history."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        for mark in entry.marks:
            known = self._marks[mark]
            known.holders -= 1
            if not known.holders:
                del self._marks[mark]
        for name in _names(entry):
            if self._newest.get(name) is entry:
                del self._newest[name]
        self._quotes.forget(request_id)

    def _kind(self, entry: Entry, sight: Sight) -> tuple[Kind, Entry | None]:
        if entry.side:
            return Kind.SIDE, None
        parent = self._parent(entry)
        if parent is not None:
            return Kind.CONTINUATION, parent
        depth, nearest = self._longest_known(entry)
        root_known = depth >= entry.n_head if entry.n_head else self._shares_enough(entry, depth)
        if self._quotes_other_lanes(entry, sight):
            return Kind.REDUCER, nearest if root_known else None
        earlier = self._same_conversation(entry, depth)
        if earlier is not None and earlier.head_mark == entry.head_mark:
            shorter = len(entry.marks) < len(earlier.marks) and entry.n_bytes < earlier.n_bytes
            return (Kind.COMPACTION if shorter else Kind.REWRITE), earlier
        if root_known:
            return Kind.FORK, nearest
        if entry.n_head:
            return Kind.ROOT, earlier or self._changed_root(entry, sight)
        return Kind.UNIQUE, None

    def _parent(self, entry: Entry) -> Entry | None:
        """The longest known prompt that leads this one whole. One that already has another continuation counts only
        if an answer follows it here: several user messages on one prompt are lanes."""
        n_parts = len(entry.marks)
        for n in range(n_parts, entry.n_head, -1):
            parent = self._newest.get(("whole", entry.marks[n - 1]))
            if parent is None or parent.side or _other_lane(entry, parent):
                continue
            answered = n == n_parts or entry.labels[n].startswith("assistant")
            if answered or self._marks[entry.marks[n - 1]].newest is parent:
                return parent
        return None

    def _longest_known(self, entry: Entry) -> tuple[int, Entry | None]:
        """How many leading parts were seen before, and in which request last."""
        for n in range(len(entry.marks), 0, -1):
            known = self._marks.get(entry.marks[n - 1])
            if known is not None:
                return n, known.newest
        return 0, None

    def _shares_enough(self, entry: Entry, depth: int) -> bool:
        return depth > 0 and entry.bytes_before(depth) * SHARED_QUARTER >= entry.n_bytes

    def _quotes_other_lanes(self, entry: Entry, sight: Sight) -> bool:
        answers = (i for i, label in enumerate(sight.labels) if label.startswith("assistant"))
        tail = sight.parts[max([entry.n_head, *(i + 1 for i in answers)]) :]
        quoted = self._quotes.quoted_in(b"\n".join(tail).decode("utf-8", "replace"))
        return sum(not entry.lane or self._entries[each].lane != entry.lane for each in quoted) >= 2

    def _same_conversation(self, entry: Entry, depth: int) -> Entry | None:
        """The newest request of the same lane, else one whose messages recur behind the first difference."""
        if entry.lane:
            in_lane = self._newest.get(_lane_name(entry))
            if in_lane is not None:
                return in_lane
        first = max(depth, entry.n_head)
        if len(entry.marks) - entry.n_head < 2:
            return None
        for digest in entry.digests[first:]:
            other = self._newest.get(("message", digest))
            if other is not None and not _other_lane(entry, other):
                return other
        return None

    def _changed_root(self, entry: Entry, sight: Sight) -> Entry | None:
        """The request whose root this one's is a changed version of: same family, else nearly the same lines."""
        kin = self._newest.get(_family_name(entry))
        if kin is not None:
            return kin
        lines = lines_of(sight.parts[: entry.n_head])
        for known, other in reversed(self._heads.values()):
            common = len(lines & known)
            if common >= MIN_LINES and common >= SIMILAR_HEAD * max(len(lines), len(known)):
                return other
        return None

    def _remember(self, entry: Entry) -> None:
        if len(self._entries) >= self._max_entries:
            self.forget(next(iter(self._entries)))
        self._entries[entry.request_id] = entry
        for mark in entry.marks:
            known = self._marks.get(mark)
            if known is None:
                known = self._marks[mark] = _Mark(entry)
            known.newest = entry
            known.holders += 1
        self._newest.update(dict.fromkeys(_names(entry), entry))

    def _remember_head(self, entry: Entry, sight: Sight) -> None:
        mark = entry.head_mark or 0
        known = self._heads.pop(mark, None)
        lines = known[0] if known else lines_of(sight.parts[: entry.n_head])
        self._heads[mark] = (lines, entry)
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)

    def _evaluated_before(self, entry: Entry, evidence: Evidence) -> Evaluated:
        ever = alive = 0
        for mark, end in zip(entry.marks, entry.ends, strict=True):
            known = self._marks.get(mark)
            if known is None or known.first_evaluated is None or known.first_evaluated >= evidence.started:
                break
            ever = end
            if known.last_evaluated is not None and known.last_evaluated >= (evidence.upstream_since or 0.0):
                alive = end
        return Evaluated(ever, alive)


def _other_lane(entry: Entry, other: Entry) -> bool:
    return bool(entry.lane and other.lane and entry.lane != other.lane)


def _lane_name(entry: Entry) -> Hashable:
    return ("lane", entry.model, entry.lane)


def _family_name(entry: Entry) -> Hashable:
    return ("family", entry.model, entry.family)


def _names(entry: Entry) -> list[Hashable]:
    """What an entry is found by: its whole prompt, and, if it is no side request, its lane, its family and each
    message long enough to be telling."""
    names: list[Hashable] = [("whole", entry.marks[-1])] if entry.marks else []
    if entry.side:
        return names
    names += [_lane_name(entry)] if entry.lane else []
    names += [_family_name(entry)] if entry.family else []
    starts = (0, *entry.ends)
    sized = zip(entry.digests, starts, entry.ends, strict=False)
    messages = islice(sized, entry.n_head, None)
    return names + [("message", digest) for digest, start, end in messages if end - start >= MIN_TELLING_BYTES]
