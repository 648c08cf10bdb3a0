"""Where a line stands in its text: what is blank, a heading, a document, an example, part of something announced.

A statement inside a code fence, a quoted document or an example is no state. Where an example ends is a guess, so a
lone statement behind one is believed only once it was seen to change.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, count
from operator import add
from typing import Literal

from prefixproxy.volatile.lines import LineFacts, indent_of, is_quoted
from prefixproxy.volatile.patterns import MAX_PIECE

CONTENT_TAGS = re.compile(
    r"(?:document|doc|examples?|sample|quote|blockquote|transcript|logs?|file|files|code|snippet|contract|article|email|mail"
    r"|page|attachment|excerpt|source|script|pre|output|answer|response|template|format|schema|diff|patch|book|chapter|letter"
    r"|ticket|invoice|receipt|order|record|report|case|form|event|entry|item|issue|agreement|policy|message|notes?|minutes|post"
    r"|dialogue|conversation|chat_history|history|few_shot)(?:[_-]?(?:text|content|contents|\d{1,4}))?"
)
"""Tags around text that is somebody's content: dates and ids in it are part of the document."""

MAX_PARAGRAPH = 60
_FOR_EXAMPLE = re.compile(r"(?:\be\.g\.|\bi\.e\.|\bfor (?:example|instance)|\bsuch as)[,:]?$", re.IGNORECASE)
_FIELD = re.compile(r"\W{0,4}\w[\w /-]{0,24}[:=|]|#{1,6}\s")
_ENTRY = re.compile(r"\s{0,8}\w(?:[\w.-]|[ /](?=\w)){0,31}\s?[:=]\s?(?=\S)(?!(?:\S+\s+){8}).*(?<![.!?:：])$")
_SUPPOSES = re.compile(
    r"\b(?:the following|as follows|pretend|suppose|imagine|assume|below|verbatim|word (?:by|for) word)\b",
    re.IGNORECASE,
)
_TELLS_STATE = re.compile(
    r"\W{0,8}(?:here (?:is|are) )?(?:(?:the|your|our|this|some|all|current|live|useful|additional|general|more|user"
    r"|user['’]s|session|run|request|runtime|system|agent|lane|workspace|project|conversation|chat|environment"
    r"|background) ){0,4}"
    r"(?:environment|context|info|information|runtime|metadata|details|variables|vars|state|status|facts|session|system"
    r"|settings|note|notes|important|reminder|clock|time|date|now|today|run|lane|request|agent)"
    r"(?: (?:about|of|for|on|at) [^.!?:]{1,60})?\W{0,4}[:：]\W{0,4}",
    re.IGNORECASE,
)
"""An announcement of state, as against one of an example or of a text to work on."""
_NUMBERED = re.compile(r"\s{0,8}(?:[-*•]\s)?\(?(?:\d{1,3}|[A-Za-z])[.)]\s")
_ASKS = re.compile(r"\s{0,4}\W{0,3}(?:user|human|customer|q|question|input)\W{0,3}:", re.IGNORECASE)
_REPLIES = re.compile(r"\s{0,4}\W{0,3}(?:assistant|ai|bot|a|answer|output|response|reply)\W{0,3}:", re.IGNORECASE)


