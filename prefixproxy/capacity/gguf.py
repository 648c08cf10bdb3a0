"""The header of a GGUF file: its metadata and where its weights begin.

Read here rather than with the `gguf` package: that brings numpy and reads every token of the vocabulary into memory,
for the dozen numbers needed. Layout as ggml documents it (its gguf.md). Long arrays (the vocabulary) are skipped.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY = 1 << 27
KEPT_ITEMS = 4096
"""Arrays with more are skipped: per-layer numbers have fewer, vocabularies more."""
MAX_DIMENSIONS = 8
BLOCKS = {
    **{0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66)},
    **{17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136)},
    **{24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54)},
    **{35: (256, 66), 39: (32, 17)},
}
"""Values in a block of each ggml_type, and its bytes (ggml-common.h)."""
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class NotGguf(ValueError):
    """The file is no GGUF, was cut off, or says something that cannot be; the message is one line."""


@dataclass(frozen=True, slots=True)
class Header:
    """`metadata` without the long arrays; `weights_bytes`: all that follows the header, the tensors of this file."""

    metadata: Mapping[str, Any]
    n_tensors: int
    weights_bytes: int

    @property
    def arch(self) -> str:
        return str(self.metadata.get("general.architecture") or "")

    def whole(self, key: str) -> int | None:
        """A number of the architecture's own, None without it or where it is none."""
        found = self.own(key)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def own(self, key: str) -> Any:
        """A value of the architecture's own, such as "block_count"; None without it."""
        return self.metadata.get(f"{self.arch}.{key}")


def read_header(file: BinaryIO, file_bytes: int) -> Header:
    """Raises NotGguf for anything else, OSError as the file does."""
    reader = _Reader(file)
    if reader.take(4) != MAGIC:
        raise NotGguf("it is no GGUF model")
    version = reader.number("I")
    if version not in VERSIONS:
        raise NotGguf(f"GGUF version {version} is not known here")
    n_tensors, n_entries = reader.number("Q"), reader.number("Q")
    if n_entries > MAX_ENTRIES or n_tensors > MAX_TENSORS:
        raise NotGguf(f"{n_entries} metadata entries and {n_tensors} tensors cannot be")
    metadata = {}
    for _ in range(n_entries):
        key = reader.string()
        value = reader.value(reader.number("I"))
        if value is not None:
            metadata[key] = value
    tensors_end = 0
    for _ in range(n_tensors):
        tensors_end = max(tensors_end, reader.tensor_end())
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise NotGguf(f"an alignment of {alignment} cannot be")
    data_from = -(-reader.offset // alignment) * alignment
    if tensors_end and file_bytes < data_from + tensors_end:
        missing = data_from + tensors_end - file_bytes
        raise NotGguf(f"it is cut off: {missing:,} bytes of its tensors are missing (a download that did not finish?)")
    return Header(metadata, n_tensors, max(0, file_bytes - data_from))


def split_names(name: str) -> list[str]:
    """The names of all parts of a model whose first part this is; the name alone if it is not split."""
    found = _SPLIT.search(name)
    if found is None:
        return [name]
    n_parts = int(found[2])
    return [f"{name[: found.start()]}-{part:05d}-of-{n_parts:05d}.gguf" for part in range(1, n_parts + 1)]


class _Reader:
    """Reads the little-endian values of a header one by one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset = 0

    def take(self, n: int) -> bytes:
        if not 0 <= n <= MAX_STRING_BYTES:
            raise NotGguf(f"a value of {n} bytes cannot be")
        found = self._file.read(n)
        if len(found) != n:
            raise NotGguf("it ends in the middle of its header")
        self.offset += n
        return found

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def tensor_end(self) -> int:
        """Where one tensor's data ends, in bytes from where all data begins; where it begins, if its type is not
        known."""
        self.string()
        n_dimensions = self.number("I")
        if n_dimensions > MAX_DIMENSIONS:
            raise NotGguf(f"a tensor of {n_dimensions} dimensions cannot be")
        values = math.prod(self.number("Q") for _ in range(n_dimensions))
        kind, offset = self.number("I"), self.number("Q")
        block, size = BLOCKS.get(kind, (1, 0))
        return int(offset + values // block * size)

    def value(self, kind: int) -> Any:
        """A value, None for an array that is skipped."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        raise NotGguf(f"a value of type {kind} is not known here")

    def _array(self, kind: int, n: int) -> tuple[Any, ...] | None:
        if n > MAX_ARRAY:
            raise NotGguf(f"an array of {n} values cannot be")
        if n <= KEPT_ITEMS:
            return tuple(self.value(kind) for _ in range(n))
        if kind in _NUMBERS:
            self._skip(n * struct.calcsize("<" + _NUMBERS[kind]))
        elif kind == _STRING:
            for _ in range(n):
                self._skip(self.number("Q"))
        else:
            raise NotGguf(f"an array of {n} arrays cannot be")
        return None

    def _skip(self, n: int) -> None:
        while n > 0:
            step = min(n, MAX_STRING_BYTES)
            self.take(step)
            n -= step
