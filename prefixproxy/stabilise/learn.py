"""Text that changes though no rule knows it: found by comparing heads, told as a rule to paste.

Two heads that differ in one line look the same whether that line is state or content, so nothing here acts by itself.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import compress, islice
from operator import ne
from typing import Any
from unicodedata import combining, normalize

from prefixproxy.errors import UsageError
from prefixproxy.evidence import value_digest
from prefixproxy.prefix import shared_length
from prefixproxy.volatile.files import builtin_fragments, read_rule
from prefixproxy.volatile.lines import undecorated
from prefixproxy.volatile.patterns import MAX_PIECE

MAX_HEADS = 8
MAX_HEAD_CHARS = 1 << 20
MAX_HEAD_LINES = 1 << 15
"""Heads beyond these bounds are not compared: it would take longer than their prefill could be worth."""
MAX_LINES_DIFFERENT = 8
MIN_SHARED = 0.5
"""Share of a head's characters that must be equal, for the rest to be called a change of the same head."""
MIN_FIXED = 6
"""Letters that all values must have in common: a pattern of less would match too much."""
MAX_VALUE_WORDS = 8
ANYTHING = ".{1,300}"
MAX_COMPARED = 4096
"""Characters of a line that are compared one by one; a longer line is another one, or the same."""
MAX_SUGGESTIONS = 64
MAX_VALUES = 64

_DIGIT = re.compile(r"\d")
_SENTENCES = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A rule that would keep a head equal: `toml` is ready to paste, `values` how many different ones were seen (up to
    64) and `last_seen` when; `segment` and `line` (from 1) say where."""

    name: str
    toml: str
    values: int
    family: str
    segment: str
    line: int
    last_seen: float


@dataclass(slots=True)
class _Learned:
    """`stately`: a value was seen that looks like state."""

    where: str
    pattern: str
    family: str
    segment: str
    line: int
    values: set[bytes] = field(default_factory=set)
    last_seen: float = 0.0
    stately: bool = False


@dataclass(frozen=True, slots=True)
class _Head:
    group: bytes
    lines: tuple[str, ...]
    n_chars: int


class Learner:
    """Remembers the last few heads of different families, and what told them apart."""

    def __init__(self) -> None:
        self._heads: OrderedDict[bytes, _Head] = OrderedDict()
        self._learned: OrderedDict[str, _Learned] = OrderedDict()
        self.fresh: set[str] = set()
        """Names whose entry changed, or was dropped, since somebody last emptied this set."""

    def see(self, key: bytes, group: bytes, texts: Sequence[tuple[str, str]], now: float) -> bool:
        """A head whose spans are masked, as (segment, text) pairs; `group` keeps apart what is never compared. True if
        it taught a new rule."""
        if key in self._heads:
            self._heads.move_to_end(key)
            return False
        n_chars = sum(len(text) for _, text in texts)
        n_lines = sum(text.count("\n") + 1 for _, text in texts) if n_chars <= MAX_HEAD_CHARS else 0
        if not 0 < n_lines <= MAX_HEAD_LINES:
            return False
        lines = tuple(line for _, text in texts for line in text.split("\n"))
        head = _Head(group, lines, n_chars - n_lines + len(texts))
        taught = False
        for other in reversed(self._heads.values()):
            if other.group == group and (differing := _differing(other, head)):
                taught = self._learn(differing, key, texts, now)
                break
        self._heads[key] = head
        while len(self._heads) > MAX_HEADS:
            self._heads.popitem(last=False)
        return taught

    def suggestions(self) -> tuple[Suggestion, ...]:
        """What looks like state: a value with a digit in it, or behind a label. Other words that changed are an
        instruction, which no rule should move."""
        return tuple(
            Suggestion(name, _toml(name, one), len(one.values), one.family, one.segment, one.line, one.last_seen)
            for name, one in self._learned.items()
            if one.stately
        )

    def names(self) -> tuple[str, ...]:
        return tuple(self._learned)

    def export(self, name: str) -> dict[str, Any] | None:
        """What was learned under a name, as JSON; None if nothing was. `last_seen` is on the caller's clock."""
        one = self._learned.get(name)
        return None if one is None else {**asdict(one), "values": sorted(value.hex() for value in one.values)}

    def load(self, name: str, entry: Mapping[str, Any]) -> None:
        """Take back what was exported. ValueError, KeyError or TypeError: it was not."""
        one = _Learned(
            str(entry["where"]), str(entry["pattern"]), str(entry["family"]), str(entry["segment"]), int(entry["line"])
        )
        one.values = {bytes.fromhex(value) for value in entry["values"][:MAX_VALUES]}
        one.last_seen, one.stately = float(entry["last_seen"]), bool(entry["stately"])
        if one.pattern.startswith(ANYTHING):
            raise ValueError("it was learned when rules could begin with anything")
        try:
            read_rule(tomllib.loads(_toml(name, one))["rule"][0], "state", builtin_fragments())
        except UsageError as error:
            raise ValueError("this is no rule") from error
        self._keep(name, one)

    def _keep(self, name: str, one: _Learned) -> None:
        self._learned[name] = one
        while len(self._learned) > MAX_SUGGESTIONS:
            self.fresh.add(self._learned.popitem(last=False)[0])

    def _learn(
        self, differing: Sequence[tuple[int, str, str]], key: bytes, texts: Sequence[tuple[str, str]], now: float
    ) -> bool:
        taught = False
        for number, old, new in differing:
            found = _generalised(old, new)
            if found is None or _n_lines(found.start, texts) > 1:
                continue
            name = _name(found)
            if name not in self._learned:
                segment, line = _located(number, texts)
                self._keep(name, _Learned(found.where, found.pattern, key.hex()[:16], segment, line))
            one = self._learned[name]
            taught = taught or (found.stately and not one.stately)
            one.stately = one.stately or found.stately
            one.last_seen = now
            if len(one.values) < MAX_VALUES:
                one.values |= {value_digest(old), value_digest(new)}
            self.fresh.add(name)
        return taught


