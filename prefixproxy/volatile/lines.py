"""What one line of a head says by itself: statements that rules know, and marks of the structure around it.

A line's facts depend on the line alone, so they are remembered: a head that comes again with another clock costs one
set lookup per line, however long it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefixproxy.volatile.first import first_chars, needs_digit
from prefixproxy.volatile.patterns import MAX_PIECE
from prefixproxy.volatile.rules import Rule, RuleSet

MAX_STATEMENTS = 12
"""Statements on one line; a longer chain is a table or a log."""
MAX_SENTENCES = 64
BORDER = 8192
"""Sentence starts of one line, and its characters, that are looked at from each end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One statement: characters `start` to `end` of its line (decoration excluded), what identifies a lane,
    and whether it says enough to be believed at first sight."""

    rule: Rule
    start: int
    end: int
    label: str = ""
    value: str = ""
    at_sight: bool = False


@dataclass(frozen=True, slots=True)
class LineFacts:
    """`whole`: the statements the line consists of, companions included, if it is nothing else. `sentences`: those in a
    longer line. `mentions`: the topics the line speaks of in any way. `opens`: the block rules whose opening it is.
    `moves`: the line is statements, not only their companions. `telling`: a span may start here."""

    whole: tuple[Piece, ...] = ()
    sentences: tuple[Piece, ...] = ()
    mentions: frozenset[str] = frozenset()
    opens: tuple[Rule, ...] = ()
    fence: str = ""
    heading: int = 0
    opened: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    example: bool = False
    moves: bool = False
    telling: bool = False


_NOTHING = LineFacts()

_FENCE = re.compile(r"\s{0,3}(`{3}|~{3}|\"{3}|'{3})")
_QUOTE_FENCES = ('"""', "'''")
_HEADING = re.compile(r"(#{1,6})\s")
_TAG = re.compile(r"<(/?)([A-Za-z][\w.:-]{0,63})(?:\s[^<>]{0,300})?>")
_EXAMPLE = re.compile(
    r"\W{0,8}(?:for example|(?:few[- ]?shot |sample |example )?(?:examples?|dialogues?|conversations?|transcripts?)"
    r"|few[- ]?shots?|samples?|demonstrations?|(?:example|sample) \w{1,20}|(?:output|response|answer) format|format)"
    r"(?: \(?\w{1,12}\)?){0,3}\W{0,4}",
    re.IGNORECASE,
)
_SAMPLE = re.compile(r"\b(?:examples?|samples?|few[- ]?shots?|demonstrations?)\b", re.IGNORECASE)
_LEADING = re.compile(r"[\s\-•‣◦#]*")
_BRACKETS = {"[": "]", "(": ")"}
_BETWEEN = re.compile(r"[.!]?[\])]?(?:\s*[|;,·•/—–]\s*|\s+-\s+|\s+|$)[\[(]?|[.!]$")
_SENTENCE_START = re.compile(r"(?:^\s*|(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+)(?=\S)")
_SENTENCE_END = re.compile(r"[.!]?(?=\s|$)")
_FULL_STOP = re.compile(r"[.!]|(?<=[.!])")
_ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "cf.", "ex.")
_QUOTES = {'"': '"', "`": "`", "“": "”", "„": "“”", "«": "»", "»": "«", "「": "」", "『": "』"}
_MARKS = re.compile(f"[{''.join(_QUOTES)}”]")
_HINT = re.compile(r"\d|day\b|tag\b", re.IGNORECASE)


