"""Prompts without words: rows of named spans, enough to know how many tokens any two have in common.

A million prompts of thousands of tokens each fit into memory this way. One token stands for four bytes.
"""

from __future__ import annotations

from itertools import chain as chained

from prefixproxy.prefix import PrefixChain, blocks_within

BYTES_PER_TOKEN = 4
_MASK = (1 << 64) - 1


class Text:
    """Tokens `[0, n)` as `spans`: (name, end), each from the end of the one before. Two texts share a span as far as
    both have it if they share all before it. A negative name is an answer's: the server generated those tokens."""

    __slots__ = ("spans",)

    def __init__(self, spans: tuple[tuple[int, int], ...] = ()) -> None:
        self.spans = spans

    def __len__(self) -> int:
        return self.spans[-1][1] if self.spans else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and self.spans == other.spans

    def __hash__(self) -> int:
        return hash(self.spans)

    def __repr__(self) -> str:
        return f"Text({self.spans})"

    def __add__(self, other: Text) -> Text:
        start = len(self)
        return Text((*self.spans, *((name, start + end) for name, end in other.spans)))

    def head(self, n: int) -> Text:
        """Its first `n` tokens, all of it if it has fewer."""
        if n >= len(self):
            return self
        kept: list[tuple[int, int]] = []
        for name, end in self.spans:
            if end >= n:
                if n > (kept[-1][1] if kept else 0):
                    kept.append((name, n))
                break
            kept.append((name, end))
        return Text(tuple(kept))

    def common(self, other: Text) -> int:
        """Tokens that both begin with."""
        shared = 0
        for (name, end), (its_name, its_end) in zip(self.spans, other.spans, strict=False):
            if name != its_name:
                break
            shared = min(end, its_end)
            if end != its_end:
                break
        return shared

    def chain(self) -> PrefixChain:
        """What the scheduler sees of it: block hashes that two texts share as far as they share tokens."""
        parts, ends, path, block = [], dict[int, int](), 0, 0
        for name, end in self.spans:
            path = hash((path, name))
            last = blocks_within(BYTES_PER_TOKEN * end)
            parts.append([hash((path, i)) for i in range(block, last)])
            block, path = last, hash((path, end))
            ends[path & _MASK] = BYTES_PER_TOKEN * end
        return PrefixChain(tuple(chained.from_iterable(parts)), BYTES_PER_TOKEN * len(self), path & _MASK, ends)


EMPTY = Text()


def span(name: int, n: int) -> Text:
    """`n` tokens, the first of those with this name."""
    return Text(((name, n),)) if n > 0 else EMPTY


def starts_of(chain: PrefixChain, head: int) -> tuple[int, ...]:
    """Where the first message starts, behind `head` tokens, as a ticket says it."""
    digest = chain.end_at(BYTES_PER_TOKEN * head)
    return () if digest is None else (digest,)


class Trie:
    """The least prompt tokens anybody can evaluate: each distinct prefix once, less what the server generated."""

    def __init__(self) -> None:
        self.tokens = 0
        self._reach: dict[int, int] = {}

    def add(self, text: Text) -> None:
        path, start = 0, 0
        for name, end in text.spans:
            path = hash((path, name))
            known = self._reach.get(path, start)
            if end > known:
                self._reach[path] = end
                self.tokens += end - known if name >= 0 else 0
            path, start = hash((path, end)), end
