"""What a check says: how bad it is, what was seen, which flag to change, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """error: reuse is defeated or answers break, the command exits with 1; warning: it costs; note: to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


_ORDER = tuple(Severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """`evidence`: what was seen, with numbers. `fix`: the exact flag or setting to change, empty if there is none."""

    severity: Severity
    name: str
    evidence: str
    why: str
    fix: str = ""


def error(name: str, evidence: str, why: str, fix: str = "") -> Finding:
    return Finding(Severity.ERROR, name, evidence, why, fix)


def warning(name: str, evidence: str, why: str, fix: str = "") -> Finding:
    return Finding(Severity.WARNING, name, evidence, why, fix)


def note(name: str, evidence: str, why: str, fix: str = "") -> Finding:
    return Finding(Severity.NOTE, name, evidence, why, fix)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))
