"""llama-server's startup log: what it made of its flags, and what it allocated.

Lines as in build 11434 (docs/explanation/llama-server.md). At its default verbosity a server tells slots, context,
model and template; the KV cache's types and sizes, the RAM cache and flash attention come with `-lv 4`. What follows
the startup is not read. A log of several starts tells of the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_LINES = 200_000
"""Of a log that is all requests, the startup's lines are the first."""

_MIB = 1 << 20
_STARTS = re.compile(r"initializing \.\.\.|main: build|build_info: |build: \d+ \(")
_BUILD = re.compile(r"build_info: (\S+)|build: (\d+ \(\w+\))")
_SLOTS = re.compile(r"n_slots = (\d+), n_ctx_slot = (\d+), kv_unified = '(\w+)'")
_KV = re.compile(
    r"llama_kv_cache\w*: size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers, +(\d+)/ *(\d+) seqs\), "
    r"K \((\w+)\): +([\d.]+) MiB, V \((\w+)\): +([\d.]+) MiB"
)
_RECURRENT = re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers, +(\d+) seqs")
_KV_BUFFER = re.compile(r"llama_kv_cache\w*: +(\S+) KV buffer size = +([\d.]+) MiB")
_WEIGHTS = re.compile(r"load_tensors: +(\S+) model buffer size = +([\d.]+) MiB")
_COMPUTE = re.compile(r"(?:sched_reserve|llama_context): +(\S+) compute buffer size = +([\d.]+) MiB")
_CONTEXT = re.compile(r"llama_context: (n_seq_max|n_ctx|n_ctx_seq|n_batch|n_ubatch|flash_attn|kv_unified) += (\S+)")
_FLASH = re.compile(r"Flash Attention (enabled|disabled)|Flash Attention was auto, set to (enabled|disabled)")
_MODEL = re.compile(r"loading model '([^']+)'")
_RAM = re.compile(r"prompt cache is (enabled, size limit: (?:(\d+) MiB|no limit)|disabled)")
_SWA = re.compile(r"print_info: n_swa += (\d+)")
_SWA_CELLS = re.compile(r"creating +SWA KV cache, size = +(\d+) cells")
_ARCH = re.compile(r"print_info: arch += (\S+)")
_REUSE = re.compile(r"cache_reuse is not supported")
_CAPPED = re.compile(r"the slot context \((\d+)\) exceeds the training context of the model \((\d+)\)")
_IDLE_SLOTS = re.compile(r"idle slots will be (saved|cleared|\S+)|--cache-idle-slots requires --cache-ram")


@dataclass(frozen=True, slots=True)
class KvAllocation:
    """One KV cache the engine made: `cells` of each of `n_streams` streams, over `n_layers`; sizes in MiB as it prints
    them, two decimals."""

    size_mib: float
    cells: int
    n_layers: int
    n_seqs: int
    n_streams: int
    type_k: str
    k_mib: float
    type_v: str
    v_mib: float

    @property
    def bytes_per_token(self) -> float:
        """Bytes one token takes in one sequence, as exact as the line is."""
        return (self.k_mib + self.v_mib) * _MIB / (self.cells * self.n_streams)


@dataclass(slots=True)
class LogFacts:
    """What one startup said; None and empty where it said nothing."""

    build: str | None = None
    model_path: str | None = None
    arch: str | None = None
    n_slots: int | None = None
    n_ctx_slot: int | None = None
    kv_unified: bool | None = None
    n_ctx: int | None = None
    n_batch: int | None = None
    n_ubatch: int | None = None
    flash_attention: str | None = None
    kv: list[KvAllocation] = field(default_factory=list)
    kv_buffers_mib: dict[str, float] = field(default_factory=dict)
    recurrent_mib: float | None = None
    weights_mib: dict[str, float] = field(default_factory=dict)
    compute_mib: dict[str, float] = field(default_factory=dict)
    ram_cache_mib: int | None = None
    """The RAM cache's limit: 0 off, -1 without limit, None not told."""
    n_swa: int | None = None
    swa_cells: int | None = None
    capped_from: int | None = None
    reuse_refused: bool = False
    keeps_idle_slots: bool | None = None

    @property
    def kv_types(self) -> tuple[str, str] | None:
        return (self.kv[0].type_k, self.kv[0].type_v) if self.kv else None

    @property
    def told(self) -> bool:
        """Whether there was a startup in it at all."""
        return self.n_slots is not None or bool(self.kv) or self.model_path is not None


