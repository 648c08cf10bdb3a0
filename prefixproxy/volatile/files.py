"""Rules: which text of a head is volatile, and what becomes of it. Data in TOML files; this file reads them.

A rule file holds `[[rule]]` tables. `where` says what kind of text a rule is about:

text_start      the first line of a system text (the only place where `treatment = "strip"` exists)
statement       a line, or a sentence at the border of a line, that is nothing but the statement
line            a line that is nothing but the statement
lone_line       the same, where no other field ("Subject: ...") and no heading stands in its paragraph
edge_line       the same, and only as the first or last line of the head; top_line: only as the first
labelled_value  a line that is a label ("## Current Time"), and the lines below it that match `value`
element         `<name ...>` to `</name>`; `pattern` is the name, `inside` a line it must hold
section         an opening line, and the lines below it as long as they match `body` (or up to one that matches `until`)
fence           a heading, and the code fence right below it; `inside` is a line the fence must hold, `body` what may
                stand between the two

`replay = false` is for state that must never be stale: its note stands in the newest user message only, however short.
`needs` are words of which a line must hold one, `mention` is searched anywhere in a line: text that speaks of the same
topic in another way, in an example or an instruction. `doubt` is searched in a statement that would act at first sight:
one that it finds waits for evidence (of `where = "statement"` only sentences: a line of its own speaks for itself).

`evidence`: "signature" acts at first sight; "labelled" on the first or last line of the head at first sight, elsewhere
once seen to change; "observed" only once seen to change. `[[companion]]` tables name statements that may share a line
with others and go along with them. An `example` (a head `before` and `after`, if need be the `note` and a head seen
`earlier`) is run when the file is read. The sources of the built-in rules are the public reports that each `why` names.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, get_args

from prefixproxy.errors import UsageError
from prefixproxy.volatile.examples import failure
from prefixproxy.volatile.patterns import PatternError, check_cost, compiled
from prefixproxy.volatile.rules import (
    BLOCKS,
    GENERIC,
    STATEMENTS,
    Evidence,
    Example,
    Identity,
    Rule,
    RuleSet,
    Treatment,
    Varies,
    Where,
)

MAX_RULES = 500


def load_rules(extra: Sequence[tuple[str, str]] = (), disabled: frozenset[str] = frozenset()) -> RuleSet:
    """The built-in rules and those of `extra`, pairs of a file's name and its text, less the `disabled` ones.

    UsageError names file, rule (by its number if it has no name) and field of the first thing that is wrong: also an
    example of `extra` that does not come out, and a disabled rule that does not exist.
    """
    fragments = builtin_fragments()
    rules: dict[str, Rule] = {}
    companions: list[Rule] = []
    # a test holds our own patterns to the bound that users' are held to here, which takes as long as compiling them
    own = [(name, r) for name, text in builtin_files() for r in _read_file(name, text, fragments, checked=False)]
    users = [(name, r) for name, text in extra for r in _read_file(name, text, fragments, checked=True)]
    for name, rule in (*own, *users):
        if rule.companion:
            companions.append(rule)
        elif rule.name in rules:
            raise UsageError(f"{name}: rule {rule.name!r}: name: another rule has this name")
        else:
            rules[rule.name] = rule
    if len(rules) > MAX_RULES:
        raise UsageError(f"there are {len(rules)} rules, allowed are {MAX_RULES}")
    unknown = disabled - rules.keys()
    if unknown:
        raise UsageError(f"stabilise.disabled: there is no rule {min(unknown)!r}")
    kept = [r for r in rules.values() if r.name not in disabled]
    found = RuleSet(tuple(sorted(kept, key=lambda r: r.framework == GENERIC)), tuple(companions))
    for name, rule in users:
        wrong = failure(rule, found) if rule.name not in disabled else ""
        if wrong:
            raise UsageError(f"{name}: rule {rule.name!r}: example: {wrong}")
    return found


def builtin_fragments() -> dict[str, str]:
    """The named parts that every pattern may use as `(?&name)`."""
    text = (files("prefixproxy") / "rules" / "fragments.toml").read_text(encoding="utf-8")
    fragments: dict[str, str] = tomllib.loads(text)["fragments"]
    return fragments


def read_rule(table: Mapping[str, Any], file: str, fragments: Mapping[str, str]) -> Rule:
    """One `[[rule]]` table. UsageError names `file`, the rule and the field that is wrong."""
    return _Table(table, file, fragments, 1, companion=False, checked=True).rule()


def builtin_files() -> list[tuple[str, str]]:
    """The rule files of the package: name and text."""
    folder = files("prefixproxy") / "rules"
    found = [(f.name, f) for f in folder.iterdir() if f.name.endswith(".toml") and f.name != "fragments.toml"]
    return [(f"rules/{name}", file.read_text(encoding="utf-8")) for name, file in sorted(found, key=lambda f: f[0])]


def _read_file(name: str, text: str, fragments: Mapping[str, str], *, checked: bool) -> list[Rule]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name}: this is no TOML: {error}") from error
    unknown = data.keys() - {"rule", "companion"}
    if unknown:
        raise UsageError(f"{name}: {min(unknown)}: unknown; a rule file holds [[rule]] and [[companion]] tables")
    out = []
    for kind in ("rule", "companion"):
        tables = data.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            raise UsageError(f"{name}: {kind}: must be [[{kind}]] tables")
        out += [
            _Table(table, name, fragments, number, companion=kind == "companion", checked=checked).rule()
            for number, table in enumerate(tables, 1)
        ]
    if not out:
        raise UsageError(f"{name}: there is no rule in it; a rule file holds [[rule]] tables")
    return out


_OPTIONAL_PATTERNS = ("mention", "doubt", "value", "inside", "lead", "body", "until", "names_lane")
_FIELDS = frozenset(
    {"name", "framework", "where", "pattern", "treatment", "evidence", "why", "example", "topic", "varies", "identity"}
    | {"needs", "replay", *_OPTIONAL_PATTERNS}
)
_REQUIRED: dict[str, str] = {"labelled_value": "value"}
_FITS: dict[str, frozenset[str]] = {
    "value": frozenset({"labelled_value"}),
    "inside": frozenset({"element", "fence"}),
    "lead": frozenset({"element"}),
    "body": frozenset({"section", "fence"}),
    "until": frozenset({"section"}),
    "names_lane": BLOCKS,
    "mention": STATEMENTS,
    "doubt": STATEMENTS,
    "identity": STATEMENTS,
}


class _Table:
    """Reads one table, and says of everything wrong in which file, rule and field it stands."""

    def __init__(
        self,
        table: Mapping[str, Any],
        file: str,
        fragments: Mapping[str, str],
        number: int,
        *,
        companion: bool,
        checked: bool,
    ) -> None:
        self._table = table
        self._file = file
        self._fragments = fragments
        self._companion = companion
        self._checked = checked
        self._name = ""
        self._who = f"{'companion' if companion else 'rule'} {number}"

    def rule(self) -> Rule:
        self._name = self._word("name")
        self._who = f"rule {self._name!r}"
        unknown = self._table.keys() - _FIELDS
        if unknown:
            raise self._wrong(min(unknown), f"unknown field; known are {', '.join(sorted(_FIELDS))}")
        where: Where = self._one_of("where", get_args(Where), "line" if self._companion else None)
        treatment: Treatment = self._one_of("treatment", get_args(Treatment), "move" if self._companion else None)
        evidence: Evidence = self._one_of("evidence", get_args(Evidence), "observed" if self._companion else None)
        self._check(where, treatment, evidence)
        more = {key: self._pattern(key) for key in _OPTIONAL_PATTERNS if key in self._table}
        pattern = self._pattern("pattern")
        return Rule(
            name=self._name,
            framework=self._word("framework", GENERIC),
            where=where,
            treatment=treatment,
            evidence=evidence,
            why=self._word("why", "a companion" if self._companion else None),
            topic=self._word("topic", self._name),
            varies=self._one_of("varies", get_args(Varies), "turn"),
            identity=self._one_of("identity", get_args(Identity), ""),
            pattern=pattern,
            replay=self._flag("replay", default=True),
            needs=self._words("needs"),
            companion=self._companion,
            example=self._example(),
            **more,
        )

    def _check(self, where: Where, treatment: Treatment, evidence: Evidence) -> None:
        if (where == "text_start") != (treatment == "strip"):
            raise self._wrong("treatment", 'must be "strip" where `where` is "text_start", and "move" elsewhere')
        if treatment == "strip" and evidence != "signature":
            raise self._wrong("evidence", 'must be "signature" where `treatment` is "strip"')
        needed = _REQUIRED.get(where)
        if needed and needed not in self._table:
            raise self._wrong(needed, f'missing; where = "{where}" needs it')
        if where == "section" and ("body" in self._table) == ("until" in self._table):
            raise self._wrong("body", 'where = "section" needs either `body` or `until`')
        for key, places in _FITS.items():
            if key in self._table and where not in places:
                raise self._wrong(key, f'has no meaning where `where` is "{where}"')
        if self._table.get("identity") and "(?P<value>" not in str(self._table.get("pattern")):
            raise self._wrong("identity", "the pattern has no group `value` that could tell lanes apart")

    def _wrong(self, key: str, why: str) -> UsageError:
        return UsageError(f"{self._file}: {self._who}: {key}: {why}")

    def _word(self, key: str, default: str | None = None) -> str:
        word = self._table.get(key, default)
        if not isinstance(word, str) or not word.strip():
            raise self._wrong(key, "missing" if word is None else "must be a text that is not empty")
        if "\n" in word.strip() and key != "pattern":
            raise self._wrong(key, "must be one line")
        return word

    def _words(self, key: str) -> tuple[str, ...]:
        words = self._table.get(key, [])
        if not isinstance(words, list) or not all(isinstance(w, str) and w for w in words):
            raise self._wrong(key, "must be a list of texts")
        return tuple(w.lower() for w in words)

    def _flag(self, key: str, *, default: bool) -> bool:
        flag = self._table.get(key, default)
        if not isinstance(flag, bool):
            raise self._wrong(key, "must be true or false")
        return flag

    def _one_of(self, key: str, allowed: tuple[str, ...], default: str | None) -> Any:
        word = self._table.get(key, default)
        if word not in allowed:
            shown = ", ".join(f'"{a}"' for a in allowed if a)
            raise self._wrong(key, f"missing; one of {shown}" if word is None else f"must be one of {shown}")
        return word

    def _pattern(self, key: str) -> re.Pattern[str]:
        text = self._word(key)
        try:
            pattern = compiled(text, self._fragments)
            if self._checked:
                check_cost(pattern)
        except PatternError as error:
            raise self._wrong(key, str(error)) from error
        if key in ("pattern", "value") and pattern.match(""):
            raise self._wrong(key, "it matches the empty text")
        return pattern

    def _example(self) -> Example | None:
        table = self._table.get("example")
        if table is None:
            return None
        fields = {"before", "after", "note", "earlier"}
        if not isinstance(table, dict) or not table.keys() <= fields or not {"before", "after"} <= table.keys():
            raise self._wrong("example", "must be a table of the texts before, after, and if need be note and earlier")
        if not all(isinstance(text, str) for text in table.values()):
            raise self._wrong("example", "must hold texts")
        return Example(**table)