def _differing(a: _Head, b: _Head) -> list[tuple[int, str, str]]:
    """The lines in which two heads differ, if they are the same head but for a few lines; their numbers from 0."""
    if len(a.lines) != len(b.lines):
        return []
    unequal = compress(range(len(a.lines)), map(ne, a.lines, b.lines))
    numbers = list(islice(unequal, MAX_LINES_DIFFERENT + 1))
    if not 0 < len(numbers) <= MAX_LINES_DIFFERENT:
        return []
    out = [(i, a.lines[i], b.lines[i]) for i in numbers]
    different = sum(max(len(x), len(y)) - len(_common(x, y)) - len(_common(x[::-1], y[::-1])) for _, x, y in out)
    return out if different <= (1 - MIN_SHARED) * max(a.n_chars, b.n_chars) else []


_VALUE_BEGUN = re.compile(r"(?:\w*\d[\d:.,/\-]*\w*|\w+)$")
_VALUE_ENDED = re.compile(r"^(?:\w*[\d:.,/\-]*\d\w*|\w+)")
"""What both lines share of a value belongs to it: the hour of two clocks, a word that differs in its end."""
_LABEL_ENDED = re.compile(r"[:=：](?!\d)\s*(?=.*\d)")
_STILL = re.compile(r"\S*\d\S*")
_STATELY = re.compile(r"\d[:./-]\d|\d\D*\d\D*\d\D*\d|\d[A-Za-z]\w*\d|[A-Za-z]\d\w*[A-Za-z]")
_OF_A_DATE = re.compile(
    r"(?:mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}[.,]?|at|on|the|of|,|-|–",
    re.IGNORECASE,
)
_NEW_SENTENCE = re.compile(r"\s(?-i:[A-ZÄÖÜÀ-Ý])[\w'’]*,?(?:\s[\w'’,;]+){2,}[.!?]?$")


@dataclass(frozen=True, slots=True)
class _Generalised:
    """What two lines have in common: the text before and behind their values. In both, what has not changed yet but
    looks like a date, a time or an id may change as well. `shape`: of the values, if no word stands before them."""

    where: str
    start: str
    end: str
    stately: bool
    shape: str = ANYTHING

    @property
    def pattern(self) -> str:
        return f"{_opened(self.start)}{self.shape}{_opened(self.end) or '+'}"


def _generalised(old: str, new: str) -> _Generalised | None:
    """How a rule would know both lines: as a line, or as the one sentence that differs."""
    for where, a, b in (("line", _bare(old), _bare(new)), ("statement", *_sentence(old, new))):
        if (
            max(len(a), len(b)) > MAX_PIECE
            or not a
            or not b
            or not (a + b).isprintable()
            or (where == "line" and _SENTENCES.search(b))
        ):
            continue
        start = _common(a, b)
        start = _VALUE_BEGUN.sub("", start)
        end = _common(a[len(start) :][::-1], b[len(start) :][::-1])[::-1]
        end = _VALUE_ENDED.sub("", end)
        start, end = _before_date(start), _behind_date(end)
        if _NEW_SENTENCE.search(end):
            continue
        if sum(map(str.isalpha, start + end)) >= MIN_FIXED:
            values = [text[len(start) : len(text) - len(end)] for text in (a, b)]
            a_value, b_value = values
            shape = ANYTHING if any(map(str.isalpha, start)) else _shape(a_value.split(), b_value.split())
            if shape:
                labelled = start.rstrip().endswith((":", "="))
                return _Generalised(where, start, end, labelled or any(map(_DIGIT.search, values)), shape)
    return None


