"""Whether prefixes may be reused on an upstream: what `verify` found there, and which architectures need it first.

A verdict belongs to one model, build, number of slots and context per slot; of the other flags an upstream tells
nothing. The rows live in the state file, written by `verify`, read by every proxy that uses the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
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


def row_name(facts: UpstreamFacts) -> str:
    """The state file's name for the verdict on a server like this one."""
    return ROWS + fingerprint(facts)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The rows as they were last read."""

    rows: Mapping[str, Any]

    def passed(self, facts: UpstreamFacts) -> bool | None:
        """What `verify` found on a server like this one; None if it was never run there."""
        row = self.rows.get(row_name(facts))
        outcome = row.get("outcome") if isinstance(row, dict) else None
        return {PASSED: True, FAILED: False}.get(str(outcome))

    def against_reuse(self, facts: UpstreamFacts) -> str:
        """Why nothing may be reused there; "" if it may."""
        row = self.rows.get(row_name(facts))
        outcome = row.get("outcome") if isinstance(row, dict) else None
        if outcome == FAILED and isinstance(row, dict):
            return f"`prefixproxy verify` failed on this model, build and context: {row.get('because')}"
        if outcome != PASSED and needs_verdict(facts):
            return _NEVER_VERIFIED
        return ""


def needs_verdict(facts: UpstreamFacts, architecture: str = "") -> bool:
    """Whether reuse waits for a passed `verify`: by the architecture where that is known, and by the model's name."""
    return any(_RECORDED.search(text) for text in (architecture, facts.architecture, facts.model, *facts.models))