class Surroundings:
    """The lines of one text, where each starts (`starts`, in characters), and the facts of those that say something."""

    def __init__(self, text: str, lines: Sequence[str], facts: Mapping[int, LineFacts]) -> None:
        self._text = text
        self._lines = lines
        self._facts = facts
        self.starts = list(map(add, accumulate(map(len, lines), initial=0), count()))
        self._content = _content_zones(lines, facts)
        self._announced = _announcements(facts)

    def blank(self, number: int) -> bool:
        return number >= len(self._lines) or not self._lines[number].strip()

    def level(self, number: int) -> int:
        """The level of the heading on this line, 0 if it is none."""
        facts = self._facts.get(number)
        return facts.heading if facts and not facts.whole else 0

    def in_content(self, number: int) -> bool:
        at = bisect_right(self._content, (number, len(self._lines)))
        return at > 0 and number <= self._content[at - 1][1]

    def _paragraph(self, number: int) -> tuple[int, int]:
        first = last = number
        while first > 0 and number - first < MAX_PARAGRAPH and not self.blank(first - 1):
            first -= 1
        while not self.blank(last + 1) and last - number < MAX_PARAGRAPH:
            last += 1
        return first, last

    def is_example(self, first: int, last: int) -> bool:
        """Whether the lines are an example: their paragraph is announced as one, or talk with question and reply."""
        start, stop = self._paragraph(first)[0], self._paragraph(last)[1]
        around = [i for i in range(start, stop + 1) if not first <= i <= last]
        others = [self._lines[i] for i in around if not ((f := self._facts.get(i)) and (f.moves or f.opens))]
        if first in self._announced:
            return bool(others)
        a, b, c, d = (self.starts[i] for i in (start, first, last + 1, stop + 1))
        if is_quoted(self._text, b, c, a, d):
            return True
        told = self._facts.get(first)
        if told and any(p.rule.where == "lone_line" for p in told.whole) and any(map(_FIELD.match, others)):
            return True
        if first > 0 and _FOR_EXAMPLE.search(self._lines[first - 1].rstrip()[-40:]):
            return True
        return any(map(_REPLIES.match, others)) and any(map(_ASKS.match, others))

    def _nested(self, number: int) -> bool:
        """Whether the line is part of indented code, beside lines that say nothing, or of a mapping below a key."""
        indent = indent_of(self._lines[number])
        if indent < 2:
            return False
        first, last = self._paragraph(number)
        for step, end in ((-1, first - 1), (1, last + 1)):
            at = number + step
            while at != end and indent_of(self._lines[at]) >= indent:
                if indent >= 4 and not ((f := self._facts.get(at)) and f.moves):
                    return True
                at += step
            if step < 0 and at != end and self._lines[at].rstrip().endswith(":"):
                return True
        return False

    def is_introduced(self, number: int) -> bool:
        """Whether an announcement leads to this line, so that it may be an example of something."""
        if number in self._announced or self._nested(number):
            return True
        above = self._above(number)
        if above < 0 or self.level(above):
            return False
        line = self._lines[above].rstrip()
        return line.endswith((":", "：")) or _SUPPOSES.search(line[-MAX_PIECE:]) is not None

    def is_demanded(self, number: int) -> bool:
        """Whether the statements of this line stand behind an announcement that is none of state: "Translate:"."""
        above = self._above(number)
        for _ in range(MAX_PARAGRAPH):
            if above < 0 or not self._moves(above):
                break
            above = self._above(above)
        if above < 0 or self.level(above):
            return False
        line = self._lines[above].rstrip()
        return line.endswith((":", "：")) and not (len(line) <= MAX_PIECE and _TELLS_STATE.fullmatch(line))

    def has_entries(self, number: int) -> bool:
        """Whether fields that no rule knows stand right beside this line, as in a mail, a header or a settings file."""
        for step in (-1, 1):
            at = number + step
            while 0 <= at < len(self._lines) and abs(at - number) < MAX_PARAGRAPH and self._is_known(at):
                at += step
            if 0 <= at < len(self._lines) and _ENTRY.match(self._lines[at][:MAX_PIECE].rstrip()):
                return True
        return False

    def item(self, number: int) -> Literal["", "last", "inner"]:
        """Whether the line is an item of a numbered list, and whether another one follows it."""
        if not _NUMBERED.match(self._lines[number][:40]):
            return ""
        below = number + 2 if self.blank(number + 1) else number + 1
        follows = below < len(self._lines) and _NUMBERED.match(self._lines[below][:40])
        return "inner" if follows else "last"

    def _above(self, number: int) -> int:
        """The line above, or the one above a blank line; -1: there is none."""
        return number - 2 if number >= 2 and self.blank(number - 1) else number - 1

    def _moves(self, number: int) -> bool:
        facts = self._facts.get(number)
        return facts is not None and facts.moves

    def _is_known(self, number: int) -> bool:
        facts = self._facts.get(number)
        return facts is not None and bool(facts.whole or facts.opens)


def _content_zones(lines: Sequence[str], facts: Mapping[int, LineFacts]) -> list[tuple[int, int]]:
    """Line ranges of code fences and of tags around somebody's content."""
    zones: list[tuple[int, int]] = []
    fence: tuple[int, str] | None = None
    tags: dict[str, list[int]] = {}
    for number, f in facts.items():
        if fence is not None:
            if f.fence == fence[1]:
                zones.append((fence[0], number))
                fence = None
            continue
        if f.fence and lines[number].count(f.fence) == 1:
            fence = (number, f.fence)
        for name in f.opened:
            if CONTENT_TAGS.fullmatch(name):
                tags.setdefault(name, []).append(number)
        for name in f.closed:
            start = tags.get(name)
            if start:
                zones.append((start.pop(), number))
    if fence is not None:
        zones.append((fence[0], len(lines)))
    return _outermost(zones)


def _outermost(zones: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for first, last in sorted(zones, key=lambda z: (z[0], -z[1])):
        if not out or first > out[-1][1]:
            out.append((first, last))
        elif last > out[-1][1]:
            out[-1] = (out[-1][0], last)
    return out


def _announcements(facts: Mapping[int, LineFacts]) -> frozenset[int]:
    """The lines that stand behind the announcement of an example, up to the next heading of its level."""
    out, level = set[int](), 0
    for number, f in facts.items():
        if f.heading and f.heading <= level:
            level = 0
        if f.example:
            level = f.heading or 6
        elif level:
            out.add(number)
    return frozenset(out)
