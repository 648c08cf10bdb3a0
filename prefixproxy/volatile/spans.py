"""Finds the spans of one head text: lines, sentences and blocks that rules know, where they mean what they say."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prefixproxy.volatile.context import Surroundings
from prefixproxy.volatile.lines import LineFacts, Piece
from prefixproxy.volatile.rules import Rule

MAX_TELLING = 512
MAX_BLOCK = 2_000
"""Lines of one block."""
MAX_BLOCK_CHARS = 1 << 18
"""Characters of a block whose end is looked for."""
_CLOSING = re.compile(r"</([A-Za-z][\w.:-]{0,63})>")
_NUMBER = re.compile(r"\s*(?:[-*•]\s*)?\(?(?:\d{1,3}|[A-Za-z])[.)]")
_MARK = re.compile(r"[:=：]")


@dataclass(frozen=True, slots=True)
class Found:
    """A span before the rest of the head is known. `start` to `end` is cut, `note_start` to `note_end` of it kept."""

    rule: Rule
    start: int
    end: int
    note_start: int
    note_end: int
    topics: tuple[str, ...]
    at_sight: bool
    on_top: bool
    border_only: Literal["", "any", "top"]
    turn: bool
    strict: tuple[tuple[str, str], ...]
    weak: tuple[tuple[str, str], ...]


class TextReader:
    """One text: its lines, and the facts of those that say something."""

    def __init__(self, text: str, lines: Sequence[str], facts: Mapping[int, LineFacts]) -> None:
        self._text = text
        self._lines = lines
        self._facts = facts
        self._around = Surroundings(text, lines, facts)
        self._starts = self._around.starts
        self._fences = [(i, f.fence) for i, f in facts.items() if f.fence]
        self._closings: dict[str, list[int]] | None = None
        self._found: list[Found] | None = None

    def mentions(self) -> list[str]:
        """Each topic once for each line or block that speaks of it, wherever it stands."""
        blocks = [f for f in self.found() if f.rule.where in ("element", "labelled_value")]
        ends = {bisect_right(self._starts, f.start) - 1: bisect_left(self._starts, f.end) - 1 for f in blocks}
        firsts = sorted(ends)
        free = []
        for number, f in self._facts.items():
            at = bisect_right(firsts, number)
            if f.mentions and (at == 0 or number > ends[firsts[at - 1]]):
                free.append(f)
        return [topic for f in free for topic in f.mentions] + [f.rule.topic for f in blocks]

    def found(self) -> list[Found]:
        """The spans in order; none overlaps another. A text full of statements is a log, and has none."""
        if self._found is None:
            telling = [number for number, f in self._facts.items() if f.telling]
            self._found = self._find(telling) if len(telling) <= MAX_TELLING else []
        return self._found

    def _find(self, telling: Sequence[int]) -> list[Found]:
        out, free = list[Found](), 0
        for number in telling:
            if number < free or self._around.in_content(number):
                continue
            facts = self._facts[number]
            block = self._block(number, facts, free) or self._front_matter(number)
            if block is not None:
                found, free = block
                out.append(found)
            elif self._is_said(number, facts):
                if facts.moves:
                    out.append(self._line(number, facts))
                else:
                    out.extend(self._sentences(number, facts))
        return out

    def _is_said(self, number: int, facts: LineFacts) -> bool:
        """Whether the line's statements speak for themselves: no example, and nothing somebody asks to work on."""
        tells = facts.moves or bool(facts.sentences)
        return tells and not self._around.is_example(number, number) and not self._around.is_demanded(number)

    # Lines and sentences

    def _line(self, number: int, facts: LineFacts) -> Found:
        return self._lines_found(
            number, number, facts.whole, sure=not facts.heading or _MARK.search(self._lines[number]) is not None
        )

    def _front_matter(self, number: int) -> tuple[Found, int] | None:
        """The front matter that begins on the line above, if it is nothing but statements: its marks go with them."""
        if not 0 < number <= 8 or "".join(self._lines[:number]).strip() != "---":
            return None
        last, pieces = number, list[Piece]()
        while (facts := self._facts.get(last)) and facts.moves:
            pieces += facts.whole
            last += 1
        if last == number or last >= len(self._lines) or self._lines[last].rstrip() != "---":
            return None
        return self._lines_found(number - 1, last, pieces, sure=False), last + 1

    def _lines_found(self, first: int, last: int, told: Sequence[Piece], *, sure: bool) -> Found:
        pieces = [p for p in told if not p.rule.companion]
        labelled = [p for p in pieces if p.rule.evidence != "observed"]
        start, stop = self._starts[first], self._starts[last + 1] - 1
        line = "\n".join(self._lines[first : last + 1])
        return Found(
            rule=(labelled or pieces)[0].rule,
            start=start,
            end=min(stop + 1, len(self._text)),
            note_start=start + len(line) - len(line.lstrip()),
            note_end=start + len(line.rstrip()),
            topics=tuple({p.rule.topic for p in labelled}),
            at_sight=sure and any(p.at_sight for p in pieces) and not self._waits(first),
            on_top=True,
            border_only=_border(pieces),
            turn=any(p.rule.varies == "turn" for p in pieces),
            strict=_identities(pieces, "strict"),
            weak=_identities(pieces, "weak"),
        )

    def _waits(self, number: int) -> bool:
        """Whether a line waits to be seen to change, whatever it says."""
        return self._around.is_introduced(number) or self._around.has_entries(number)

    def _sentences(self, number: int, facts: LineFacts) -> Iterator[Found]:
        line, base = self._lines[number], self._starts[number]
        for piece in facts.sentences:
            before = len(line[: piece.start].rstrip())
            after = len(line) - len(line[piece.end :].lstrip())
            ends_line = after == len(line) and before > 0
            start, end = (before, len(line.rstrip())) if ends_line else (piece.start, after)
            if ends_line and _NUMBER.fullmatch(line[:before]):
                if self._around.item(number) == "inner":
                    continue
                start, end = 0, min(len(line) + 1, len(self._text) - base)
            yield Found(
                rule=piece.rule,
                start=base + start,
                end=base + end,
                note_start=base + piece.start,
                note_end=base + piece.end,
                topics=(piece.rule.topic,),
                at_sight=piece.at_sight and not self._around.is_introduced(number),
                on_top=True,
                border_only="",
                turn=piece.rule.varies == "turn",
                strict=_identities([piece], "strict"),
                weak=_identities([piece], "weak"),
            )

    # Blocks

    def _block(self, number: int, facts: LineFacts, free: int) -> tuple[Found, int] | None:
        for rule in facts.opens:
            lines = self._extent(rule, number)
            if lines is None:
                continue
            first, last = self._with_lead(rule, lines[0], lines[1], free)
            if self._around.is_example(first, last):
                continue
            start, stop = self._starts[first], self._starts[last + 1] - 1
            own = self._lines[first : last + 1]
            found = Found(
                rule=rule,
                start=start,
                end=min(stop + 1, len(self._text)),
                note_start=start,
                note_end=start + len("\n".join(own).rstrip()),
                topics=(rule.topic,),
                at_sight=rule.evidence != "observed" and not self._around.is_introduced(first),
                on_top=rule.where != "labelled_value",
                border_only="",
                turn=rule.varies == "turn",
                strict=_named_lanes(rule, own),
                weak=(),
            )
            return found, last + 1
        return None

    def _extent(self, rule: Rule, number: int) -> tuple[int, int] | None:
        """First and last line of the block that opens here, without lead-in; None if it is no such block."""
        match rule.where:
            case "element":
                return self._element(rule, number)
            case "labelled_value":
                return self._labelled(rule, number)
            case "section":
                return self._section(rule, number)
            case _:
                return self._fence(rule, number)

    def _element(self, rule: Rule, number: int) -> tuple[int, int] | None:
        name = self._facts[number].opened[0]
        if self._closings is None:
            self._closings = _closings(self._lines)
        closings = self._closings.get(name, [])
        at = bisect_left(closings, number)
        if at == len(closings) or closings[at] - number > MAX_BLOCK:
            return None
        last = closings[at]
        if self._starts[last + 1] - self._starts[number] > MAX_BLOCK_CHARS:
            return None
        content = "\n".join(self._lines[number : last + 1]).strip()
        inner, mark = content[content.index(">") + 1 :], f"</{name}>"
        if not inner.lower().endswith(mark) or inner.lower().count(mark) > 1:
            return None
        told = [line.strip() for line in inner[: -len(mark)].splitlines() if line.strip()]
        if not told or (rule.inside and not any(rule.inside.fullmatch(line) for line in told if len(line) < 512)):
            return None
        return number, last

    def _labelled(self, rule: Rule, number: int) -> tuple[int, int] | None:
        assert rule.value is not None
        at = number + 1
        if self._facts[number].heading and self._around.blank(at):
            at += 1
        first, last, told = at, at - 1, False
        while at < len(self._lines) and at - first < 8 and not self._around.blank(at):
            bare, facts = self._lines[at].replace("*", "").strip().lstrip("-•# ").strip(), self._facts.get(at)
            value = len(bare) < 512 and rule.value.fullmatch(bare.rstrip("."))
            if not value and not (facts and facts.whole):
                break
            said = facts is not None and facts.moves and any(p.rule.topic == rule.topic for p in facts.whole)
            told, last, at = told or bool(value) or said, at, at + 1
        if not told:
            return None
        stands_alone = self._around.blank(at) or self._around.level(at) > 0
        return (number, last) if stands_alone else (first, last)

    def _section(self, rule: Rule, number: int) -> tuple[int, int] | None:
        at = last = number
        while at + 1 < len(self._lines) and at - number < MAX_BLOCK:
            at += 1
            line = self._lines[at]
            if rule.until:
                if self._around.blank(at - 1) and rule.until.fullmatch(line[:500].rstrip()):
                    break
            elif not (rule.body and len(line) <= 512 and rule.body.fullmatch(line.rstrip())):
                break
            last = last if self._around.blank(at) else at
        return (number, last) if last > number else None

    def _fence(self, rule: Rule, number: int) -> tuple[int, int] | None:
        at = bisect_left(self._fences, (number + 1, ""))
        if len(self._fences) < at + 2:
            return None
        (opening, mark), (closing, end) = self._fences[at : at + 2]
        if mark != end or opening - number > 8:
            return None
        between = [line.strip() for line in self._lines[number + 1 : opening] if not line.isspace() and line]
        if between and not (rule.body and all(len(line) < 512 and rule.body.fullmatch(line) for line in between)):
            return None
        inner = [line.strip() for line in self._lines[opening + 1 : closing]]
        if rule.inside and not any(rule.inside.match(line) for line in inner[:200] if len(line) < 512):
            return None
        return number, closing

    def _with_lead(self, rule: Rule, first: int, last: int, free: int) -> tuple[int, int]:
        """The block with the line that introduces it, and with its heading if nothing else stands under that."""
        if rule.lead and first > free and rule.lead.fullmatch(self._lines[first - 1].strip()[:512]):
            first -= 1
        above = first - 2 if first >= 2 and self._around.blank(first - 1) else first - 1
        level = self._around.level(above) if above >= free else 0
        if level:
            below = next((i for i in range(last + 1, len(self._lines)) if not self._around.blank(i)), None)
            if below is None or 0 < self._around.level(below) <= level:
                first = above
        return first, last


def _border(pieces: Sequence[Piece]) -> Literal["", "any", "top"]:
    places = {piece.rule.where for piece in pieces}
    if places <= {"top_line"}:
        return "top"
    return "any" if places <= {"edge_line", "top_line"} else ""


def _identities(pieces: Sequence[Piece], kind: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({(p.label, p.value) for p in pieces if p.rule.identity == kind}))


def _named_lanes(rule: Rule, lines: Sequence[str]) -> tuple[tuple[str, str], ...]:
    if rule.names_lane is None:
        return ()
    found = (rule.names_lane.match(line[:512]) for line in lines)
    return tuple(sorted({(rule.topic, m["value"].strip()) for m in found if m}))


def _closings(lines: Sequence[str]) -> dict[str, list[int]]:
    """The lines on which each tag is closed."""
    out: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        if "</" in line:
            for name in {m[1].lower() for m in _CLOSING.finditer(line)}:
                out.setdefault(name, []).append(number)
    return out
