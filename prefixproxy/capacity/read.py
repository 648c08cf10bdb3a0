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
        _require_first(path, header)
        parts = [path.with_name(name) for name in split_names(path.name)]
        if len(parts) == 1:
            return header
        return replace(header, weights_bytes=sum(_header(part).weights_bytes for part in parts))
    except OSError as failure:
        raise UsageError(f"cannot read the model {failure.filename or path}: {failure.strerror}") from None
    except NotGguf as failure:
        raise UsageError(f"{path}: {failure}") from None


def _require_first(path: Path, header: Header) -> None:
    """Raises NotGguf for a part of a model from which the others cannot be found."""
    number, n_parts = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1)
    if not isinstance(number, int) or not isinstance(n_parts, int) or n_parts < 2:
        return
    if number > 0:
        raise NotGguf(f"it is part {number + 1} of {n_parts}: give the first")
    if len(split_names(path.name)) != n_parts:
        raise NotGguf(f"it is part 1 of {n_parts}: named NAME-00001-of-{n_parts:05d}.gguf, the others are found")


def _header(path: Path) -> Header:
    with path.open("rb") as file:
        return read_header(file, path.stat().st_size)
