"""What a rule is: which text of a head is volatile, and what becomes of it. `volatile` reads them from files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Where = Literal[
    "text_start",
    "statement",
    "line",
    "lone_line",
    "edge_line",
    "top_line",
    "labelled_value",
    "element",
    "section",
    "fence",
]
Treatment = Literal["strip", "move"]
Evidence = Literal["signature", "labelled", "observed"]
Varies = Literal["turn", "lane"]
Identity = Literal["", "strict", "weak"]

GENERIC = "generic"
STATEMENTS = frozenset({"statement", "line", "lone_line", "edge_line", "top_line"})
BLOCKS = frozenset({"labelled_value", "element", "section", "fence"})


@dataclass(frozen=True, slots=True)
class Example:
    """What a rule does, checked by a test: the head `before` becomes `after`, and `note` is what was cut. `earlier` is
    a head with another value that must have been seen first."""

    before: str
    after: str
    note: str = ""
    earlier: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of volatile text. `topic` groups rules that speak of the same thing: text whose topic occurs twice in a
    head is no clock at first sight. `varies`: once a "turn", or only from "lane" to lane. `identity`: whether its value
    (group `value`, under the name of group `label`) tells conversations apart. `replay`: whether an older value may
    stay where it was told; state that would mislead may not.
    """

    name: str
    framework: str
    where: Where
    treatment: Treatment
    evidence: Evidence
    why: str
    topic: str
    varies: Varies
    identity: Identity
    pattern: re.Pattern[str]
    replay: bool = True
    needs: tuple[str, ...] = ()
    mention: re.Pattern[str] | None = None
    doubt: re.Pattern[str] | None = None
    value: re.Pattern[str] | None = None
    inside: re.Pattern[str] | None = None
    lead: re.Pattern[str] | None = None
    body: re.Pattern[str] | None = None
    until: re.Pattern[str] | None = None
    names_lane: re.Pattern[str] | None = None
    companion: bool = False
    example: Example | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules in force, frameworks' own before generic ones: where two match, the first one is named."""

    rules: tuple[Rule, ...]
    companions: tuple[Rule, ...] = ()

    @property
    def statements(self) -> tuple[Rule, ...]:
        return tuple(r for r in self.rules if r.where in STATEMENTS)

    @property
    def blocks(self) -> tuple[Rule, ...]:
        return tuple(r for r in self.rules if r.where in BLOCKS)

    @property
    def strips(self) -> tuple[Rule, ...]:
        return tuple(r for r in self.rules if r.where == "text_start")

    def with_rules(self, more: Sequence[Rule]) -> RuleSet:
        return RuleSet((*self.rules, *more), self.companions)
