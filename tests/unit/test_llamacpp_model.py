"""The architecture is read from the model's file, where there is one here."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from prefixproxy.backends.llamacpp_model import architecture_of


def gguf(architecture: bytes) -> bytes:
    """A header with nothing but the architecture, as ggml lays it out."""
    key = b"general.architecture"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(architecture)) + architecture
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry


def test_a_file_that_is_here_names_its_architecture(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(b"kimi-linear"))
    assert architecture_of(str(path)) == "kimi-linear"


@pytest.mark.parametrize("name", ["", "model.gguf", "/no/such/model.gguf", "/tmp", "/nul\0byte"])
def test_what_is_not_here_names_none(name: str) -> None:
    assert architecture_of(name) == ""


def test_what_is_no_model_names_none_and_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"text")
    os.mkfifo(tmp_path / "pipe")
    assert [architecture_of(str(tmp_path / name)) for name in ("text", "pipe")] == ["", ""]
