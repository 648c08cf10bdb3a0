"""Which conversation a request goes on with, and which notes its history carries.

A client sends its history without our notes, so each conversation remembers which note went into which message. It is
found again by the hash chain of its messages up to an assistant's answer, then by the lane values its head tells. Two
lanes never share an entry: where it cannot be told whose turn it is, it is nobody's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Values = tuple[tuple[str, str], ...]

MAX_STEPS = 512
"""Requests of one conversation that are remembered; a client that goes back further starts anew."""

HEAD_END = -1
"""The place of a note in a prompt without user messages: behind the head."""


class Note(NamedTuple):
    """`text` of the head's span number `field`, in message number `at` behind the head (or HEAD_END)."""

    at: int
    field: int
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a conversation: its first `n_messages` messages behind the head hash to `key`.

    `newest` is its newest user message, `notes` how many of the conversation's notes it carried, `large` the texts that
    stood in the newest message alone, by field. `prefill`: an assistant message followed, to be continued. `answer`:
    the digest of what was answered, where it is known. `ids`: a digest of the tool-call ids in these messages, which
    `key` leaves out. `kept`: the spans that were sent in their place, and the digests of their values.
    """

    key: bytes
    newest: int
    notes: int
    large: tuple[tuple[int, str], ...] = ()
    prefill: bool = False
    answer: bytes = b""
    ids: bytes = b""
    kept: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Lane:
    """What tells conversations of one family apart: the client's own name for it, ids in the head, and the `fields`
    (digests of all spans that do not change by the turn) as far as they differ. `client`: what the client calls it for
    somebody else, which several conversations may share and one may change."""

    hint: str = ""
    strict: Values = ()
    weak: Values = ()
    fields: tuple[tuple[int, bytes], ...] = ()
    client: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A path of requests, each going on from the one before."""

    id: bytes
    label: str
    lane: Lane
    steps: tuple[Step, ...] = ()
    notes: tuple[Note, ...] = ()
    serial: int = 0
    """Counts up with each request that is remembered: the higher, the newer."""

    @property
    def n_bytes(self) -> int:
        """Roughly what it takes of memory."""
        large = sum(len(text) for step in self.steps for _, text in step.large)
        kept = 120 * sum(len(step.kept) for step in self.steps)
        return 300 + 160 * len(self.steps) + sum(100 + len(n.text) for n in self.notes) + large + kept


@dataclass(frozen=True, slots=True)
class Place:
    """A step of a conversation that a request goes on from."""

    conversation: Conversation
    index: int

    @property
    def step(self) -> Step:
        return self.conversation.steps[self.index]

    @property
    def notes(self) -> tuple[Note, ...]:
        return self.conversation.notes[: self.step.notes]

    @property
    def is_last(self) -> bool:
        return self.index == len(self.conversation.steps) - 1


@dataclass(frozen=True, slots=True)
class Change:
    """What remembering a request did, so that it can be undone."""

    after: Conversation
    before: Conversation | None = None


