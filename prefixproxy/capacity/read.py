"""Opens a GGUF and reads its header; a model in several files is read from its first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prefixproxy.capacity.gguf import Header, NotGguf, read_header, split_names
from prefixproxy.errors import UsageError


def header_of(path: Path) -> Header:
    """Raises UsageError in one line for what cannot be read or is no GGUF. `weights_bytes` is that of all parts."""
    try:
        header = _header(path)
        parts = [path.with_name(name) for name in split_names(path.name)]
        if len(parts) == 1:
            return header
        return replace(header, weights_bytes=sum(_header(part).weights_bytes for part in parts))
    except OSError as failure:
        raise UsageError(f"cannot read the model {failure.filename or path}: {failure.strerror}") from None
    except NotGguf as failure:
        raise UsageError(f"{path}: {failure}") from None


def _header(path: Path) -> Header:
    with path.open("rb") as file:
        return read_header(file, path.stat().st_size)
