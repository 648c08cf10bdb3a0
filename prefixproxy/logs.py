"""The log on a stream that may be slow: a terminal that is stopped, a pipe that nobody reads.

Lines are written by a thread of their own, so that no request ever waits for whoever reads the log. What it cannot
write waits in a bounded queue; what does not fit is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler, QueueListener

MAX_WAITING_LINES = 10_000
LAST_LINES_S = 2.0
"""How long the end of the process waits for the last lines to be written."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Lines = queue.Queue[logging.LogRecord | None]


class NeverWaiting(QueueHandler):
    """Hands each line on at once."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        self._lines = lines
        self._dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self._dropped:
                self._lines.put_nowait(self._notice(record.created))
                self._dropped = 0
            self._lines.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def _notice(self, created: float) -> logging.LogRecord:
        said = f"{self._dropped} lines of this log were dropped: it was read too slowly"
        values = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": said, "created": created}
        return logging.makeLogRecord(values)


class _ToDescriptor(logging.Handler):
    """Writes to a file descriptor: a thread that is stuck within a stream of Python's would hold its lock, and abort
    the interpreter at its end."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def createLock(self) -> None:
        """None: only the writing thread comes here, and logging's end would wait for the lock of one that is stuck."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        rest = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with suppress(OSError):  # whoever read it has gone, and there is nowhere else to say so
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


class _Writer(QueueListener):
    """Writes the lines in a thread, and ends in bounded time."""

    def __init__(self, lines: Lines, handler: logging.Handler) -> None:
        super().__init__(lines, handler)
        self._lines = lines

    def stop(self) -> None:
        """The last lines are written, or dropped if nobody reads them in time: the thread then ends with its write."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(queue.Full):
            self._lines.put(None, timeout=LAST_LINES_S)
        thread.join(LAST_LINES_S)
        if thread.is_alive():
            with suppress(queue.Empty):
                while True:
                    self._lines.get_nowait()
            self._lines.put_nowait(None)


@contextmanager
def logging_to(descriptor: int, level: int) -> Iterator[None]:
    """Everything logged at `level` and above goes to this file descriptor, one line per event."""
    handler = _ToDescriptor(descriptor)
    handler.setFormatter(logging.Formatter(FORMAT))
    lines: Lines = queue.Queue(MAX_WAITING_LINES)
    writer, root, entrance = _Writer(lines, handler), logging.getLogger(), NeverWaiting(lines)
    before = root.level
    root.addHandler(entrance)
    root.setLevel(level)
    writer.start()
    try:
        yield
    finally:
        root.removeHandler(entrance)
        root.setLevel(before)
        writer.stop()
