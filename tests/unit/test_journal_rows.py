"""The journal over a restart: what is kept, that it stays bounded, and what odd rows cost."""

from __future__ import annotations

import dataclasses
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import records

from prefixproxy.journal import Journal
from prefixproxy.journal_rows import JournalRows
from prefixproxy.microscope import Strip, Strips
from prefixproxy.state import StateFile
from prefixproxy.types import FirstDifference

STRIP = Strip(("system[0]", "user[1]"), (400, 420), 400, "r0")


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow: what a full disk looks like to a process (Python ignores the signal that goes with it)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Process:
    """One run of a proxy, as far as its journal goes."""

    def __init__(self, state: StateFile, keep: int = 5, *, on_disk: bool = True) -> None:
        self._state = state
        self.journal, self.strips = Journal(keep), Strips(keep)
        self.rows = JournalRows(self.journal, self.strips, keep if on_disk else 0)
        self.rows.load(state.rows("journal/"))

    def record(self, *numbers: int) -> None:
        for number in numbers:
            first = FirstDifference("user[1]", 3, 9)
            record = dataclasses.replace(records.RECORD, id=f"r{number}", first_difference=first)
            self.strips.remember(record.id, STRIP, ())
            self.journal.add(record)

    def write(self) -> None:
        assert self._state.update(self.rows.changes())

    @property
    def ids(self) -> list[str]:
        return [record.id for record in self.journal.newest(100)]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state.db")


def test_records_and_strips_survive_and_numbers_go_on(path: str) -> None:
    with StateFile(path) as state:
        first = Process(state)
        first.record(1, 2)
        first.write()
        first.record(3)
        first.write()
    with StateFile(path) as state:
        second = Process(state)
        assert second.journal.newest(9) == first.journal.newest(9)
        assert second.strips.strip("r3") == STRIP
        assert second.strips.text("r3") is None
        second.record(4)
        assert [(e.number, e.record.id) for e in second.journal.since(2).entries] == [(3, "r3"), (4, "r4")]
        assert second.rows.changes().keys() == {"journal/4"}, "what is in the file already is not written again"


def test_the_file_holds_no_more_than_the_journal(path: str) -> None:
    with StateFile(path) as state:
        one = Process(state, keep=5)
        for number in range(1, 14):
            one.record(number)
            one.write()
        assert len(state.rows("journal/")) == 5
        assert Process(state, keep=5).ids == ["r13", "r12", "r11", "r10", "r9"]


def test_what_waits_to_be_written_is_bounded(path: str) -> None:
    """As on a full disk: whoever writes keeps every row it was given, by name, until it is written."""
    with StateFile(path) as state:
        one, waiting = Process(state, keep=5), dict[str, object]()
        for number in range(1, 100):
            one.record(number)
            waiting |= one.rows.changes()
        assert len(waiting) == 5
        assert state.update(waiting)
        assert Process(state, keep=5).ids == ["r99", "r98", "r97", "r96", "r95"]


@pytest.mark.parametrize("keep", [2, 9])
def test_another_size_takes_over_what_fits(path: str, keep: int) -> None:
    with StateFile(path) as state:
        first = Process(state, keep=5)
        first.record(*range(1, 8))
        first.write()
        second = Process(state, keep=keep)
        kept = ["r7", "r6", "r5", "r4", "r3"][:keep]
        assert second.ids == kept
        second.write()
        second.record(8)
        second.write()
        assert len(state.rows("journal/")) == min(keep, len(kept) + 1)
        assert Process(state, keep=keep).ids == ["r8", *kept][:keep]


def test_switched_off_it_takes_its_rows_out_of_the_file(path: str) -> None:
    with StateFile(path) as state:
        first = Process(state)
        first.record(1)
        first.write()
        second = Process(state, on_disk=False)
        assert second.ids == []
        second.record(2)
        second.write()
        assert state.rows("journal/") == {}


def test_rows_that_cannot_be_read_go_and_leave_no_gap(path: str) -> None:
    with StateFile(path) as state:
        first = Process(state)
        first.record(1, 2, 3, 4)
        first.write()
        good = state.rows("journal/")["journal/4"]
        state.update(
            {"journal/2": {"number": 2}, "journal/3": {**good, "number": 3, "strip": {"labels": ["a"], "ends": []}}}
        )
        second = Process(state)
        assert second.ids == ["r4", "r1"]
        batch = second.journal.since(0)
        assert ([e.number for e in batch.entries], batch.missed) == ([3, 4], 2)
        second.write()
        assert Process(state).ids == ["r4", "r1"]
        assert len(state.rows("journal/")) == 2


def test_a_full_disk_is_told_once_and_what_is_missing_is_written_later(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with StateFile(path) as state, caplog.at_level(logging.WARNING):
        one = Process(state, keep=50)
        one.record(1)
        one.write()
        one.record(*range(2, 40))
        waiting = one.rows.changes()
        with full_disk():
            written = [state.update(waiting) for _ in range(3)]
        assert written == [False] * 3
        assert state.update(waiting)
        assert len(Process(state, keep=50).ids) == 39
    told = [record.message for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("state cannot be written")
    assert told[1] == "state can be written again, and is whole"
