"""What a request is to the prompts before it, and, once it was answered, why it was not cheaper.

Evidence only: digests of the parts of earlier prompts, which of them a server has evaluated, and what the server said
it reused. Pure: time is an argument, no text is kept.

Kinds, first match wins (`History._kind`):
 1. side          the caller found it to be a title, a summary, an autocomplete
 2. continuation  a known prompt leads it whole, root and at least one message, and its conversation had not gone on
                  from there with messages that are others here; or the same prompt again
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
from itertools import pairwise

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


class History:
    """A bounded memory of recent requests; the oldest is forgotten first.

    Whoever holds a mark holds all marks before it. So of any prompt the known marks come first, and among them those
    evaluated: what is asked of the others is answered from the end, in as many steps as the prompt has new parts.
    """

    def __init__(self, max_entries: int = 1000) -> None:
        self._max_entries = max(1, max_entries)
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._marks: dict[int, Entry] = {}
        """The newest entry with each prefix."""
        self._first: dict[int, float] = {}
        """When each prefix was first evaluated."""
        self._last: dict[int, float] = {}
        self._wholes: dict[int, Entry] = {}
        """The newest entry whose whole prompt it is; below, the newest by message, by lane and by family."""
        self._messages: dict[int, Entry] = {}
        self._lanes: dict[tuple[str, str], Entry] = {}
        self._families: dict[tuple[str, str], Entry] = {}
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
        if entry is None:
            return
        self._last.update(dict.fromkeys(entry.marks, now))
        for mark in reversed(entry.marks):
            if mark in self._first:
                break
            self._first[mark] = now

    def answered(self, request_id: str, answer: str) -> None:
        """The text of an answer, to recognise it when a reducer quotes it. Only hashes of it are kept."""
        if request_id in self._entries:
            self._quotes.remember(request_id, answer)

    def forget(self, request_id: str) -> None:
        """A request that was never sent is in nobody's history."""
        oldest = next(iter(self._entries), None) == request_id
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        gone = []
        for mark in reversed(entry.marks):
            if self._marks[mark] is not entry:
                break
            gone.append(mark)
        for mark in gone if oldest else self._without_holder(set(gone)):
            del self._marks[mark]
            self._first.pop(mark, None)
            self._last.pop(mark, None)
        self._forget_names(entry)
        self._quotes.forget(request_id)

    def _without_holder(self, marks: set[int]) -> set[int]:
        """Those of these marks that no entry has any more; the others are left to their newest one."""
        held = set()
        for entry in self._entries.values():
            for mark in marks.intersection(entry.marks):
                self._marks[mark] = entry
                held.add(mark)
        return marks - held

    def _forget_names(self, entry: Entry) -> None:
        if entry.marks and self._wholes.get(entry.marks[-1]) is entry:
            del self._wholes[entry.marks[-1]]
        for digest in entry.digests[entry.n_head :]:
            if self._messages.get(digest) is entry:
                del self._messages[digest]
        for names, name in ((self._lanes, _lane_of(entry)), (self._families, _family_of(entry))):
            if names.get(name) is entry:
                del names[name]

    def _kind(self, entry: Entry, sight: Sight) -> tuple[Kind, Entry | None]:
        if entry.side:
            return Kind.SIDE, None
        parent = self._parent(entry)
        if parent is not None and len(parent.marks) == len(entry.marks):
            return Kind.CONTINUATION, parent
        depth, nearest = self._longest_known(entry)
        if parent is not None:
            edited = self._edited_since(parent, entry, sight, depth)
            return _rewritten(entry, edited) if edited else (Kind.CONTINUATION, parent)
        root_known = depth >= entry.n_head if entry.n_head else self._shares_enough(entry, depth)
        if self._quotes_other_lanes(entry, sight):
            return Kind.REDUCER, nearest if root_known else None
        earlier = self._same_conversation(entry, depth)
        if earlier is not None and earlier.head_mark == entry.head_mark:
            return _rewritten(entry, earlier)
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
            parent = self._wholes.get(entry.marks[n - 1])
            if parent is None or parent.side or _other_lane(entry, parent):
                continue
            answered = n == n_parts or entry.labels[n].startswith("assistant")
            if answered or self._marks[entry.marks[n - 1]] is parent:
                return parent
        return None

    def _edited_since(self, parent: Entry, entry: Entry, sight: Sight, depth: int) -> Entry | None:
        """The later turn of its parent's conversation that this one edits. The first prompt of a conversation leads
        all that follow, whatever became of the messages behind it. Another newest message edits nothing: it is a
        question asked anew, or another lane."""
        later = self._same_conversation(entry, depth)
        alike = bool(entry.lane) or (later is not None and _goes_on_alike(entry, later))
        if not alike and depth > len(parent.marks):
            later, alike = self._quoted_later(entry, sight, depth), True
        if later is None or later is parent or not alike:
            return None
        shared = entry.common_parts(later)
        ours = len(parent.marks) <= shared < min(len(entry.marks) - 1, len(later.marks))
        return later if ours else None

    def _quoted_later(self, entry: Entry, sight: Sight, depth: int) -> Entry | None:
        """The newest request whose answer stands as one behind what is known of this prompt."""
        answers = [sight.parts[n] for n in range(depth, len(sight.parts)) if sight.labels[n].startswith("assistant")]
        quoted = self._quotes.quoted_in(b"\n".join(answers).decode("utf-8", "replace"))
        asked = [self._entries[each] for each in quoted]
        return max(
            (each for each in asked if each.head_mark == entry.head_mark and not _other_lane(entry, each)),
            key=lambda each: len(each.marks),
            default=None,
        )

    def _longest_known(self, entry: Entry) -> tuple[int, Entry | None]:
        """How many leading parts were seen before, and in which request last."""
        for n in range(len(entry.marks), 0, -1):
            known = self._marks.get(entry.marks[n - 1])
            if known is not None:
                return n, known
        return 0, None

    def _shares_enough(self, entry: Entry, depth: int) -> bool:
        return depth > 0 and entry.bytes_before(depth) * SHARED_QUARTER >= entry.n_bytes

    def _quotes_other_lanes(self, entry: Entry, sight: Sight) -> bool:
        start = len(sight.labels)
        while start > entry.n_head and not sight.labels[start - 1].startswith("assistant"):
            start -= 1
        tail = sight.parts[start:]
        quoted = self._quotes.quoted_in(b"\n".join(tail).decode("utf-8", "replace"))
        return sum(not entry.lane or self._entries[each].lane != entry.lane for each in quoted) >= 2

    def _same_conversation(self, entry: Entry, depth: int) -> Entry | None:
        """The newest request of the same lane, else one whose messages recur behind the first difference."""
        if entry.lane:
            in_lane = self._lanes.get(_lane_of(entry))
            if in_lane is not None:
                return in_lane
        first = max(depth, entry.n_head)
        if len(entry.marks) - entry.n_head < 2:
            return None
        for digest in entry.digests[first:]:
            other = self._messages.get(digest)
            if other is not None and not _other_lane(entry, other):
                return other
        return None

    def _changed_root(self, entry: Entry, sight: Sight) -> Entry | None:
        """The request whose root this one's is a changed version of: same family, else nearly the same lines."""
        kin = self._families.get(_family_of(entry))
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
        self._marks.update(dict.fromkeys(entry.marks, entry))
        if entry.marks:
            self._wholes[entry.marks[-1]] = entry
        if entry.side:
            return
        if entry.lane:
            self._lanes[_lane_of(entry)] = entry
        if entry.family:
            self._families[_family_of(entry)] = entry
        self._messages.update(dict.fromkeys(_telling_messages(entry), entry))

    def _remember_head(self, entry: Entry, sight: Sight) -> None:
        mark = entry.head_mark or 0
        known = self._heads.pop(mark, None)
        lines = known[0] if known else lines_of(sight.parts[: entry.n_head])
        self._heads[mark] = (lines, entry)
        if len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)

    def _evaluated_before(self, entry: Entry, evidence: Evidence) -> Evaluated:
        n, since = len(entry.marks), evidence.upstream_since
        while n and self._first.get(entry.marks[n - 1], evidence.started) >= evidence.started:
            n -= 1
        ever = entry.bytes_before(n)
        while since is not None and n and self._last[entry.marks[n - 1]] < since:
            n -= 1
        return Evaluated(ever, entry.bytes_before(n))


