"""How many slots of which context fit into a memory budget, and whether an engine's log agrees with the computation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixproxy.capacity.shapes import MIB, PAD_TOKENS, Shape
from prefixproxy.facts.log import LogFacts

SLOTS = (1, 2, 4, 8, 16)
SHORTEST, LONGEST = 2048, 1 << 20
ROUNDED_MIB = 0.0051
"""How far a size that is logged with two decimals may be from the true one."""


class KvSize(Protocol):
    """Bytes of the KV cache of `n_slots` slots with `n_ctx_slot` tokens each."""

    def __call__(self, n_slots: int, n_ctx_slot: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Model:
    """What is to fit. `n_ctx_train`: a slot gets no more than that. `state_bytes` of each slot beside its KV cache."""

    weights_bytes: int
    kv: KvSize
    n_ctx_train: int | None = None
    state_bytes: int = 0

    def needs(self, n_slots: int, n_ctx_slot: int) -> int:
        return self.weights_bytes + self.kv(n_slots, n_ctx_slot) + n_slots * self.state_bytes

    @property
    def longest(self) -> int:
        return min(self.n_ctx_train or LONGEST, LONGEST)


@dataclass(frozen=True, slots=True)
class Fit:
    """What to run."""

    n_slots: int
    n_ctx_slot: int
    needs_bytes: int


def largest_context(model: Model, n_slots: int, memory: int) -> Fit | None:
    """The longest context that so many slots can each have, in steps of 256; None if not even 256 tokens fit."""
    low, high = 0, model.longest // PAD_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if model.needs(n_slots, middle * PAD_TOKENS) <= memory:
            low = middle
        else:
            high = middle - 1
    found = low * PAD_TOKENS
    return Fit(n_slots, found, model.needs(n_slots, found)) if found else None


def most_slots(model: Model, n_ctx_slot: int, memory: int, at_most: int = 256) -> Fit | None:
    """The most slots of this context that fit; None if not even one does."""
    fitting = (n for n in range(at_most, 0, -1) if model.needs(n, n_ctx_slot) <= memory)
    n_slots = next(fitting, 0)
    return Fit(n_slots, n_ctx_slot, model.needs(n_slots, n_ctx_slot)) if n_slots else None


def contexts_of(model: Model) -> list[int]:
    """The columns of the table: doubling up to what the model was trained on."""
    found, n = [], SHORTEST
    while n < model.longest:
        found.append(n)
        n *= 2
    return [*found, model.longest]


@dataclass(frozen=True, slots=True)
class Compared:
    """One size, computed and as the engine logged it in `n_lines` lines, in MiB; None: not computed, or not logged."""

    what: str
    computed_mib: float | None
    logged_mib: float | None
    n_lines: int = 1

    @property
    def differs(self) -> bool:
        """By more than the rounding of what is logged."""
        if self.computed_mib is None or self.logged_mib is None:
            return False
        return abs(self.computed_mib - self.logged_mib) > ROUNDED_MIB * max(1, self.n_lines)


def compare(shape: Shape | None, weights_bytes: int, log: LogFacts) -> Sequence[Compared]:
    """What the engine allocated for the slots, context and types of its own log, beside what is computed for these."""
    logged_kv = sum(made.size_mib for made in log.kv) if log.kv else None
    found = [
        Compared("weights", weights_bytes / MIB, _sum(log.weights_mib), len(log.weights_mib)),
        Compared("KV cache", _computed(shape, log), logged_kv, len(log.kv)),
    ]
    if log.recurrent_mib is not None:
        n_seqs = log.n_slots or 1
        state = shape.state_bytes * n_seqs / MIB if shape is not None and shape.state_bytes else None
        found.append(Compared("recurrent state", state, log.recurrent_mib))
    return [*found, Compared("compute buffers", None, _sum(log.compute_mib))]


def _sum(sizes: Mapping[str, float]) -> float | None:
    return sum(sizes.values()) if sizes else None


def _computed(shape: Shape | None, log: LogFacts) -> float | None:
    if shape is None or not log.kv:
        return None
    first = log.kv[0]
    n_swa_cells = log.swa_cells
    return (
        shape.kv_bytes(
            first.n_seqs,
            first.cells,
            first.type_k,
            first.type_v,
            swa_full=n_swa_cells is not None and n_swa_cells == first.cells,
            unified=first.n_streams == 1,
            n_ubatch=log.n_ubatch or 512,
        )
        / MIB
    )


@dataclass(frozen=True, slots=True)
class Logged:
    """A `KvSize` from an engine's own allocation, for models whose shapes are not known: what grows with the context,
    and what each sequence has beside it (a sliding window's cells)."""

    bytes_per_token: float
    bytes_per_slot: float

    def __call__(self, n_slots: int, n_ctx_slot: int) -> int:
        return round(n_slots * (self.bytes_per_token * n_ctx_slot + self.bytes_per_slot))


def logged_size(log: LogFacts) -> Logged | None:
    """None where the log tells no allocation."""
    if not log.kv:
        return None
    cells = max(made.cells for made in log.kv)
    growing = [made for made in log.kv if made.cells == cells]
    fixed = [made for made in log.kv if made.cells != cells]
    per_slot = sum(made.size_mib * MIB / made.n_streams for made in fixed)
    return Logged(sum(made.bytes_per_token for made in growing), per_slot)
