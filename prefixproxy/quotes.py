"""Which earlier answers a prompt quotes: how a reducer, which gathers what its lanes said, is told from a new lane.

Only checksums of runs of words are kept, never text.
"""

from __future__ import annotations

from collections import OrderedDict
from zlib import crc32

WINDOW_WORDS = 6
SAMPLE = 8
"""One run of words in so many is kept: those that start with a word of a certain checksum, the same on both sides."""
MAX_RUNS_PER_ANSWER = 64
MIN_RUNS = 2
"""An answer with fewer sampled runs is too short to be recognised."""
MIN_SHARE = 0.3
"""Share of an answer's runs that must recur: lanes that work on one briefing have phrases in common anyway."""
MAX_TEXT = 8_192
"""Characters of a prompt's end that are looked at."""


class Quotes:
    """The newest `max_answers` answers, by the request that got them."""

    def __init__(self, max_answers: int) -> None:
        self._max_answers = max_answers
        self._runs_of: OrderedDict[str, frozenset[int]] = OrderedDict()
        self._answers_with: dict[int, set[str]] = {}

    def __len__(self) -> int:
        return len(self._runs_of)

    def remember(self, request_id: str, answer: str) -> None:
        """Note an answer. One too short to be recognised is not kept."""
        runs = frozenset(sorted(_runs(answer))[:MAX_RUNS_PER_ANSWER])
        if len(runs) < MIN_RUNS or self._max_answers < 1:
            return
        self.forget(request_id)
        if len(self._runs_of) >= self._max_answers:
            self.forget(next(iter(self._runs_of)))
        self._runs_of[request_id] = runs
        for run in runs:
            self._answers_with.setdefault(run, set()).add(request_id)

    def forget(self, request_id: str) -> None:
        for run in self._runs_of.pop(request_id, frozenset()):
            holders = self._answers_with[run]
            holders.discard(request_id)
            if not holders:
                del self._answers_with[run]

    def quoted_in(self, text: str) -> set[str]:
        """The requests whose answers recur in the last `MAX_TEXT` characters of `text`."""
        seen: dict[str, int] = {}
        if self._runs_of:
            for run in _runs(text[-MAX_TEXT:]):
                for request_id in self._answers_with.get(run, ()):
                    seen[request_id] = seen.get(request_id, 0) + 1
        return {request_id for request_id, count in seen.items() if count >= MIN_SHARE * len(self._runs_of[request_id])}


def _runs(text: str) -> set[int]:
    # Inside a tool result an answer stands as a JSON string: its line ends are two characters there.
    words = text.replace("\\n", " ").replace('\\"', '"').encode("utf-8", "replace").split()
    anchors = (i for i, word in enumerate(words) if not crc32(word) % SAMPLE)
    return {crc32(b" ".join(words[i : i + WINDOW_WORDS])) for i in anchors if i + WINDOW_WORDS <= len(words)}
