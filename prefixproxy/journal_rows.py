"""The journal as rows of the state file, so that its records and strips outlive the process; text never goes there.

A row's name is its record's number modulo `keep`, so a new record takes the place of the oldest: the file holds at most
`keep` of them, and so does what waits to be written while the disk is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixproxy.journal import Journal, record_from_json
from prefixproxy.microscope import Strip, Strips
from prefixproxy.types import RequestRecord

PREFIX = "journal/"


class JournalRows:
    """`keep`: how many records the journal has room for; 0 takes what an earlier process left out of the file."""

    prefix = PREFIX

    def __init__(self, journal: Journal, strips: Strips, keep: int) -> None:
        self.journal = journal
        self._strips = strips
        self._keep = keep
        self._written = 0
        self._mended: dict[str, Any] = {}
        """Rows of an earlier process that must go, or go elsewhere."""

    def changes(self) -> dict[str, Any]:
        """What came since the last call. Records are handed over as they are: whoever writes them makes JSON of them,
        in a thread."""
        rows, self._mended = self._mended, {}
        if self._keep:
            for entry in self.journal.since(self._written, self._keep).entries:
                rows[self._name(entry.number)] = self._row(entry.number, entry.record)
            self._written = self.journal.last
        return rows

    def load(self, rows: Mapping[str, Any]) -> None:
        """Rows that cannot be read, or are too many, are taken out of the file."""
        found = sorted(filter(None, (_read(name, row) for name, row in rows.items())), key=lambda each: each[0])
        kept = found[-self._keep :] if self._keep else []
        places: dict[str, str] = {}
        if kept:
            last = kept[-1][0]
            self.journal.recall([record for _, _, record, _ in kept], last)
            for number, (_, name, record, strip) in enumerate(kept, start=last - len(kept) + 1):
                places[self._name(number)] = name
                if strip is not None:
                    self._strips.recall(record.id, strip)
        if set(places.items()) != {(name, name) for name in rows}:
            self._mended = dict.fromkeys(rows)
            for number, (_, _, record, _) in enumerate(kept, start=self.journal.last - len(kept) + 1):
                self._mended[self._name(number)] = self._row(number, record)
        self._written = self.journal.last

    def _name(self, number: int) -> str:
        return f"{PREFIX}{number % self._keep}"

    def _row(self, number: int, record: RequestRecord) -> dict[str, Any]:
        return {"number": number, "record": record, "strip": self._strips.strip(record.id)}


def _read(name: str, row: Any) -> tuple[int, str, RequestRecord, Strip | None] | None:
    """The number, the row's own name, the record and the strip; None for a row of another version."""
    try:
        number, record, strip = int(row["number"]), record_from_json(row["record"]), row["strip"]
        return number, name, record, None if strip is None else _strip_of(strip)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _strip_of(values: Mapping[str, Any]) -> Strip:
    labels, ends = tuple(map(str, values["labels"])), tuple(map(int, values["ends"]))
    if len(labels) != len(ends):
        raise ValueError("a strip has as many ends as labels")
    return Strip(labels, ends, int(values["head_bytes"]), str(values["reference"]))
