"""What one line of a head says by itself: statements that rules know, and marks of the structure around it.

A line's facts depend on the line alone, so they are remembered: a head that comes again with another clock costs one
set lookup per line, however long it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prefixproxy.volatile import Rule, RuleSet
from prefixproxy.volatile_patterns import MAX_PIECE

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

_FENCE = re.compile(r"\s{0,3}(`{3}|~{3}|\"{3}|'{3})|.*(\"{3}|'{3})\s*$")
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
_SENTENCE_START = re.compile(r"(?:^|(?<=[.!?])|(?<=[.!?][\"')\]]))\s*(?=\S)")
_SENTENCE_END = re.compile(r"[.!]?(?=\s|$)")
_FULL_STOP = re.compile(r"[.!]|(?<=[.!])")
_ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "cf.", "ex.")
_QUOTES = {'"': '"', "`": "`", "“": "”", "„": "“”", "«": "»", "»": "«", "「": "」", "『": "』"}
_MARKS = re.compile(f"[{''.join(_QUOTES)}”]")
_HINT = re.compile(r"\d|day\b|tag\b", re.IGNORECASE)


class LineReader:
    """Reads lines against one rule set."""

    def __init__(self, rules: RuleSet) -> None:
        self._statements = (*rules.statements, *rules.companions)
        self._blocks = rules.blocks
        self._words = tuple({word for rule in self._statements for word in rule.needs})

    def facts(self, line: str) -> LineFacts | None:
        """The facts of a line without its line end; None: it says nothing."""
        whole = sentences = ()  # type: tuple[Piece, ...]
        mentions: frozenset[str] = frozenset()
        rules = self._near(line)
        if len(line) <= MAX_PIECE:
            whole = self._whole(line, rules)
        moves = not all(p.rule.companion for p in whole)
        if not moves and _HINT.search(line):
            sentences = tuple(self._sentences(line, [r for r in rules if r.where == "statement"]))
            mentions = self._mentioned(line, rules)
        mentions |= {p.rule.topic for p in (*whole, *sentences) if not p.rule.companion}
        sentences = tuple(p for p in sentences if not is_quoted(line, p.start, p.end))
        fence = _FENCE.match(line)
        heading = _HEADING.match(line)
        tags = _TAG.findall(line[:MAX_PIECE]) if "<" in line[:16] else []
        opens = tuple(self._opens(line)) if len(line) <= MAX_PIECE and not line.isspace() else ()
        facts = LineFacts(
            whole=whole,
            sentences=sentences,
            mentions=mentions,
            opens=opens,
            fence=(fence[1] or fence[2]) if fence else "",
            heading=len(heading[1]) if heading else 0,
            opened=tuple(name.lower() for slash, name in tags if not slash),
            closed=tuple(name.lower() for slash, name in tags if slash),
            example=_EXAMPLE.fullmatch(line) is not None
            and (line.rstrip().endswith(":") or heading is not None or _SAMPLE.search(line) is not None),
            moves=moves,
            telling=moves or bool(sentences) or bool(opens),
        )
        return None if facts == _NOTHING else facts

    def _near(self, line: str) -> list[Rule]:
        """The statement rules one of whose words is in the line."""
        lowered = (line if len(line) <= 2 * BORDER else line[:BORDER] + "\n" + line[-BORDER:]).lower()
        words = {word for word in self._words if word in lowered}
        return [rule for rule in self._statements if not rule.needs or not words.isdisjoint(rule.needs)]

    def _whole(self, line: str, rules: Sequence[Rule]) -> tuple[Piece, ...]:
        """The statements of a line that is nothing but statements, else ()."""
        text, pos = undecorated(line)
        end, out = len(text), list[Piece]()
        while pos < end:
            piece = _at(text, rules, pos, whole_line=True)
            if piece is None or len(out) == MAX_STATEMENTS:
                return ()
            out.append(piece)
            gap = _BETWEEN.match(text, piece.end)
            if gap is None or (gap.end() == piece.end and piece.end < end):
                return ()
            pos = gap.end()
        return tuple(out)

    def _sentences(self, line: str, rules: Sequence[Rule]) -> Iterator[Piece]:
        """Statements that are sentences of their own in a longer line."""
        if not rules:
            return
        starts = [m.end() for m in _SENTENCE_START.finditer(line, 0, BORDER)]
        if len(line) > BORDER:
            starts += [m.end() for m in _SENTENCE_START.finditer(line, max(BORDER, len(line) - BORDER))]
        if len(starts) > 2 * MAX_SENTENCES:
            starts = starts[:MAX_SENTENCES] + starts[-MAX_SENTENCES:]
        for start in starts:
            piece = _at(line, rules, start, whole_line=False)
            if piece is None or line[:start].rstrip().lower().endswith(_ABBREVIATIONS):
                continue
            stop = _SENTENCE_END.match(line, piece.end)
            end = stop.end() if stop else piece.end
            if end == len(line.rstrip()) or _FULL_STOP.match(line, end - 1):
                yield Piece(piece.rule, start, end, piece.label, piece.value, piece.at_sight)

    def _mentioned(self, line: str, rules: Sequence[Rule]) -> frozenset[str]:
        """Topics that the line speaks of in another way, as in an instruction or a quotation."""
        if len(line) > MAX_PIECE:
            return frozenset()
        return frozenset(r.topic for r in rules if r.mention and r.mention.search(line))

    def _opens(self, line: str) -> Iterator[Rule]:
        bare = line.strip()
        label = bare.strip("#*_:： ").strip()
        tag = _TAG.match(bare) if bare.startswith("<") else None
        for rule in self._blocks:
            if rule.where == "element":
                if tag and not tag[1] and rule.pattern.fullmatch(tag[2]):
                    yield rule
            elif rule.where == "labelled_value":
                if label and label != bare and rule.pattern.fullmatch(label):
                    yield rule
            elif rule.pattern.fullmatch(bare if rule.where == "section" else label):
                yield rule


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


def _at(text: str, rules: Sequence[Rule], pos: int, *, whole_line: bool) -> Piece | None:
    """The first rule's statement that starts at `pos`."""
    for rule in rules:
        found = rule.pattern.match(text, pos, pos + MAX_PIECE)
        if found and _ends(text, found.end(), whole_line=whole_line):
            groups = found.groupdict()
            label = groups.get("label") or rule.topic
            sure = rule.evidence != "observed" and not _doubtful(rule, found[0], whole_line=whole_line)
            return Piece(rule, pos, found.end(), label.lower(), groups.get("value") or "", sure)
    return None


def _doubtful(rule: Rule, told: str, *, whole_line: bool) -> bool:
    if rule.doubt is None or (whole_line and rule.where == "statement"):
        return False
    return rule.doubt.search(told) is not None


def is_quoted(text: str, start: int, end: int) -> bool:
    """Whether `start` to `end` stands between quotation marks, or in code, that open before it and close behind it."""
    closing = ""
    for mark in _MARKS.findall(text, 0, start):
        if closing:
            closing = "" if mark in closing else closing
        else:
            closing = _QUOTES.get(mark, "")
    return bool(closing) and any(mark in text[end - 1 :] for mark in closing)


def _ends(text: str, pos: int, *, whole_line: bool) -> bool:
    """Whether a statement may end here: at the end, or before a separator."""
    return (_BETWEEN if whole_line else _SENTENCE_END).match(text, pos) is not None
