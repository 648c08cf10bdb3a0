"""What was seen to change: for each family, the first value of every span and whether another one followed.

Only digests are kept. A family is a head with its spans masked, so a value that differs here differed while the rest
of the head stayed equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """`first` values (8-byte digests) of the spans, and which of them `changed`."""

    first: tuple[bytes, ...]
    changed: tuple[bool, ...]


def value_digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


class Evidence:
    """Families by key, the least recently seen dropped beyond `max_families`."""

    def __init__(self, max_families: int) -> None:
        self._max = max_families
        self._families: OrderedDict[bytes, Family] = OrderedDict()
        self.fresh: set[bytes] = set()
        """Keys whose entry changed, or was dropped, since somebody last emptied this set."""

    def __len__(self) -> int:
        return len(self._families)

    def changed(self, key: bytes, values: Sequence[bytes]) -> tuple[bool, ...]:
        """Which spans are known to change, these values taken into account. Remembers nothing."""
        family = self._families.get(key)
        if family is None or len(family.first) != len(values):
            return (False,) * len(values)
        return tuple(c or a != b for c, a, b in zip(family.changed, family.first, values, strict=True))

    def learn(self, key: bytes, values: Sequence[bytes]) -> bool:
        """Remember these values. True if a span is now known to change that was not before."""
        changed = self.changed(key, values)
        before = self._families.get(key)
        if before is None or len(before.first) != len(values):
            self._families[key] = Family(tuple(values), changed)
            self.fresh.add(key)
            while len(self._families) > self._max:
                self.fresh.add(self._families.popitem(last=False)[0])
            return False
        self._families[key] = replace(before, changed=changed)
        self._families.move_to_end(key)
        if changed == before.changed:
            return False
        self.fresh.add(key)
        return True

    def export(self, key: bytes) -> dict[str, Any] | None:
        """One family as JSON, None if it is not known."""
        family = self._families.get(key)
        if family is None:
            return None
        return {"first": [value.hex() for value in family.first], "changed": list(family.changed)}

    def keys(self) -> tuple[bytes, ...]:
        return tuple(self._families)

    def load(self, key: bytes, entry: dict[str, Any]) -> None:
        """Take an exported family back. ValueError, KeyError or TypeError: it is none."""
        first = tuple(bytes.fromhex(value) for value in entry["first"])
        changed = tuple(bool(flag) for flag in entry["changed"])
        if len(first) != len(changed):
            raise ValueError("a family's values and flags differ in number")
        self._families[key] = Family(first, changed)
        while len(self._families) > self._max:
            self._families.popitem(last=False)