def _other_lane(entry: Entry, other: Entry) -> bool:
    return bool(entry.lane and other.lane and entry.lane != other.lane)


def _rewritten(entry: Entry, earlier: Entry) -> tuple[Kind, Entry]:
    shorter = len(entry.marks) < len(earlier.marks) and entry.n_bytes < earlier.n_bytes
    return (Kind.COMPACTION if shorter else Kind.REWRITE), earlier


def _goes_on_alike(entry: Entry, other: Entry) -> bool:
    """Whether an answer and its neighbour stand side by side behind the first difference in both. One message alone,
    a file that was read, may be in two lanes."""
    shared = entry.common_parts(other)
    theirs = set(pairwise(other.digests[shared:]))
    return any(
        pair in theirs and any(label.startswith("assistant") for label in entry.labels[at : at + 2])
        for at, pair in enumerate(pairwise(entry.digests[shared:]), start=shared)
    )


def _lane_of(entry: Entry) -> tuple[str, str]:
    return entry.model, entry.lane


def _family_of(entry: Entry) -> tuple[str, str]:
    return entry.model, entry.family


def _telling_messages(entry: Entry) -> list[int]:
    """The digests of messages long enough to say something."""
    ends, n_head = entry.ends, entry.n_head
    starts = ends[n_head - 1 :] if n_head else (0, *ends)
    sized = zip(entry.digests[n_head:], starts, ends[n_head:], strict=False)
    return [digest for digest, start, end in sized if end - start >= MIN_TELLING_BYTES]
