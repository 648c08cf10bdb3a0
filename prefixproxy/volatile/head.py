"""The head of one prompt as its rules see it: what is stripped, and the spans that may be cut.

Reading depends on the head and the rules alone. Which of the spans are cut is decided with what was seen to change
(`cut_flags`). Everything outside the spans makes up the head's `key`: requests of one key are one family.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat

from prefixproxy.prompt import Message, Opaque, Text
from prefixproxy.volatile.context import MAX_PARAGRAPH
from prefixproxy.volatile.lines import LineFacts, LineReader
from prefixproxy.volatile.patterns import MAX_PIECE
from prefixproxy.volatile.rules import Rule, RuleSet
from prefixproxy.volatile.spans import MAX_BLOCK, Found, TextReader

MAX_LINES = 8_000
"""Lines of one text that are looked at; the middle of a longer one is taken as it is."""
MAX_HEAD_LINES = 16_000
"""The same for all texts of a head together: those that stand nearest to its two ends are looked at."""
MAX_SPANS = 128
"""Spans of one head; a text with more of them is a log or a table, and nothing in it is volatile."""
MEMO_BYTES = 16 << 20
MAX_MEMO_LINE = MAX_PIECE
"""Longer lines are remembered by their hash (Python's own, keyed by the process) and length."""
SLICE_LINES = 64
"""Lines that are read at once where others wait: a few milliseconds."""
MIN_AHEAD_CHARS = 1 << 14
_UNREAD = LineFacts(fence="unread")
MAX_KNOWN = 64
MAX_KNOWN_CHARS = 8 << 20
"""Heads whose reading is kept, and their characters: most requests are read twice, and many heads stay as they are."""


_LABEL = re.compile(r"[^\W\d_][^\d:=：#\n]*")
_TAG_NAME = re.compile(r"<[A-Za-z][\w.:-]*")
_BLANK_LINES = re.compile(r"(?:[ \t]*\r?\n)+")


@dataclass(frozen=True, slots=True)
class Span:
    """Text that a rule knows: characters `start` to `end` of head text number `text`, and the `note` they become.

    `at_sight`: the rule may act on it at the border of the head before it was seen to change; `on_top` excludes the
    upper border, `anywhere` needs no border. `opens_head` / `closes_head`: nothing but other spans and white space
    stands before / behind it. `strict` and `weak` are the lane values it tells.
    """

    rule: Rule
    text: int
    start: int
    end: int
    note: str
    at_sight: bool
    on_top: bool
    anywhere: bool
    opens_head: bool
    closes_head: bool
    turn: bool
    strict: tuple[tuple[str, str], ...]
    weak: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HeadText:
    """One text of the head less what was stripped from it; `message` counts from the top of the prompt."""

    message: int
    part: Text
    text: str
    stripped: tuple[tuple[Rule, str], ...]


@dataclass(frozen=True, slots=True)
class HeadView:
    texts: tuple[HeadText, ...]
    spans: tuple[Span, ...]
    key: bytes

    @property
    def strips(self) -> bool:
        return any(t.stripped for t in self.texts)

    @property
    def n_chars(self) -> int:
        return sum(len(t.part.text) for t in self.texts)


class HeadReader:
    """Reads heads against one rule set. Remembers which lines say nothing, within MEMO_BYTES."""

    def __init__(self, rules: RuleSet) -> None:
        self._strips = rules.strips
        self._lines = LineReader(rules)
        self._memo: dict[str | tuple[int, int], LineFacts | None] = {}
        self._memo_bytes = 0
        self._known: OrderedDict[tuple[bytes, tuple[Message, ...]], HeadView] = OrderedDict()
        self._known_chars = 0

    def read(self, head: tuple[Message, ...], salt: bytes = b"") -> HeadView:
        """What the rules see in these messages; `salt` keeps families of different models apart. A head that was read
        lately costs a lookup."""
        place = salt, head
        view = self._known.get(place)
        if view is not None:
            self._known.move_to_end(place)
        else:
            view = self._read(head, salt)
            self._known[place] = view
            self._known_chars += view.n_chars
            while len(self._known) > MAX_KNOWN or (self._known_chars > MAX_KNOWN_CHARS and len(self._known) > 1):
                self._known_chars -= self._known.popitem(last=False)[1].n_chars
        return view

    def _read(self, head: Sequence[Message], salt: bytes) -> HeadView:
        texts = [self._stripped(i, part) for i, m in enumerate(head) for part in m.parts if isinstance(part, Text)]
        found: list[tuple[int, Found]] = []
        mentions: Counter[str] = Counter()
        for number, (text, most) in enumerate(zip(texts, _shares([t.text for t in texts]), strict=True)):
            lines, numbers = looked_at(text.text, most)
            reader = TextReader(text.text, lines, self._facts_of(lines, numbers))
            found += [(number, f) for f in reader.found()]
            mentions.update(reader.mentions())
        spans = _spans(texts, found, mentions)
        return HeadView(tuple(texts), spans, _key(head, texts, spans, salt))

    def _stripped(self, message: int, part: Text) -> HeadText:
        text, gone = part.text, list[tuple[Rule, str]]()
        for rule in self._strips:
            first, newline, rest = text.lstrip("\r\n").partition("\n")
            if len(first) < 2048 and rule.pattern.fullmatch(first.rstrip()):
                gone.append((rule, first + newline))
                text = rest.lstrip("\r\n")
        return HeadText(message, part, text, tuple(gone))

    def read_ahead(self, head: tuple[Message, ...], salt: bytes = b"") -> Iterator[None]:
        """What of a head takes long and can be done in slices: stops behind each. `read` is quick from then on."""
        texts = [part.text for message in head for part in message.texts]
        if sum(map(len, texts)) < MIN_AHEAD_CHARS or (salt, head) in self._known:
            return
        unread: dict[str | tuple[int, int], str] = {}
        for text, most in zip(texts, _shares(texts), strict=True):
            lines, numbers = looked_at(text, most)
            own = ((key, lines[number]) for key, number in zip(_keys(lines, numbers), numbers, strict=True))
            unread.update((key, line) for key, line in own if key not in self._memo)
        for number, (key, line) in enumerate(unread.items(), 1):
            self._remembered(key, line)
            if number % SLICE_LINES == 0:
                yield

    def _facts_of(self, lines: Sequence[str], numbers: Sequence[int]) -> dict[int, LineFacts]:
        """The lines that say something, by number."""
        out = dict[int, LineFacts]()
        keys = _keys(lines, numbers)
        for number, key, facts in zip(numbers, keys, map(self._memo.get, keys, repeat(_UNREAD)), strict=True):
            if facts is _UNREAD:
                facts = self._remembered(key, lines[number])
            if facts is not None:
                out[number] = facts
        return out

    def _remembered(self, key: str | tuple[int, int], line: str) -> LineFacts | None:
        facts = self._lines.facts(line.removesuffix("\r"))
        cost = 200 + len(key)
        self._memo_bytes += cost
        if self._memo_bytes > MEMO_BYTES:
            self._memo, self._memo_bytes = {}, cost
        self._memo[key] = facts
        return facts


def _keys(lines: Sequence[str], numbers: Sequence[int]) -> list[str | tuple[int, int]]:
    """What the lines of these numbers are remembered by."""
    return [
        line if len(line) <= MAX_MEMO_LINE else (hash(line), len(line))
        for line in (lines[number] for number in numbers)
    ]


def _shares(texts: Sequence[str]) -> list[int]:
    """How many lines of each text are looked at."""
    out, left = [0] * len(texts), MAX_HEAD_LINES
    for at in sorted(range(len(texts)), key=lambda i: min(i, len(texts) - 1 - i)):
        out[at] = min(MAX_LINES, left)
        left -= min(out[at], texts[at].count("\n") + 1)
    return out


def looked_at(text: str, most: int = MAX_LINES) -> tuple[list[str], Sequence[int]]:
    """The lines of a text, and the numbers of those whose facts are read: at most so many, half at each end.

    Of a text with very many lines, all in its middle are as one: beyond the lines that are read, as many stand by
    themselves as a block or a paragraph can reach.
    """
    half = most // 2
    apart = half + MAX_BLOCK + 2 * MAX_PARAGRAPH
    n_lines = text.count("\n") + 1
    if n_lines <= 2 * apart + 1:
        lines = text.split("\n")
    else:
        *first, rest = text.split("\n", apart)
        lines = first + rest.rsplit("\n", apart)
    if n_lines <= most:
        return lines, range(n_lines)
    return lines, (*range(half), *range(len(lines) - half, len(lines)))


def cut_flags(view: HeadView, changed: Sequence[bool]) -> list[bool]:
    """Which spans leave the head, given which were seen to change: those, and at the borders those that act at sight.

    A border moves inwards with each span that is cut, so that cutting twice cuts no more than cutting once.
    """
    cut = [c or (s.at_sight and s.anywhere) for s, c in zip(view.spans, changed, strict=True)]
    for i, span in enumerate(view.spans):
        if not (span.opens_head and (cut[i] or (span.at_sight and span.on_top))):
            break
        cut[i] = True
    for i in reversed(range(len(view.spans))):
        span = view.spans[i]
        if not (span.closes_head and (cut[i] or span.at_sight)):
            break
        cut[i] = True
    return cut


def _spans(texts: Sequence[HeadText], found: Sequence[tuple[int, Found]], mentions: Counter[str]) -> tuple[Span, ...]:
    if len(found) > MAX_SPANS:
        return ()
    found = _told_once(texts, found)
    opens = _touching(texts, found)
    closes = _touching(texts, found, backwards=True)
    out = []
    for i, (number, f) in enumerate(found):
        if f.border_only and not (opens[i] or (closes[i] and f.border_only == "any")):
            continue
        once = all(mentions[topic] <= 1 for topic in f.topics)
        out.append(
            Span(
                rule=f.rule,
                text=number,
                start=f.start,
                end=f.end,
                note=texts[number].text[f.note_start : f.note_end],
                at_sight=f.at_sight and once,
                on_top=f.on_top,
                anywhere=f.rule.evidence == "signature",
                opens_head=opens[i],
                closes_head=closes[i],
                turn=f.turn,
                strict=f.strict,
                weak=f.weak,
            )
        )
    return tuple(out)


def _told_once(texts: Sequence[HeadText], found: Sequence[tuple[int, Found]]) -> list[tuple[int, Found]]:
    """Without those whose label stands before several of them: they head records, and mean nothing without these."""
    labels = [_label(texts[number].text[f.note_start : f.note_end], f.rule) for number, f in found]
    counted = Counter(labels)
    return [one for one, label in zip(found, labels, strict=True) if counted[label] == 1]


def _label(note: str, rule: Rule) -> str:
    """What a statement says before its value, or the name of its tag, in small letters."""
    found = (_TAG_NAME if rule.where == "element" else _LABEL).search(note[:MAX_PIECE])
    return found[0].strip().lower() if found else note


def _touching(texts: Sequence[HeadText], found: Sequence[tuple[int, Found]], *, backwards: bool = False) -> list[bool]:
    """For each span, whether only white space stands between it and the one nearer to that border of the head."""
    out = [False] * len(found)
    number, pos = (len(texts) - 1, len(texts[-1].text)) if backwards and texts else (0, 0)
    for i in reversed(range(len(found))) if backwards else range(len(found)):
        at, f = found[i]
        if backwards:
            between = [texts[at].text[f.end :], *(t.text for t in texts[at + 1 : number]), texts[number].text[:pos]]
            if at == number:
                between = [texts[at].text[f.end : pos]]
            pos = f.start
        else:
            between = [texts[number].text[pos:], *(t.text for t in texts[number + 1 : at]), texts[at].text[: f.start]]
            if at == number:
                between = [texts[at].text[pos : f.start]]
            pos = f.end
        if any(piece and not piece.isspace() for piece in between):
            break
        out[i] = True
        number = at
    return out


def _key(head: Sequence[Message], texts: Sequence[HeadText], spans: Sequence[Span], salt: bytes) -> bytes:
    state = blake2b(salt, digest_size=16)
    by_part = {id(t.part): number for number, t in enumerate(texts)}
    spans_of = by_text(spans)
    for message in head:
        state.update(b"\xff" + message.role.value.encode())
        for part in message.parts:
            if isinstance(part, Opaque):
                state.update(b"\xfe" + part.canonical)
                continue
            number = by_part[id(part)]
            text = texts[number]
            if text.stripped and not text.text.strip():
                continue
            shown = masked(text.text, spans_of.get(number, ()))
            state.update(b"\xfe" + shown.encode("utf-8", "surrogatepass"))
    return state.digest()


def by_text(spans: Sequence[Span]) -> dict[int, list[Span]]:
    """The spans of each text, by its number."""
    out: dict[int, list[Span]] = {}
    for span in spans:
        out.setdefault(span.text, []).append(span)
    return out


def masked(text: str, spans: Sequence[Span]) -> str:
    """The text with each span (in order) replaced by its rule's name."""
    pieces, pos = list[str](), 0
    for span in spans:
        pieces += (text[pos : span.start], f"\0{span.rule.name}\0")
        pos = span.end
    pieces.append(text[pos:])
    return "".join(pieces)


def head_text(text: HeadText, cut: Sequence[Span]) -> str:
    """The text without the spans, and without the blank lines that stood on both sides of one."""
    out, pos = "", 0
    for span in cut:
        out = _joined(out, text.text[pos : span.start], first=pos == 0)
        pos = span.end
    if not cut:
        return text.text
    rest = text.text[pos:]
    return _joined(out, rest, first=False) if rest.strip() else out.rstrip()


def _joined(left: str, right: str, *, first: bool) -> str:
    """Two stretches with a cut between them."""
    if first:
        return right
    if not left.strip():
        return right.lstrip("\r\n")
    if left.endswith(("\n\n", "\n\r\n")):
        blank = _BLANK_LINES.match(right)
        return left + right[blank.end() if blank else 0 :]
    return left + right
