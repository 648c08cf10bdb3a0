"""Whether prefixes may be reused on an upstream: what `verify` found there, and which architectures need it first.

A verdict belongs to one model, build, number of slots, context per slot and KV types; these stand in the server's
command line or its log, and are unknown where neither can be read. The rows live in the state file, written by
`verify`, read by every proxy that uses the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prefixproxy.schedule.roots import fingerprint
from prefixproxy.types import UpstreamFacts

ROWS = "verify/"
PASSED, FAILED = "passed", "failed"
_RECORDED = re.compile(r"\bkimi[-_. ]?(linear|k3)|\bkda\b|kimi[-_]linear", re.IGNORECASE)
"""Architectures of which a corruption by reuse is on record: Kimi Delta Attention (llama.cpp PR 26185)."""
_NEVER_VERIFIED = (
    "this architecture (KDA) has a recorded corruption by prefix reuse (llama.cpp PR 26185): "
    "run `prefixproxy verify` on this build first"
)


UNQUANTISED = frozenset({"f32", "f16", "bf16"})


def row_name(facts: UpstreamFacts) -> str:
    """The state file's name for the verdict on a server like this one."""
    return "/".join((ROWS + fingerprint(facts), *(facts.kv_types or ())))


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The rows as they were last read."""

    rows: Mapping[str, Any]

    def passed(self, facts: UpstreamFacts) -> bool | None:
        """What `verify` found on a server like this one; None if it was never run there. Quantised keys and values are
        shown to be sound by a run on just these types alone."""
        exact, row = self._row(facts)
        outcome = row.get("outcome")
        if outcome == PASSED and not exact and facts.kv_types and not UNQUANTISED.issuperset(facts.kv_types):
            return None
        return {PASSED: True, FAILED: False}.get(str(outcome))

    def against_reuse(self, facts: UpstreamFacts) -> str:
        """Why nothing may be reused there; "" if it may."""
        _, row = self._row(facts)
        if row.get("outcome") == FAILED:
            return f"`prefixproxy verify` failed on this model, build and context: {row.get('because')}"
        if row.get("outcome") != PASSED and needs_verdict(facts):
            return _NEVER_VERIFIED
        return ""

    def _row(self, facts: UpstreamFacts) -> tuple[bool, Mapping[str, Any]]:
        """The verdict that holds there, and whether it is one on its very KV types. Without one, that of a run which
        could not tell its types; of a server whose types cannot be told, the newest."""
        exact = self.rows.get(row_name(facts))
        if facts.kv_types is not None:
            if isinstance(exact, dict):
                return True, exact
            unknown = self.rows.get(row_name(replace(facts, kv_types=None)))
            return False, unknown if isinstance(unknown, dict) else {}
        name = row_name(facts)
        alike = [
            row
            for other, row in self.rows.items()
            if isinstance(row, dict) and (other == name or other.startswith(f"{name}/"))
        ]
        return True, max(alike, key=_written, default={})


def _written(row: Mapping[str, Any]) -> float:
    when = row.get("time")
    return float(when) if isinstance(when, int | float) else 0.0


def needs_verdict(facts: UpstreamFacts, architecture: str = "") -> bool:
    """Whether reuse waits for a passed `verify`: by the architecture where that is known, and by the model's name."""
    return any(_RECORDED.search(text) for text in (architecture, facts.architecture, facts.model, *facts.models))