@dataclass(slots=True)
class Conversations:
    """All remembered conversations, the least recently seen dropped beyond either bound."""

    max_entries: int
    max_bytes: int
    n_bytes: int = 0
    serial: int = 0
    fresh: set[bytes] = field(default_factory=set)
    """Ids whose entry changed, or was dropped, since somebody last emptied this set."""
    _all: OrderedDict[bytes, Conversation] = field(default_factory=OrderedDict)
    _by_key: dict[bytes, set[bytes]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, conversation: Conversation) -> bool:
        return self._all.get(conversation.id) is conversation

    def values(self) -> tuple[Conversation, ...]:
        return tuple(self._all.values())

    def get(self, ident: bytes) -> Conversation | None:
        return self._all.get(ident)

    def find(
        self,
        keys: Iterable[tuple[bytes, bool]],
        lane: Lane,
        answers: Mapping[bytes, bytes] | None = None,
        ids: Mapping[bytes, bytes] | None = None,
        values: Sequence[bytes] = (),
    ) -> Place | None:
        """Where a request goes on. `keys` are the hashes of its history before each answer, the longest first, each
        with whether that answer is only begun (a prefill that the request wants continued). `answers`: the digest of
        the answer behind each key. Whoever was given just that answer is meant before anybody else, and of those
        whoever has the same tool-call `ids`: as clients may give them anew each time, others are not shut out. `values`
        are the digests of all spans: whoever sent just those in their place is likelier meant."""
        for key, begun in keys:
            places = [
                Place(conversation, index)
                for conversation in self._at(key)
                for index, step in enumerate(conversation.steps)
                if step.key == key and not (begun and step.prefill)
            ]
            heard = [place for place in places if place.step.answer == (answers or {}).get(key)]
            meant = heard or places
            same_ids = [place for place in meant if place.step.ids == (ids or {}).get(key, b"")]
            for candidates in (same_ids, meant):
                place = _own(candidates, lane, values) if candidates else None
                if place is not None:
                    return place
        return None

    def answered(self, ident: bytes, key: bytes, answer: bytes) -> None:
        """A request of this conversation, whose messages hash to `key`, was given this answer."""
        conversation = self._all.get(ident)
        if conversation is None:
            return
        steps = tuple(replace(step, answer=answer) if step.key == key else step for step in conversation.steps)
        self._all[ident] = replace(conversation, steps=steps)
        self.fresh.add(ident)

    def put(self, conversation: Conversation) -> Change:
        """Remember it as the newest, in place of the entry with the same id."""
        self.serial += 1
        conversation = replace(conversation, serial=self.serial)
        before = self._all.pop(conversation.id, None)
        if before is not None:
            self._unlink(before)
        self._all[conversation.id] = conversation
        self._link(conversation)
        self._shrink()
        return Change(conversation, before)

    def undo(self, change: Change) -> None:
        """As if the request had never been: nothing, if another one went on from it."""
        if change.after not in self:
            return
        del self._all[change.after.id]
        self._unlink(change.after)
        if change.before is not None:
            self._all[change.before.id] = change.before
            self._link(change.before)

    def load(self, conversation: Conversation) -> None:
        """Take an entry back as it was exported; the oldest first."""
        if conversation.id not in self._all:
            self.serial = max(self.serial, conversation.serial)
            self._all[conversation.id] = conversation
            self._link(conversation)
            self._shrink()

    def _shrink(self) -> None:
        while len(self._all) > self.max_entries or self.n_bytes > self.max_bytes:
            _, dropped = self._all.popitem(last=False)
            self._unlink(dropped)

    def _at(self, key: bytes) -> list[Conversation]:
        return [self._all[ident] for ident in sorted(self._by_key.get(key, ()))]

    def _link(self, conversation: Conversation) -> None:
        self.n_bytes += conversation.n_bytes
        self.fresh.add(conversation.id)
        for step in conversation.steps:
            self._by_key.setdefault(step.key, set()).add(conversation.id)

    def _unlink(self, conversation: Conversation) -> None:
        self.n_bytes -= conversation.n_bytes
        self.fresh.add(conversation.id)
        for step in conversation.steps:
            idents = self._by_key.get(step.key)
            if idents is not None:
                idents.discard(conversation.id)
                if not idents:
                    del self._by_key[step.key]


def extended(conversation: Conversation, index: int, ident: bytes, step: Step, more: Sequence[Note]) -> Conversation:
    """The conversation up to step number `index`, and `step` behind it. Large texts of older steps are forgotten."""
    kept = conversation.steps[: index + 1][-MAX_STEPS:]
    notes = (*conversation.notes[: kept[-1].notes], *more)
    old = tuple(replace(s, large=()) if s.large else s for s in kept)
    return replace(conversation, id=ident, steps=(*old, replace(step, notes=len(notes))), notes=notes)


def told(notes: Iterable[Note]) -> Mapping[int, str]:
    """The value of each field that the history tells last."""
    return {note.field: note.text for note in notes}


def kept_now(step: Step, values: Sequence[bytes]) -> frozenset[int]:
    """The spans that this request was sent with in their place, and that have the same value still."""
    return frozenset(number for number, value in step.kept if number < len(values) and values[number] == value)


def _own(places: Sequence[Place], lane: Lane, values: Sequence[bytes]) -> Place | None:
    """The place that is this lane's: no value that tells lanes apart may differ."""
    if lane.hint:
        places = [p for p in places if p.conversation.lane.hint in ("", lane.hint)]
    if lane.client:
        places = [p for p in places if p.conversation.lane.client == lane.client] or places
    same = [p for p in places if p.conversation.lane.strict == lane.strict]
    exact = [p for p in same if p.conversation.lane.weak == lane.weak]
    if not exact:
        # a run id that changes by the turn: only where something stronger agrees, and nobody else could be meant
        alone = len({p.conversation.lane.weak for p in places}) == 1
        exact = same if lane.strict and alone else []
    ours = [p for p in exact if _agrees(p, exact, lane)]
    return max(ours, key=lambda p: _rank(p, lane, values), default=None)


def _agrees(place: Place, rivals: Sequence[Place], lane: Lane) -> bool:
    """Whether no field in which the candidates differ among each other differs from this request's."""
    mine, theirs = dict(lane.fields), dict(place.conversation.lane.fields)
    for number, value in mine.items():
        values = {dict(p.conversation.lane.fields).get(number) for p in rivals}
        if len(values) > 1 and theirs.get(number) != value:
            return False
    return True


def _rank(place: Place, lane: Lane, values: Sequence[bytes]) -> tuple[bool, int, int, bool, int, bytes]:
    """Best: named so by the client, most fields equal, most values still in place, not gone on from yet, newest."""
    other = place.conversation.lane
    equal = len(set(other.fields) & set(lane.fields))
    return (
        bool(lane.hint) and other.hint == lane.hint,
        equal,
        len(kept_now(place.step, values)),
        place.is_last,
        place.conversation.serial,
        place.conversation.id,
    )
