"""The state file: named JSON values that survive a restart, in one SQLite file only its owner can read.

Losing it costs warm-up time, never an answer: whatever is wrong with the file is logged once, and the proxy goes on
without it. Only a file that is not ours is an error: it is never touched. Calls block on the disk; the edge makes them
in a thread.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

import orjson

from prefixproxy.errors import UsageError

MEMORY = ":memory:"
FORMAT = 1
"""`PRAGMA user_version` of the file. A file with a larger one was written by a later version and is left alone."""
MAGIC = b"SQLite format 3\0"
COLUMNS = {"name", "version", "value"}
BUSY_TIMEOUT_S = 5.0
SIDE_FILES = ("", "-wal", "-shm")
_UPSERT = (
    "INSERT INTO state (name, version, value) VALUES (?, ?, ?) "
    "ON CONFLICT (name) DO UPDATE SET version = excluded.version, value = excluded.value"
)

log = logging.getLogger(__name__)


class StateFile:
    """Values by name. Each carries the version its owner gave it: a value of another version is not returned, so an
    owner may change its shape without reading the old one."""

    def __init__(self, path: str) -> None:
        """Raises UsageError where `path` is somebody else's file."""
        self._lock = Lock()
        self._connection = _memory() if path == MEMORY else _opened(Path(path))
        self.persistent = path != MEMORY and not _in_memory(self._connection)
        """Whether values outlive the process."""
        self._failing = False
        """The last write failed, and the log has it: not once for each request on a full disk."""

    def rows(self, prefix: str, version: int = 1) -> dict[str, Any]:
        """Every value whose name starts with `prefix`, in this version; what cannot be read is left out."""
        query = "SELECT name, value FROM state WHERE substr(name, 1, ?) = ? AND version = ?"
        try:
            with self._lock:
                found = self._connection.execute(query, (len(prefix), prefix, version)).fetchall()
        except sqlite3.Error as error:
            log.warning("state %r cannot be read and starts empty: %s", prefix, error)
            return {}
        values = {}
        for name, value in found:
            try:
                values[name] = orjson.loads(value)
            except orjson.JSONDecodeError as error:
                log.warning("state %r cannot be read and is left out: %s", name, error)
        return values

    def update(self, values: Mapping[str, Any], version: int = 1) -> bool:
        """Store many values in one transaction; None takes a name out. Durable when this returns True."""
        gone = [(name,) for name, value in values.items() if value is None]
        kept = [(name, version, orjson.dumps(value)) for name, value in values.items() if value is not None]
        try:
            with self._lock, self._connection:
                self._connection.executemany("DELETE FROM state WHERE name = ?", gone)
                self._connection.executemany(_UPSERT, kept)
        except sqlite3.Error as error:
            if not self._failing:
                log.warning("state cannot be written, which is tried again with every change: %s", error)
            self._failing = True
            return False
        if self._failing:
            log.warning("state can be written again, and is whole")
        self._failing = False
        return True

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _opened(path: Path) -> sqlite3.Connection:
    """The file's connection; a fresh file if it is damaged; memory if there can be no file."""
    _refuse_foreign(path)
    try:
        return _connected(path)
    except (OSError, sqlite3.OperationalError) as error:
        log.warning("%s cannot be used, nothing will survive a restart: %s", path, error)
    except sqlite3.DatabaseError as error:
        aside = path.with_name(path.name + ".damaged")
        log.warning("%s is damaged (%s): moved to %s, starting with an empty one", path, error, aside.name)
        try:
            _move_aside(path, aside)
            return _connected(path)
        except (OSError, sqlite3.Error) as again:
            log.warning("%s cannot be used, nothing will survive a restart: %s", path, again)
    return _memory()


def _refuse_foreign(path: Path) -> None:
    """Raises UsageError for what exists and was not written by this module. Nothing is changed to find out."""
    try:
        if not path.exists() or path.is_dir():
            return
        regular = path.is_file()
        start = _first_bytes(path) if regular else b""
    except OSError:
        return
    if not regular or (start and not (start == MAGIC and _has_our_table(path))):
        raise UsageError(f"state.path: {path} exists and is no state file of this proxy; it is left as it is")


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(MAGIC))


def _has_our_table(path: Path) -> bool:
    """Whether a database holds our table, or nothing, or is too damaged to tell."""
    address = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=BUSY_TIMEOUT_S)) as opened:
            tables = {str(name) for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            columns = {str(row[1]) for row in opened.execute("PRAGMA table_info(state)")}
    except sqlite3.Error:
        return True
    return not tables or columns == COLUMNS


def _connected(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives its side files the mode of the database, so the mode has to be right before it opens it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    path.chmod(0o600)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _memory() -> sqlite3.Connection:
    connection = sqlite3.connect(MEMORY, check_same_thread=False)
    _prepare(connection)
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    (format_,) = connection.execute("PRAGMA user_version").fetchone()
    if format_ > FORMAT:
        raise sqlite3.OperationalError(f"written by a later version (format {format_}, this one knows {FORMAT})")
    with closing(connection.execute("PRAGMA quick_check")) as check:
        (verdict,) = check.fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON", f"user_version = {FORMAT}"):
        connection.execute(f"PRAGMA {pragma}")
    with connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, version INTEGER NOT NULL, value BLOB NOT NULL)"
        )


def _move_aside(path: Path, aside: Path) -> None:
    for suffix in SIDE_FILES:
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.replace(aside.with_name(aside.name + suffix))


def _in_memory(connection: sqlite3.Connection) -> bool:
    (_, _, file) = connection.execute("PRAGMA database_list").fetchone()
    return not file
