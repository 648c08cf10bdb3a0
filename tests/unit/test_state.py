"""The state file: private, durable, and never a reason to stop."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prefixproxy.state import FORMAT, StateFile


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a" / "b" / "state.db"


def test_values_survive_a_restart(path: Path) -> None:
    value = {"notes": [1, None, "ä"], "rate": 0.5}
    with StateFile(str(path)) as state:
        assert state.persistent
        assert state.load("stabiliser") is None
        assert state.store("stabiliser", value)
        assert state.store("rates", 1)
        assert state.store("rates", 2)
    with StateFile(str(path)) as state:
        assert state.load("stabiliser") == value
        assert state.load("rates") == 2


def test_a_value_of_another_version_is_not_returned(path: Path) -> None:
    with StateFile(str(path)) as state:
        state.store("x", "old", version=1)
        assert state.load("x", version=2) is None
        state.store("x", "new", version=2)
        assert (state.load("x", version=1), state.load("x", version=2)) == (None, "new")


def test_only_the_owner_can_read_it(path: Path) -> None:
    previous = os.umask(0)
    try:
        with StateFile(str(path)) as state:
            state.store("x", 1)
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
        state.store("x", 1)
        assert state.load("x") == 1
    assert list(tmp_path.iterdir()) == []
    with StateFile(":memory:") as state:
        assert state.load("x") is None


@pytest.mark.parametrize("junk", [b"no database at all, " * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_file_is_moved_aside(path: Path, junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(junk)
    with StateFile(str(path)) as state:
        assert state.persistent
        assert state.load("x") is None
        assert state.store("x", 1)
    assert (path.parent / "state.db.damaged").read_bytes() == junk
    assert "is damaged" in caplog.text
    with StateFile(str(path)) as state:
        assert state.load("x") == 1


def test_a_damaged_file_that_cannot_be_moved_means_memory(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database at all, " * 100)
    (path.parent / "state.db.damaged" / "in the way").mkdir(parents=True)
    with StateFile(str(path)) as state:
        assert not state.persistent
        assert state.store("x", 1)
    assert "nothing will survive a restart" in caplog.text


def test_damage_inside_a_page_is_found_at_start(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with StateFile(str(path)) as state:
        for i in range(200):
            state.store(f"name-{i}", "value " * 200)
    data = bytearray(path.read_bytes())
    data[8192:40960] = b"\xaa" * (40960 - 8192)
    path.write_bytes(data)
    with StateFile(str(path)) as state:
        assert state.load("name-1") is None
        assert state.store("name-1", 1)
    assert "is damaged" in caplog.text


def test_a_file_from_a_later_version_is_left_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StateFile(str(path)).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    connection.close()
    before = path.read_bytes()
    with StateFile(str(path)) as state:
        assert not state.persistent
        assert state.store("x", 1)
        assert state.load("x") == 1
    assert path.read_bytes() == before
    assert "written by a later version" in caplog.text


def test_a_path_that_cannot_be_a_file_means_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    for impossible in (tmp_path, tmp_path / "file" / "state.db"):
        with StateFile(str(impossible)) as state:
            assert not state.persistent
            assert state.store("x", 1)
    assert caplog.text.count("nothing will survive a restart") == 2


def test_what_is_no_json_is_refused_and_broken_values_read_as_none(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with StateFile(str(path)) as state:
        with pytest.raises(TypeError):
            state.store("x", object())
        state.store("x", 1)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE state SET value = '{'")
    connection.close()
    with StateFile(str(path)) as state:
        assert state.load("x") is None
    assert "cannot be read and starts empty" in caplog.text


def test_a_failing_disk_is_logged_and_survived(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = StateFile(str(path))
    state.close()
    with caplog.at_level(logging.WARNING):
        assert state.store("x", 1) is False
        assert state.load("x") is None
    assert "cannot be written" in caplog.text


def test_threads_may_share_it(path: Path) -> None:
    with StateFile(str(path)) as state, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda i: state.store(f"n{i % 5}", i), range(50)))
        assert all(state.load(f"n{i}") is not None for i in range(5))
