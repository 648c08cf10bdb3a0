"""The log never holds anybody up, and says what it had to leave out."""

from __future__ import annotations

import logging
import os

import pytest

from prefixproxy import logs


def read_all(descriptor: int) -> str:
    with os.fdopen(descriptor, encoding="utf-8") as pipe:
        return pipe.read()


def test_lines_come_whole_and_in_order() -> None:
    reading, writing = os.pipe()
    with logs.logging_to(writing, logging.INFO):
        for number in range(100):
            logging.getLogger("some.part").info("line %d", number)
        logging.getLogger("some.part").debug("not this one")
    os.close(writing)
    lines = read_all(reading).splitlines()
    assert [line.partition(" INFO ")[2] for line in lines] == [f"some.part: line {n}" for n in range(100)]


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("some.part", logging.INFO, __file__, 1, text, None, None)


def test_what_does_not_fit_is_counted_where_it_is_missing() -> None:
    lines = logs.Lines(2)
    entrance = logs.NeverWaiting(lines)
    for number in range(5):
        entrance.handle(record(f"line {number}"))
    kept = [lines.get_nowait(), lines.get_nowait()]
    entrance.handle(record("line 5"))
    said = [line.getMessage() for line in [*kept, lines.get_nowait(), lines.get_nowait()] if line]
    assert said == ["line 0", "line 1", "3 lines of this log were dropped: it was read too slowly", "line 5"]


def test_the_end_does_not_wait_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times what a pipe holds."""
    monkeypatch.setattr(logs, "LAST_LINES_S", 0.05)
    reading, writing = os.pipe()
    with logs.logging_to(writing, logging.INFO):
        for _ in range(1000):
            logging.getLogger("some.part").info("x" * 1000)
    os.close(reading)  # ends the write that was stuck
    os.close(writing)
