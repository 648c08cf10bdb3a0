"""Two prompts side by side: where the later one leaves the earlier one's prefix, and what that costs.

Everything is judged on canonical bytes (see `chat`), tokens are estimated. What stands in both prompts behind their
first difference is *lost*: it would be in the cache, had the difference stood behind it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from prefixproxy.chat import Canonical
from prefixproxy.chat_parts import PART
from prefixproxy.prefix import shared_bytes
from prefixproxy.stabilise.learn import MIN_SHARED
from prefixproxy.stabilise.notes import SEAM

MIN_LOST_TOKENS = 4
"""Fewer tokens than this that two prompts have in common by chance, or at little cost, are no broken prefix."""
MIN_LOST_IN_NEWEST_TOKENS = 32
"""The same where nothing but the newest messages differ, in which people use the same turns of phrase, as long as more
is kept than lost."""
EXCERPT_BEFORE = 24
EXCERPT_AFTER = 32
BYTES_PER_TOKEN = 4

_BORDERS = re.compile(rb"[\xfd-\xff]")
_AS_LINE_ENDS = bytes.maketrans(b"\xfd\xfe\xff", b"\n\n\n")
_ROLES = re.compile(rb"\xff[a-z]*\xfe?")
_PIECES = re.compile(rb"[^\n.!?,;{}\[\]\xfd-\xff]+")
"""Clauses, lines, members of JSON: what is found again in another prompt though the text around it changed."""
_MIN_PIECE = 4
_MIN_ENDS = 8
_MAX_PAIRED = 256
_NOTES = re.compile(re.escape(SEAM.strip().encode()) + rb"[^\xfd-\xff]*")


class Verdict(StrEnum):
    """What a later prompt is to an earlier one."""

    IDENTICAL = "identical"
    EXTENDS = "extends"
    CONTAINED = "contained"
    BRANCHES = "branches"
    DIFFERENT = "different"
    BREAKS = "breaks"


MEANING = {
    Verdict.IDENTICAL: "the same prompt",
    Verdict.EXTENDS: "the later prompt goes on from the whole earlier one",
    Verdict.CONTAINED: "the later prompt is the beginning of the earlier one",
    Verdict.BRANCHES: "they part where new text begins: next to nothing that both have stands behind it",
    Verdict.DIFFERENT: "two different prompts",
    Verdict.BREAKS: "text that both have stands behind the first difference: its tokens are lost",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first byte in which two prompts differ, as the later one has it: `offset` in canonical bytes of `segment`,
    `line` and `column` (from 1, in characters) in the client's text, None outside of text. `same` is the text before
    it, then each prompt goes on its own way."""

    segment: str
    offset: int
    part: int
    line: int | None
    column: int | None
    same: str
    earlier: str
    later: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """`kept + behind` are the tokens of the later prompt, `lost` those behind the difference that both prompts have.
    `overlap_bytes` is all they have in common."""

    verdict: Verdict
    kept: int
    behind: int
    lost: int
    overlap_bytes: int
    difference: Difference | None

    @property
    def breaks(self) -> bool:
        return self.verdict is Verdict.BREAKS


@dataclass(slots=True)
class TokenCounter:
    """Estimates tokens. `count` None: no tokenizer can be used, and four bytes are one token."""

    count: Callable[[str], int] | None
    _known: dict[bytes, int] = field(default_factory=dict)

    def of(self, parts: Iterable[bytes]) -> int:
        """Tokens of canonical bytes, part by part; each distinct part is counted once."""
        return sum(self._one(part) for part in parts)

    def _one(self, part: bytes) -> int:
        if self.count is None:
            return len(part) // BYTES_PER_TOKEN
        if part not in self._known:
            self._known[part] = self.count(part.translate(_AS_LINE_ENDS).decode("utf-8", "replace").strip("\n"))
        return self._known[part]


def compare(earlier: Canonical, later: Canonical, tokens: TokenCounter) -> Comparison:
    """What the later prompt keeps of the earlier one."""
    a, b = b"".join(earlier.parts), b"".join(later.parts)
    shared = shared_bytes(a, b)
    kept = tokens.of(_up_to(later, shared))
    behind = tokens.of(later.parts) - kept
    if shared == min(len(a), len(b)):
        verdict = Verdict.EXTENDS if shared == len(a) else Verdict.CONTAINED
        verdict = Verdict.IDENTICAL if len(a) == len(b) else verdict
        return Comparison(verdict, kept, max(0, behind), 0, shared, None)
    common = _common_bytes(_tail(a, shared), _tail(b, shared))
    lost = round(max(0, behind) * common / max(1, _n_bytes(_pieces(b[shared:]))))
    return Comparison(
        verdict=_verdict(earlier, later, shared, kept, lost),
        kept=kept,
        behind=max(0, behind),
        lost=lost,
        overlap_bytes=shared + common,
        difference=_difference(a, b, later, shared),
    )


