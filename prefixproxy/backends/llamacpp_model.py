"""The architecture of the model that a llama-server runs, which none of its answers names: from the file, where that is
on this machine."""

from __future__ import annotations

from pathlib import Path

from prefixproxy.capacity.gguf import NotGguf, read_header


def architecture_of(model_path: str) -> str:
    """As its GGUF names it ("llama"); "" where the file cannot be read, most likely because the server runs elsewhere.
    Blocks on the disk."""
    path = Path(model_path)
    try:
        if not (path.is_absolute() and path.is_file()):
            return ""
        with path.open("rb") as file:
            return read_header(file, path.stat().st_size).arch
    except (OSError, ValueError, NotGguf):
        return ""