def _shape(old: Sequence[str], new: Sequence[str]) -> str:
    """As many words, with digits where both have some; "" if there is no such likeness. At the beginning of a line
    anything would be whichever instruction ends in the same words."""
    if len(old) != len(new) or not 0 < len(old) <= MAX_VALUE_WORDS:
        return ""
    both = (_DIGIT.search(a) and _DIGIT.search(b) for a, b in zip(old, new, strict=True))
    return r"\s{1,4}".join(r"[^\s\d]{0,40}\d\S{0,80}" if digits else r"\S{1,80}" for digits in both)


def _before_date(start: str) -> str:
    """The text in front of a value, less what stands between it and its label, or before it as part of a date."""
    label = _LABEL_ENDED.search(start)
    if label:
        return start[: label.end()]
    words = list(re.finditer(r"\S+", start))
    first = len(words)
    for number in reversed(range(len(words))):
        if _STILL.fullmatch(words[number][0]):
            first = number
        elif not _OF_A_DATE.fullmatch(words[number][0]):
            break
        elif number + 1 == first and len(words[number][0]) > 2:
            first = number
    return start[: words[first].start()] if first < len(words) else start


def _behind_date(end: str) -> str:
    """The text behind a value, less the rest of a date that begins there."""
    last = 0
    for word in re.finditer(r"\S+", end):
        if _STILL.fullmatch(word[0]):
            last = word.end()
        elif not _OF_A_DATE.fullmatch(word[0]):
            break
    return end[last:]


def _bare(line: str) -> str:
    text, start = undecorated(line)
    return text[start:]


def _sentence(old: str, new: str) -> tuple[str, str]:
    a, b = _SENTENCES.split(old.strip()), _SENTENCES.split(new.strip())
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
    return (pairs[0][0].rstrip(".!"), pairs[0][1].rstrip(".!")) if len(a) == len(b) and len(pairs) == 1 else ("", "")


def _common(a: str, b: str) -> str:
    if max(len(a), len(b)) > MAX_COMPARED:
        return ""
    return a[: shared_length(a, b)]


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\ ", r"\s")


def _opened(text: str) -> str:
    """The text as a pattern that lets each date, time and id in it change."""
    pieces, pos = list[str](), 0
    for word in re.finditer(r"\S+", text):
        if _STATELY.search(word[0]):
            pieces += (_escaped(text[pos : word.start()]), r"\S{1,80}+")
            pos = word.end()
    return "".join((*pieces, _escaped(text[pos:])))


def _name(found: _Generalised) -> str:
    """Made of the first words all values share, as far as ASCII can write them."""
    plain = normalize("NFKD", f"{found.start} {found.end}".lower())
    words = re.findall(r"[a-z]{3,12}", "".join(c for c in plain if not combining(c)))[:3]
    digest = blake2b(found.pattern.encode("utf-8", "surrogatepass"), digest_size=2).hexdigest()
    return "-".join(("learned", *words, digest))


def _n_lines(start: str, texts: Sequence[tuple[str, str]]) -> int:
    """How many lines begin with this label: more than one, and they head records, which no rule may take them from."""
    if sum(map(str.isalpha, start)) < MIN_FIXED and not start.rstrip().endswith((":", "=")):
        return 0
    return sum(_bare(line).startswith(start) for _, text in texts if start in text for line in text.split("\n"))


def _located(number: int, texts: Sequence[tuple[str, str]]) -> tuple[str, int]:
    for segment, text in texts:
        n_lines = text.count("\n") + 1
        if number < n_lines:
            return segment, number + 1
        number -= n_lines
    return "", 0


def _toml(name: str, one: _Learned) -> str:
    quoted = json.dumps(one.pattern, ensure_ascii=False)[1:-1]
    why = f"Seen to change: {len(one.values)} values of line {one.line} of {one.segment}."
    return (
        f'[[rule]]\nname = "{name}"\nwhere = "{one.where}"\npattern = "{quoted}"\ntreatment = "move"\n'
        f'evidence = "observed"\nwhy = "{why}"\n'
    )
