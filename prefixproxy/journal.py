"""The journal: the newest records, numbered in order, for the API, the page and the event stream.

One ring serves everybody. A reader of the event stream holds no queue of its own, only the number of the last record
it saw; one that is too slow for the ring is told how many it missed. Waiting is the edge's business: it registers a
callback that wakes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import islice
from json import loads as lenient_loads
from typing import Any

import orjson

from prefixproxy.errors import UsageError
from prefixproxy.types import CacheSource, FirstDifference, Kind, MissReason, Outcome, Relocation, RequestRecord

RECORD_FIELDS = tuple(field.name for field in fields(RequestRecord))
"""The contract's field order, which is the order of the dataclass."""

_BOM = b"\xef\xbb\xbf"
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
"""Valid JSON has line ends only between its tokens, where any white space will do."""

LATER_FIELDS = {f.name for f in fields(RequestRecord) if f.default is not MISSING} - {"relocations", "first_difference"}
"""Fields that exports of earlier versions do not have."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One record and its number, counted from 1 without gaps."""

    number: int
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class Batch:
    """What came after a given number: `missed` records fell out of the ring before they could be read."""

    entries: tuple[Entry, ...]
    last: int
    missed: int


class Journal:
    """The newest `keep` records. Not thread-safe: one event loop owns it."""

    def __init__(self, keep: int) -> None:
        self._ring: deque[Entry] = deque(maxlen=keep)
        self._by_id: dict[str, Entry] = {}
        self._last = 0
        self._listeners: dict[int, Callable[[], None]] = {}
        self._next_listener = 0

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def last(self) -> int:
        """The number of the newest record ever added, 0 before the first."""
        return self._last

    def add(self, record: RequestRecord) -> Entry:
        """Append a record, forget the oldest if the ring is full, and wake every listener."""
        self._last += 1
        entry = Entry(self._last, record)
        if self._ring.maxlen:
            if len(self._ring) == self._ring.maxlen:
                self._forget(self._ring[0])
            self._ring.append(entry)
            self._by_id[record.id] = entry
        for wake in tuple(self._listeners.values()):
            wake()
        return entry

    def newest(self, limit: int) -> list[RequestRecord]:
        """At most `limit` records, newest first."""
        return [entry.record for entry in islice(reversed(self._ring), max(0, limit))]

    def get(self, request_id: str) -> RequestRecord | None:
        entry = self._by_id.get(request_id)
        return entry.record if entry else None

    def since(self, number: int, limit: int = 100) -> Batch:
        """At most `limit` records that follow `number`, oldest first. Ask again from `Batch.last` for the rest.

        A number from before a restart, larger than any given so far, starts at the beginning.
        """
        after = number if 0 <= number <= self._last else 0
        oldest = self._ring[0].number if self._ring else self._last + 1
        missed = max(0, oldest - 1 - after)
        start = max(0, after + 1 - oldest)
        entries = tuple(islice(self._ring, start, start + max(0, limit)))
        return Batch(entries, entries[-1].number if entries else after + missed, missed)

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called after each `add`; it must return at once. The answer takes it off again, however often
        it is called."""
        key = self._next_listener
        self._next_listener += 1
        self._listeners[key] = wake

        def stop() -> None:
            self._listeners.pop(key, None)

        return stop

    def recall(self, records: Sequence[RequestRecord], last: int) -> None:
        """The records of an earlier process, oldest first, the newest of them number `last`. Only before the first
        `add`: numbers go on from here, so that readers of the event stream need not begin anew."""
        if self._last:
            raise RuntimeError("the journal has begun already")
        kept = records[-self._ring.maxlen :] if self._ring.maxlen else ()
        self._last = last
        for number, record in enumerate(kept, start=last - len(kept) + 1):
            entry = Entry(number, record)
            self._ring.append(entry)
            self._by_id[record.id] = entry

    def jsonl(
        self, body: Callable[[str], bytes | None] = lambda request_id: None, newest: int | None = None
    ) -> Iterator[bytes]:
        """Every record as one JSON line, oldest first, or the `newest` so many. `body`: the request's own body by its
        id, if it is kept; it becomes the line's last member, in the client's own bytes."""
        first = 0 if newest is None else max(0, len(self._ring) - newest)
        for entry in tuple(islice(self._ring, first, None)):
            line, sent = orjson.dumps(record_json(entry.record)), body(entry.record.id)
            if sent is not None:
                line = line[:-1] + b',"body":' + sent.removeprefix(_BOM).translate(_ONE_LINE) + b"}"
            yield line + b"\n"

    def _forget(self, entry: Entry) -> None:
        if self._by_id.get(entry.record.id) is entry:
            del self._by_id[entry.record.id]


def record_json(record: RequestRecord) -> dict[str, Any]:
    """The record as plain JSON values, fields in the contract's order; unknown is null."""
    out: dict[str, Any] = {name: getattr(record, name) for name in RECORD_FIELDS}
    for name in ("kind", "outcome", "cache_source", "miss_reason"):
        out[name] = out[name].value
    out["relocations"] = [{"rule": r.rule, "segment": r.segment, "bytes": r.bytes} for r in record.relocations]
    first = record.first_difference
    out["first_difference"] = first and {
        "segment": first.segment,
        "offset": first.offset,
        "tokens_after": first.tokens_after,
    }
    return out


def record_from_json(values: Mapping[str, Any]) -> RequestRecord:
    """The inverse of `record_json`; keys it does not know are skipped. Raises KeyError, TypeError or ValueError."""
    known = {name: values[name] for name in RECORD_FIELDS if name in values or name not in LATER_FIELDS}
    first = known["first_difference"]
    known.update(
        kind=Kind(known["kind"]),
        outcome=Outcome(known["outcome"]),
        cache_source=CacheSource(known["cache_source"]),
        miss_reason=MissReason(known["miss_reason"]),
        relocations=tuple(Relocation(**relocation) for relocation in known["relocations"]),
        first_difference=FirstDifference(**first) if first else None,
    )
    return RequestRecord(**known)


def read_jsonl(lines: Iterable[bytes | str]) -> Iterator[tuple[int, RequestRecord]]:
    """The records of an exported journal with their line numbers, blank lines skipped. Raises UsageError with the
    line's number."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, record_from_json(_loaded(line))
        except KeyError as error:
            is_answer = str(line[:16]).find('"requests"') >= 0
            hint = "; export the journal with ?format=jsonl" if is_answer else ""
            raise UsageError(f"line {number}: not a journal record: {error.args[0]} is missing{hint}") from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"line {number}: not a journal record: {error}") from None


def _loaded(line: bytes | str) -> Any:
    """A body in it may say what orjson does not read, such as half a surrogate pair."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return lenient_loads(line)
