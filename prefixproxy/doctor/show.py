"""What doctor found, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from prefixproxy.doctor.findings import Finding, Severity, worst_first
from prefixproxy.facts.report import RunFacts, fact_lines, facts_json

_WIDTH = 110
UNSEEN = frozenset({"not-tried", "kv-unified-unknown", "nothing-loaded", "nothing-to-see", "log-of-another-run"})
"""Findings that say what could not be looked at."""


@dataclass(frozen=True, slots=True)
class Examined:
    """One upstream. `facts` None: it was not reached, and the findings say why."""

    name: str
    url: str
    facts: RunFacts | None
    findings: Sequence[Finding]

    @property
    def ok(self) -> bool:
        return all(finding.severity is not Severity.ERROR for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Report:
    """`about`: what was asked of whom, such as that the URL is a prefixproxy."""

    about: Sequence[str]
    upstreams: Sequence[Examined]

    @property
    def ok(self) -> bool:
        return bool(self.upstreams) and all(upstream.ok for upstream in self.upstreams)


def report_lines(report: Report) -> list[str]:
    lines = list(report.about)
    for upstream in report.upstreams:
        lines += [""] if lines else []
        lines += [*fact_lines(upstream.facts or RunFacts(upstream.url, "nothing that is known")), ""]
        findings = worst_first(upstream.findings)
        for finding in findings:
            lines += _finding_lines(finding)
        lines.append(_verdict(findings))
    return lines


def as_json(report: Report) -> dict[str, Any]:
    """The same as one JSON object; `ok` is false where the command exits with 1."""
    return {
        "ok": report.ok,
        "about": list(report.about),
        "upstreams": [
            {
                "name": one.name,
                "url": one.url,
                "ok": one.ok,
                "facts": None if one.facts is None else facts_json(one.facts),
                "findings": [asdict(finding) for finding in worst_first(one.findings)],
            }
            for one in report.upstreams
        ],
    }


def _finding_lines(finding: Finding) -> list[str]:
    return [
        *_wrapped(f"{finding.severity:<8}{finding.name}: {finding.evidence}", " " * 8),
        *_wrapped(f"        {finding.why}", " " * 8),
        *([f"        fix: {finding.fix}"] if finding.fix else []),
        "",
    ]


def _verdict(findings: Sequence[Finding]) -> str:
    counts = {severity: sum(f.severity is severity for f in findings) for severity in Severity}
    if not counts[Severity.ERROR] and not counts[Severity.WARNING]:
        unseen = [finding.name for finding in findings if finding.name in UNSEEN]
        if unseen:
            return f"Nothing that was seen defeats reuse; not seen: {', '.join(unseen)}."
        return "Nothing here defeats reuse."
    parts = [f"{n} {severity}{'' if n == 1 else 's'}" for severity, n in counts.items() if n]
    return f"{', '.join(parts)}."


def _wrapped(text: str, indent: str) -> list[str]:
    return wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [text]
