"""Regular expressions of rule files: named fragments, and a bound on what a pattern can cost.

Python's `re` backtracks, so a pattern is refused unless the number of ways in which it can try to match is small
whatever the text says. Three things together keep matching linear in the head: a pattern only ever sees pieces of at
most MAX_PIECE characters and at given starts, a bounded number of pieces, and has at most 2**MAX_WAYS ways to try one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from math import log2
from typing import Any

MAX_PIECE = 512
"""Characters of one line that a pattern is shown; nothing longer is a statement of a clock or an id."""
MAX_WAYS = 16.0
"""log2 of the ways a pattern may match one text; 2**16 tries of a few steps are below 10 ms, on hostile text."""

_FRAGMENT = re.compile(r"\(\?&(\w+)\)")
_PARSER: Any = import_module("re._parser")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class PatternError(ValueError):
    """The pattern cannot be used; the message is a clause that says why."""


def expand(pattern: str, fragments: Mapping[str, str], depth: int = 0) -> str:
    """Put each `(?&name)` in place, as an atomic group: what a fragment took it never gives back."""
    if depth > 8:
        raise PatternError("its fragments refer to each other in a circle")

    def put(found: re.Match[str]) -> str:
        if found[1] not in fragments:
            raise PatternError(f"there is no fragment {found[1]!r}")
        return f"(?>{expand(fragments[found[1]], fragments, depth + 1)})"

    return _FRAGMENT.sub(put, pattern)


def compiled(pattern: str, fragments: Mapping[str, str]) -> re.Pattern[str]:
    """The pattern, ready to be matched without regard to case. PatternError: it is none."""
    try:
        return re.compile(expand(pattern, fragments), re.IGNORECASE)
    except re.error as error:
        raise PatternError(f"it is no regular expression: {error}") from error


def check_cost(pattern: re.Pattern[str]) -> None:
    """PatternError: on some text this pattern may run wild."""
    ways = _ways(_PARSER.parse(pattern.pattern, re.IGNORECASE))
    if ways > MAX_WAYS:
        raise PatternError(
            f"it can match in too many ways (2**{ways:.0f}, allowed are 2**{MAX_WAYS:.0f}): "
            "bound its repeats, or make them possessive (`*+`, `{0,9}+`, `(?>...)`)"
        )


def _ways(items: Sequence[tuple[Any, Any]]) -> float:
    """log2 of an upper bound on the ways in which a sequence can match, counting what backtracking can come back to."""
    return sum(_item_ways(str(op), argument) for op, argument in items)


def _item_ways(op: str, argument: Any) -> float:
    match op:
        case "SUBPATTERN":
            return _ways(argument[3])
        case "BRANCH":
            return 1 + max(_ways(branch) for branch in argument[1])
        case "ATOMIC_GROUP":
            _bounded(_ways(argument))
            return 0.0
        case "ASSERT" | "ASSERT_NOT":
            _bounded(_ways(argument[1]))
            return 0.0
        case "GROUPREF" | "GROUPREF_EXISTS":
            raise PatternError("it refers back to a group")
        case _ if op in _REPEATS:
            return _repeat_ways(op, *argument)
        case _:
            return 0.0


def _repeat_ways(op: str, least: int, most: int, body: Sequence[tuple[Any, Any]]) -> float:
    most = min(int(most), MAX_PIECE)
    if most > 1 and _has_open_repeat(body):
        raise PatternError("it nests a repeat in a repeat: make the inner one possessive (`+` behind it)")
    inner = _ways(body)
    if op == "POSSESSIVE_REPEAT":
        _bounded(inner)
        return 0.0
    return log2(max(1, most - least + 1)) + most * inner


def _has_open_repeat(items: Sequence[tuple[Any, Any]]) -> bool:
    """Whether backtracking could shift a border between rounds: a repeat inside that can give characters back."""
    for name, argument in items:
        op = str(name)
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, body = argument
            if int(most) > max(1, int(least)) or _has_open_repeat(body):
                return True
        elif (op == "SUBPATTERN" and _has_open_repeat(argument[3])) or (
            op == "BRANCH" and any(map(_has_open_repeat, argument[1]))
        ):
            return True
    return False


def _bounded(ways: float) -> None:
    if ways > MAX_WAYS:
        raise PatternError("a part of it can match in too many ways")
