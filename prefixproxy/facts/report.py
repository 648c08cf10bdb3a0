"""The head of every report: build, model, slots, n_ctx_slot, KV types, flash attention, flags, where tokens come from.

"If you cannot state the per-slot context and KV precision of a bad output report, you do not yet have a bug report. You
have a mood." What is not known is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixproxy.facts.flags import shown_flags

UNKNOWN = "unknown"
_LABEL_WIDTH = 15


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What something was measured on; None: unknown.

    `n_ctx_slot` is the context of one slot in tokens; KV types as llama.cpp names them ("f16", "q8_0");
    `flash_attention` "on", "off" or "auto"; `flags` the server's command line without its program, secrets masked;
    `tokens` who counted ("reported by the server", ...). `told_by` says for a field where its value comes from, if that
    is not the server's own answer. `through`: the proxy in between, as its version.
    """

    url: str
    kind: str
    build: str | None = None
    model: str | None = None
    n_slots: int | None = None
    n_ctx_slot: int | None = None
    kv_unified: bool | None = None
    kv_type_k: str | None = None
    kv_type_v: str | None = None
    flash_attention: str | None = None
    flags: tuple[str, ...] | None = None
    tokens: str = UNKNOWN
    through: str = ""
    told_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def kv_types(self) -> tuple[str, str] | None:
        """The types of keys and values, if both are known."""
        if self.kv_type_k is None or self.kv_type_v is None:
            return None
        return self.kv_type_k, self.kv_type_v


@dataclass(frozen=True, slots=True)
class Comparability:
    """Whether two runs may be compared: `differs` says in words what is not equal, `unknown` what cannot be told."""

    differs: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.differs and not self.unknown

    @property
    def reason(self) -> str:
        """In one line why not; empty when they may be."""
        return "; ".join((*self.differs, *self.unknown))


def comparable(one: RunFacts, other: RunFacts) -> Comparability:
    """Two runs are compared only on equal n_ctx_slot and KV types: a smaller desk or a coarser cache looks like a worse
    model. One server is comparable to itself, whatever it does not tell."""
    if one.url == other.url and one.build == other.build:
        return Comparability()
    differs, unknown = [], []
    for name, what in (("n_ctx_slot", "n_ctx_slot"), ("kv_types", "KV types")):
        a, b = getattr(one, name), getattr(other, name)
        if a is None or b is None:
            where = " and ".join(facts.url for facts, value in ((one, a), (other, b)) if value is None)
            unknown.append(
                f"{what} is unknown on {where}" if what == "n_ctx_slot" else f"{what} are unknown on {where}"
            )
        elif a != b:
            differs.append(f"{what}: {_spelled(a)} on {one.url}, {_spelled(b)} on {other.url}")
    return Comparability(tuple(differs), tuple(unknown))


def fact_lines(facts: RunFacts) -> list[str]:
    """The head of a report as text, one fact to a line."""
    through = f", through prefixproxy {facts.through}" if facts.through else ""
    return aligned(
        [
            ("server", f"{facts.kind} at {facts.url}{through}"),
            ("build", facts.build or UNKNOWN),
            ("model", facts.model or UNKNOWN),
            ("slots", _number(facts.n_slots) + _from(facts, "n_slots")),
            ("n_ctx_slot", _number(facts.n_ctx_slot) + _from(facts, "n_ctx_slot")),
            ("KV cache", _kv(facts)),
            ("flash attention", (facts.flash_attention or UNKNOWN) + _from(facts, "flash_attention")),
            ("flags", _flags(facts)),
            ("tokens", facts.tokens),
        ]
    )


def facts_json(facts: RunFacts) -> dict[str, Any]:
    """The same as one JSON object; null for what is unknown."""
    return {
        "url": facts.url,
        "kind": facts.kind,
        "build": facts.build,
        "model": facts.model,
        "n_slots": facts.n_slots,
        "n_ctx_slot": facts.n_ctx_slot,
        "kv_unified": facts.kv_unified,
        "kv_type_k": facts.kv_type_k,
        "kv_type_v": facts.kv_type_v,
        "flash_attention": facts.flash_attention,
        "flags": None if facts.flags is None else list(facts.flags),
        "tokens": facts.tokens,
        "through": facts.through or None,
        "told_by": dict(facts.told_by),
    }


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Rows of a label and its value, as every report shows them."""
    return [f"{label:<{_LABEL_WIDTH}}  {value}" for label, value in rows]


def _kv(facts: RunFacts) -> str:
    if facts.kv_type_k is None and facts.kv_type_v is None:
        types = "types unknown"
    else:
        types = f"K {facts.kv_type_k or UNKNOWN}, V {facts.kv_type_v or UNKNOWN}{_from(facts, 'kv_type_k')}"
    unified = {None: UNKNOWN, True: "yes", False: "no"}[facts.kv_unified]
    return f"{types}; unified: {unified}{_from(facts, 'kv_unified')}"


def _flags(facts: RunFacts) -> str:
    if facts.flags is None:
        return UNKNOWN
    return (shown_flags(facts.flags) or "none") + _from(facts, "flags")


def _from(facts: RunFacts, name: str) -> str:
    where = facts.told_by.get(name)
    return f" ({where})" if where else ""


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _spelled(value: object) -> str:
    if isinstance(value, tuple):
        return f"K {value[0]}, V {value[1]}"
    return f"{value:,}" if isinstance(value, int) else str(value)