def read_log(lines: Iterable[str]) -> LogFacts:
    """The last startup told in these lines."""
    facts = LogFacts()
    for number, line in enumerate(lines):
        if number >= MAX_LINES:
            break
        if _STARTS.search(line) and facts.n_slots is not None:
            facts = LogFacts()
        _take(facts, line)
    return facts


def _take(facts: LogFacts, line: str) -> None:
    for pattern, take in _READERS:
        if found := pattern.search(line):
            take(facts, found)


def _take_slots(facts: LogFacts, found: re.Match[str]) -> None:
    facts.n_slots, facts.n_ctx_slot, facts.kv_unified = int(found[1]), int(found[2]), found[3] == "true"


def _take_kv(facts: LogFacts, found: re.Match[str]) -> None:
    size, cells, layers, seqs, streams, type_k, k_mib, type_v, v_mib = found.groups()
    counts = int(cells), int(layers), int(seqs), int(streams)
    facts.kv.append(KvAllocation(float(size), *counts, type_k, float(k_mib), type_v, float(v_mib)))


def _take_context(facts: LogFacts, found: re.Match[str]) -> None:
    name, value = found[1], found[2]
    match name:
        case "n_ctx":
            facts.n_ctx = int(value)
            # `-fit` tries several contexts: what the last one allocated is what runs
            facts.kv, facts.kv_buffers_mib, facts.compute_mib, facts.recurrent_mib = [], {}, {}, None
        case "n_batch" | "n_ubatch":
            setattr(facts, name, int(value))
        case "kv_unified":
            facts.kv_unified = value == "true"
        case "flash_attn":
            facts.flash_attention = {"enabled": "on", "disabled": "off"}.get(value, value)


def _take_flash(facts: LogFacts, found: re.Match[str]) -> None:
    facts.flash_attention = "on" if "enabled" in found.groups() else "off"


def _take_ram(facts: LogFacts, found: re.Match[str]) -> None:
    facts.ram_cache_mib = 0 if found[1] == "disabled" else int(found[2]) if found[2] else -1


def _take_build(facts: LogFacts, found: re.Match[str]) -> None:
    facts.build = found[1] or found[2]


def _adds(name: str) -> Any:
    def take(facts: LogFacts, found: re.Match[str]) -> None:
        sizes: dict[str, float] = getattr(facts, name)
        sizes[found[1]] = sizes.get(found[1], 0.0) + float(found[2])

    return take


def _sets(name: str, convert: Any = str) -> Any:
    def take(facts: LogFacts, found: re.Match[str]) -> None:
        setattr(facts, name, convert(found[1]))

    return take


_READERS: tuple[tuple[re.Pattern[str], Any], ...] = (
    (_BUILD, _take_build),
    (_MODEL, _sets("model_path")),
    (_ARCH, _sets("arch")),
    (_SLOTS, _take_slots),
    (_CONTEXT, _take_context),
    (_KV, _take_kv),
    (_KV_BUFFER, _adds("kv_buffers_mib")),
    (_RECURRENT, _sets("recurrent_mib", float)),
    (_WEIGHTS, _adds("weights_mib")),
    (_COMPUTE, _adds("compute_mib")),
    (_FLASH, _take_flash),
    (_RAM, _take_ram),
    (_SWA, _sets("n_swa", int)),
    (_SWA_CELLS, _sets("swa_cells", int)),
    (_CAPPED, _sets("capped_from", int)),
    (_REUSE, lambda facts, _: setattr(facts, "reuse_refused", True)),
    (_IDLE_SLOTS, lambda facts, found: setattr(facts, "keeps_idle_slots", found[1] is not None)),
)