class ByFirst:
    """Rules by what a text must have for them to match, in their own order."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = [(rule, first_chars(rule.pattern), needs_digit(rule.pattern)) for rule in rules]
        self._at: dict[tuple[str, bool], tuple[Rule, ...]] = {}

    def at(self, text: str, pos: int, *, digits: bool = True) -> tuple[Rule, ...]:
        """Those that can match at `pos`; `digits`: whether the text has any."""
        char = text[pos : pos + 1].lower()
        char = char if char.isascii() else "other"
        found = self._at.get((char, digits))
        if found is None:
            found = self._at[char, digits] = tuple(
                rule
                for rule, firsts, digital in self._rules
                if (char in firsts or char == "other") and (digits or not digital)
            )
        return found


class LineReader:
    """Reads lines against one rule set."""

    def __init__(self, rules: RuleSet) -> None:
        statements = (*rules.statements, *rules.companions)
        self._statements = ByFirst(statements)
        self._sentence_rules = ByFirst([rule for rule in statements if rule.where == "statement"])
        self._mentioning = [(rule, rule.mention) for rule in statements if rule.mention]
        self._elements, self._labels, self._sections = (
            ByFirst([rule for rule in rules.blocks if rule.where in kinds])
            for kinds in (("element",), ("labelled_value", "fence"), ("section",))
        )
        self._order = {rule.name: number for number, rule in enumerate(rules.blocks)}

    def facts(self, line: str) -> LineFacts | None:
        """The facts of a line without its line end; None: it says nothing. A line longer than BORDER is looked at near
        its two ends, so that its cost does not grow with it."""
        whole = sentences = ()  # type: tuple[Piece, ...]
        mentions: frozenset[str] = frozenset()
        borders = line if len(line) <= 2 * BORDER else line[:BORDER] + "\n" + line[-BORDER:]
        lowered = borders.lower()
        hint = _HINT.search(borders)
        if len(line) <= MAX_PIECE:
            whole = self._whole(line, lowered, digits=hint is not None)
        moves = not all(p.rule.companion for p in whole)
        if not moves and hint:
            sentences = tuple(self._sentences(line, lowered))
            mentions = self._mentioned(line, lowered)
        mentions |= {p.rule.topic for p in (*whole, *sentences) if not p.rule.companion}
        sentences = tuple(p for p in sentences if not is_quoted(line, p.start, p.end))
        fence = _fence_of(line)
        heading = _HEADING.match(line)
        tags = _TAG.findall(line[:MAX_PIECE]) if "<" in line[:16] else []
        opens = self._opens(line) if len(line) <= MAX_PIECE and not line.isspace() else ()
        example = _EXAMPLE.fullmatch(line)
        if not (whole or sentences or mentions or opens or fence or heading or tags or example):
            return None
        facts = LineFacts(
            whole=whole,
            sentences=sentences,
            mentions=mentions,
            opens=opens,
            fence=fence,
            heading=len(heading[1]) if heading else 0,
            opened=tuple(name.lower() for slash, name in tags if not slash),
            closed=tuple(name.lower() for slash, name in tags if slash),
            example=example is not None
            and (line.rstrip().endswith(":") or heading is not None or _SAMPLE.search(line) is not None),
            moves=moves,
            telling=moves or bool(sentences) or bool(opens),
        )
        return None if facts == _NOTHING else facts

    def _whole(self, line: str, lowered: str, *, digits: bool) -> tuple[Piece, ...]:
        """The statements of a line that is nothing but statements, else ()."""
        text, pos = undecorated(line)
        end, out = len(text), list[Piece]()
        while pos < end:
            piece = _at(text, self._statements.at(text, pos, digits=digits), pos, lowered, whole_line=True)
            if piece is None or len(out) == MAX_STATEMENTS:
                return ()
            out.append(piece)
            gap = _BETWEEN.match(text, piece.end)
            if gap is None or (gap.end() == piece.end and piece.end < end):
                return ()
            pos = gap.end()
        return tuple(out)

    def _sentences(self, line: str, lowered: str) -> Iterator[Piece]:
        """Statements that are sentences of their own in a longer line."""
        starts = [m.end() for m in _SENTENCE_START.finditer(line, 0, BORDER)]
        if len(line) > BORDER:
            starts += [m.end() for m in _SENTENCE_START.finditer(line, max(BORDER, len(line) - BORDER))]
        if len(starts) > 2 * MAX_SENTENCES:
            starts = starts[:MAX_SENTENCES] + starts[-MAX_SENTENCES:]
        for start in starts:
            piece = _at(line, self._sentence_rules.at(line, start), start, lowered, whole_line=False)
            if piece is None or line[max(0, start - BORDER) : start].rstrip().lower().endswith(_ABBREVIATIONS):
                continue
            stop = _SENTENCE_END.match(line, piece.end)
            end = stop.end() if stop else piece.end
            if end == len(line.rstrip()) or _FULL_STOP.match(line, end - 1):
                yield Piece(piece.rule, start, end, piece.label, piece.value, piece.at_sight)

    def _mentioned(self, line: str, lowered: str) -> frozenset[str]:
        """Topics that the line speaks of in another way, as in an instruction or a quotation."""
        if len(line) > MAX_PIECE:
            return frozenset()
        return frozenset(r.topic for r, mention in self._mentioning if _is_near(r, lowered) and mention.search(line))

    def _opens(self, line: str) -> tuple[Rule, ...]:
        bare = line.strip()
        label = bare.strip("#*_:： ").strip()
        out = list[Rule]()
        tag = _TAG.match(bare) if bare.startswith("<") else None
        if tag and not tag[1]:
            out += [rule for rule in self._elements.at(tag[2], 0) if rule.pattern.fullmatch(tag[2])]
        if label:
            out += [
                rule
                for rule in self._labels.at(label, 0)
                if (rule.where == "fence" or label != bare) and rule.pattern.fullmatch(label)
            ]
        out += [rule for rule in self._sections.at(bare, 0) if rule.pattern.fullmatch(bare)]
        return tuple(sorted(out, key=lambda rule: self._order[rule.name])) if len(out) > 1 else tuple(out)


def _fence_of(line: str) -> str:
    """The mark of a code fence or a quotation that opens or closes on this line, "" if none does."""
    found = _FENCE.match(line)
    if found:
        return found[1]
    end = line[-BORDER:].rstrip()
    return end[-3:] if end.endswith(_QUOTE_FENCES) else ""


def undecorated(line: str) -> tuple[str, int]:
    """The line without emphasis, and without brackets around it all; and where its text starts behind bullets."""
    text = line.replace("*", "").rstrip()
    found = _LEADING.match(text)
    start = found.end() if found else 0
    if start < len(text) and _BRACKETS.get(text[start]) == text[-1]:
        return text[:-1], start + 1
    return text, start


def indent_of(line: str) -> int:
    """The white space in front of a line, in characters."""
    return len(line) - len(line.lstrip())


def _is_near(rule: Rule, lowered: str) -> bool:
    return not rule.needs or any(word in lowered for word in rule.needs)


def _at(text: str, rules: Sequence[Rule], pos: int, lowered: str, *, whole_line: bool) -> Piece | None:
    """The first rule's statement that starts at `pos`; `lowered` is where its words must stand."""
    for rule in rules:
        found = rule.pattern.match(text, pos, pos + MAX_PIECE)
        if found and _is_near(rule, lowered) and _ends(text, found.end(), whole_line=whole_line):
            groups = found.groupdict()
            label = groups.get("label") or rule.topic
            sure = rule.evidence != "observed" and not _doubtful(rule, found[0], whole_line=whole_line)
            return Piece(rule, pos, found.end(), label.lower(), groups.get("value") or "", sure)
    return None


def _doubtful(rule: Rule, told: str, *, whole_line: bool) -> bool:
    if rule.doubt is None or (whole_line and rule.where == "statement"):
        return False
    return rule.doubt.search(told) is not None


def is_quoted(text: str, start: int, end: int, first: int = 0, last: int | None = None) -> bool:
    """Whether `start` to `end` stands between quotation marks, or in code, that open before it and close behind it,
    within `first` to `last`, and within two BORDERs."""
    closing = ""
    for mark in _MARKS.findall(text, max(first, start - 2 * BORDER), start):
        if closing:
            closing = "" if mark in closing else closing
        else:
            closing = _QUOTES.get(mark, "")
    if not closing:
        return False
    stop = min(len(text) if last is None else last, end + 2 * BORDER)
    return any(text.find(mark, end - 1, stop) >= 0 for mark in closing)


def _ends(text: str, pos: int, *, whole_line: bool) -> bool:
    """Whether a statement may end here: at the end, or before a separator."""
    return (_BETWEEN if whole_line else _SENTENCE_END).match(text, pos) is not None