def shown(text: str) -> str:
    """Text on one line, with everything that does not print escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _up_to(form: Canonical, n_bytes: int) -> list[bytes]:
    out, left = [], n_bytes
    for part in form.parts:
        if left <= 0:
            break
        out.append(part[:left])
        left -= len(part)
    return out


def _verdict(earlier: Canonical, later: Canonical, shared: int, kept: int, lost: int) -> Verdict:
    if not _is_same_prompt(earlier, later, shared):
        return Verdict.DIFFERENT
    newest = all(form.segments[-1][1] <= shared for form in (earlier, later))
    in_head = shared < max(earlier.head_bytes, later.head_bytes)
    enough = min(MIN_LOST_IN_NEWEST_TOKENS, kept) if newest and not in_head else MIN_LOST_TOKENS
    return Verdict.BREAKS if lost >= max(enough, MIN_LOST_TOKENS) else Verdict.BRANCHES


def _is_same_prompt(earlier: Canonical, later: Canonical, shared: int) -> bool:
    """Whether at least half of the longer head is in both (without a head, of the shorter prompt)."""
    if shared >= min(earlier.head_bytes, later.head_bytes) > 0:
        return True
    heads = [_head_text(form) for form in (earlier, later)]
    if all(heads):
        a, b, size = *heads, max
    else:
        a, b, size = b"".join(earlier.parts), b"".join(later.parts), min
    return _common_bytes(a, b) >= MIN_SHARED * size(_n_bytes(_pieces(a)), _n_bytes(_pieces(b)))


def _head_text(form: Canonical) -> bytes:
    return b"".join(
        part
        for part, (label, _, end) in zip(form.parts, form.segments, strict=True)
        if end <= form.head_bytes and label != "tools"
    )


def _tail(text: bytes, start: int) -> bytes:
    """What stands behind `start`, less the notes: they are told anew where a value changed, by intention."""
    part = max((m.end() for m in _BORDERS.finditer(text, 0, start)), default=0)
    if SEAM.encode() in text[part:start]:
        found = _BORDERS.search(text, start)
        start = found.start() if found else len(text)
    return _NOTES.sub(b"", text[start:])


def _common_bytes(a: bytes, b: bytes) -> int:
    """How many bytes of `b` are in pieces that `a` has too. Pieces that differ are paired in their order: what they
    begin and end with counts as well."""
    theirs, ours = _pieces(a), _pieces(b)
    both = Counter(theirs) & Counter(ours)
    common = sum(len(piece) * n for piece, n in both.items() if len(piece.strip()) >= _MIN_PIECE)
    for old, new in islice(zip(_without(theirs, both), _without(ours, both), strict=False), _MAX_PAIRED):
        start = shared_bytes(old, new)
        end = shared_bytes(old[start:][::-1], new[start:][::-1])
        common += sum(n for n in (start, end) if n >= _MIN_ENDS)
    return common


def _pieces(text: bytes) -> list[bytes]:
    return _PIECES.findall(_ROLES.sub(PART, text))


def _n_bytes(pieces: Iterable[bytes]) -> int:
    return sum(map(len, pieces))


def _without(pieces: Iterable[bytes], gone: Counter[bytes]) -> Iterator[bytes]:
    left = Counter(gone)
    for piece in pieces:
        if left[piece] > 0:
            left[piece] -= 1
        else:
            yield piece


def _difference(a: bytes, b: bytes, later: Canonical, at: int) -> Difference:
    segment, offset = later.locate(at)
    borders = [m.start() for m in _BORDERS.finditer(b, _segment_start(later, segment), at)]
    start = borders[-1] + 1 if borders else _segment_start(later, segment)
    is_text = segment != "tools" and (not borders or b[borders[-1]] == PART[0])
    char = at
    while char > start and b[char] & 0xC0 == 0x80:
        char -= 1
    before = b[start:char].decode("utf-8", "surrogatepass")
    column = len(before) - (before.rfind("\n") + 1)
    return Difference(
        segment=segment,
        offset=offset,
        part=sum(b[i] == PART[0] for i in borders),
        line=before.count("\n") + 1 if is_text else None,
        column=column + 1 if is_text else None,
        same=shown(before[len(before) - column :][-EXCERPT_BEFORE:]),
        earlier=_excerpt(a, char),
        later=_excerpt(b, char),
    )


def _segment_start(form: Canonical, segment: str) -> int:
    return next((start for label, start, _ in form.segments if label == segment), 0)


def _excerpt(text: bytes, at: int) -> str:
    """What a prompt goes on with at a byte, up to the next border; "" where its text ends there."""
    border = _BORDERS.search(text, at)
    end = border.start() if border else len(text)
    cut = min(end, at + 4 * EXCERPT_AFTER)
    while cut < end and text[cut] & 0xC0 == 0x80:
        cut -= 1
    return shown(text[at:cut].decode("utf-8", "surrogatepass")[:EXCERPT_AFTER])
