"""The state file: private, durable, and never a reason to stop."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prefixproxy.errors import UsageError
from prefixproxy.state import FORMAT, StateFile


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def read(state: StateFile, name: str, version: int = 1) -> Any:
    return state.rows(name, version).get(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a" / "b" / "state.db"


def test_values_survive_a_restart(path: Path) -> None:
    value = {"notes": [1, None, "ä"], "rate": 0.5}
    with StateFile(str(path)) as state:
        assert state.persistent
        assert read(state, "stabiliser") is None
        assert state.update({"stabiliser": value})
        assert state.update({"rates": 1})
        assert state.update({"rates": 2})
    with StateFile(str(path)) as state:
        assert read(state, "stabiliser") == value
        assert read(state, "rates") == 2


def test_a_value_of_another_version_is_not_returned(path: Path) -> None:
    with StateFile(str(path)) as state:
        state.update({"x": "old"}, version=1)
        assert read(state, "x", 2) is None
        state.update({"x": "new"}, version=2)
        assert (read(state, "x", 1), read(state, "x", 2)) == (None, "new")


def test_only_the_owner_can_read_it(path: Path) -> None:
    previous = os.umask(0)
    try:
        with StateFile(str(path)) as state:
            state.update({"x": 1})
            assert mode(path.parent) == 0o700
            assert [mode(file) for file in path.parent.iterdir()] == [0o600] * 3
    finally:
        os.umask(previous)


def test_an_open_file_is_made_private_and_an_existing_folder_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    path = folder / "state.db"
    path.touch(mode=0o644)
    StateFile(str(path)).close()
    assert (mode(path), mode(folder)) == (0o600, 0o755)


def test_memory_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with StateFile(":memory:") as state:
        assert not state.persistent
        state.update({"x": 1})
        assert read(state, "x") == 1
    assert list(tmp_path.iterdir()) == []
    with StateFile(":memory:") as state:
        assert read(state, "x") is None


@pytest.mark.parametrize("junk", [b"SQLite format 3\0" + b"\xff" * 4096, b"SQLite format 3\0"])
def test_a_damaged_file_is_moved_aside(path: Path, junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(junk)
    with StateFile(str(path)) as state:
        assert state.persistent
        assert read(state, "x") is None
        assert state.update({"x": 1})
    assert (path.parent / "state.db.damaged").read_bytes() == junk
    assert "is damaged" in caplog.text
    with StateFile(str(path)) as state:
        assert read(state, "x") == 1


def foreign_database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()


def namesake(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE state (colour TEXT)")
    connection.close()


def text(path: Path) -> None:
    path.write_text("notes of mine")


@pytest.mark.parametrize("write", [text, foreign_database, namesake])
def test_a_file_of_somebody_else_is_refused_and_left_as_it_is(path: Path, write: Callable[[Path], None]) -> None:
    path.parent.mkdir(parents=True)
    write(path)
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"state.path: .* is no state file of this proxy"):
        StateFile(str(path))
    assert (path.read_bytes(), mode(path), list(path.parent.iterdir())) == (before, 0o644, [path])


def test_a_device_or_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is no state file"):
        StateFile(str(tmp_path / "pipe"))


def test_an_unreadable_row_costs_no_other(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with StateFile(str(path)) as state:
        state.update({"n/1": "one", "n/2": "two", "n/3": "three"})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE state SET value = '{' WHERE name = 'n/2'")
    connection.close()
    with StateFile(str(path)) as state:
        assert state.rows("n/") == {"n/1": "one", "n/3": "three"}
    assert "'n/2' cannot be read" in caplog.text


def test_a_damaged_file_that_cannot_be_moved_means_memory(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)
    (path.parent / "state.db.damaged" / "in the way").mkdir(parents=True)
    with StateFile(str(path)) as state:
        assert not state.persistent
        assert state.update({"x": 1})
    assert "nothing will survive a restart" in caplog.text


def test_damage_inside_a_page_is_found_at_start(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with StateFile(str(path)) as state:
        for i in range(200):
            state.update({f"name-{i}": "value " * 200})
    data = bytearray(path.read_bytes())
    data[8192:40960] = b"\xaa" * (40960 - 8192)
    path.write_bytes(data)
    with StateFile(str(path)) as state:
        assert read(state, "name-1") is None
        assert state.update({"name-1": 1})
    assert "is damaged" in caplog.text


def test_a_file_from_a_later_version_is_left_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StateFile(str(path)).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.close()
    before = path.read_bytes()
    with StateFile(str(path)) as state:
        assert not state.persistent
        assert state.update({"x": 1})
        assert read(state, "x") == 1
    assert path.read_bytes() == before
    assert "written by a later version" in caplog.text


def test_a_path_that_cannot_be_a_file_means_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    for impossible in (tmp_path, tmp_path / "file" / "state.db"):
        with StateFile(str(impossible)) as state:
            assert not state.persistent
            assert state.update({"x": 1})
    assert caplog.text.count("nothing will survive a restart") == 2


def test_what_is_no_json_is_refused_and_broken_values_read_as_none(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StateFile(str(path)) as state:
        with pytest.raises(TypeError):
            state.update({"x": object()})
        state.update({"x": 1})
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE state SET value = '{'")
    connection.close()
    with StateFile(str(path)) as state:
        assert read(state, "x") is None
    assert "cannot be read" in caplog.text


def test_a_failing_disk_is_logged_and_survived(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = StateFile(str(path))
    state.close()
    with caplog.at_level(logging.WARNING):
        assert state.update({"x": 1}) is False
        assert read(state, "x") is None
    assert "cannot be written" in caplog.text


def test_threads_may_share_it(path: Path) -> None:
    with StateFile(str(path)) as state, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda i: state.update({f"n{i % 5}": i}), range(50)))
        assert all(read(state, f"n{i}") is not None for i in range(5))
