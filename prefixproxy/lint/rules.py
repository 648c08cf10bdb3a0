"""What rules see in one request, when they act on it, and which rules could be written for what none of them knows."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prefixproxy.lint.compare import shown
from prefixproxy.prompt import Prompt, Tool
from prefixproxy.stabilise.learn import Suggestion
from prefixproxy.types import Relocation
from prefixproxy.volatile.files import builtin_fragments, read_rule
from prefixproxy.volatile.head import HeadReader, HeadView, Span, cut_flags
from prefixproxy.volatile.rules import Rule

MAX_TEXT = 120


class When(StrEnum):
    """When a rule acts on a piece of text."""

    FIRST_SIGHT = "first_sight"
    SEEN_TO_CHANGE = "seen_to_change"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Sighting:
    """A piece of text that a rule knows. `part` counts the texts of a message from 1, `line` the lines of that text;
    `acted`: it left the head of this very request."""

    rule: str
    framework: str
    treatment: str
    segment: str
    part: int
    line: int
    text: str
    n_bytes: int
    when: When
    acted: bool


def sightings(
    reader: HeadReader, prompt: Prompt, relocations: Sequence[Relocation], settled: Sequence[Relocation]
) -> tuple[Sighting, ...]:
    """What the reader's rules see in the head; `relocations` are what was cut of it in fact, `settled` what will be
    cut once all of it was seen to change."""
    view = reader.read(prompt.head, prompt.model.encode("utf-8", "surrogatepass"))
    at_sight = cut_flags(view, [False] * len(view.spans))
    now, later = _Marks(relocations), _Marks(settled)
    out = []
    for number, text in enumerate(view.texts):
        segment = f"{prompt.messages[text.message].role.value}[{text.message}]"
        part = sum(t.message == text.message for t in view.texts[: number + 1])
        for rule, line in text.stripped:
            gone = line.rstrip("\r\n")
            acted, _ = now.has(rule, segment, gone), later.has(rule, segment, gone)
            out.append(_sighting(rule, segment, part, 1, gone, When.FIRST_SIGHT, acted))
        for i, span in enumerate(view.spans):
            if span.text != number:
                continue
            acted, will = now.has(span.rule, segment, span.note), later.has(span.rule, segment, span.note)
            when = When.FIRST_SIGHT if at_sight[i] else When.SEEN_TO_CHANGE if acted or will else When.WAITING
            out.append(_sighting(span.rule, segment, part, _line_of(view, span), span.note, when, acted))
    return tuple(out)


class _Marks:
    """Relocations, which come in the order of the head, to be ticked off in that order."""

    def __init__(self, relocations: Sequence[Relocation]) -> None:
        self._left = list(relocations)

    def has(self, rule: Rule, segment: str, text: str) -> bool:
        n_bytes = len(text.encode("utf-8", "surrogatepass"))
        if self._left and self._left[0] == Relocation(rule.name, segment, n_bytes):
            del self._left[0]
            return True
        return False


def _sighting(rule: Rule, segment: str, part: int, line: int, text: str, when: When, acted: bool) -> Sighting:
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    short = shown(text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "...")
    return Sighting(rule.name, rule.framework, rule.treatment, segment, part, line, short, n_bytes, when, acted)


def _line_of(view: HeadView, span: Span) -> int:
    """The line of the client's own text on which a span's note starts."""
    text = view.texts[span.text]
    stripped = len(text.part.text) - len(text.text)
    note_start = text.text.find(span.note, span.start)
    return text.part.text.count("\n", 0, stripped + max(note_start, span.start)) + 1


def suggested_rules(suggestions: Iterable[Suggestion]) -> list[Rule]:
    """The rules that these suggestions spell."""
    fragments = builtin_fragments()
    return [read_rule(_table(one), "suggested", fragments) for one in suggestions]


def _table(suggestion: Suggestion) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(suggestion.toml)["rule"][0]
    return table


def tools_detail(earlier: Prompt, later: Prompt) -> str:
    """In which way two tool lists differ, in words; "" if they do not."""
    a, b = [t.canonical for t in earlier.tools], [t.canonical for t in later.tools]
    if a == b:
        return ""
    if sorted(a) == sorted(b):
        return "the same tools in another order"
    names = _names(earlier.tools), _names(later.tools)
    said = [
        f"{word} {_listed(found)}"
        for word, found in (("added:", names[1] - names[0]), ("gone:", names[0] - names[1]))
        if found
    ]
    if not said:
        changed = {t.name for t in later.tools if t.canonical not in a}
        said = [f"the same names, but {_listed(changed)} spelled or described differently"]
    return "tools " + "; ".join(said) if names[0] != names[1] else said[0]


def _names(tools: Sequence[Tool]) -> set[str]:
    return {tool.name for tool in tools}


def _listed(names: set[str], most: int = 5) -> str:
    found = sorted(shown(name) or "(no name)" for name in names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
