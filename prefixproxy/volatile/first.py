"""What a text must have for a pattern to match: the character it begins with, a digit. Most lines have not.

Read off the pattern's own parse tree, and never too strict. Of characters to begin with only ASCII is told apart: text
that begins with another one is tried with every pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

MAX_REMEMBERED = 2048
_PARSER: Any = import_module("re._parser")
_ASCII = frozenset(map(chr, range(128)))
_TWINS = {"\u017f": "s", "\u212a": "k", "\u0130": "i", "\u0131": "i"}
"""Letters outside of ASCII that equal an ASCII letter where case does not count."""
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdigit,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
}

_First = tuple[frozenset[str], bool]
"""The ASCII characters something can begin with, and whether it can be empty."""


def first_chars(pattern: re.Pattern[str]) -> frozenset[str]:
    """The ASCII characters, in lower case, with which a match of the pattern (case ignored) can begin."""
    return _read(pattern.pattern)[0]


def needs_digit(pattern: re.Pattern[str]) -> bool:
    """Whether every text that holds a match holds a digit."""
    return _read(pattern.pattern)[1]


@lru_cache(MAX_REMEMBERED)
def _read(pattern: str) -> tuple[frozenset[str], bool]:
    """Both answers from one parse, which is what costs."""
    tree = _PARSER.parse(pattern, re.IGNORECASE)
    chars, empty = _sequence(tree)
    return frozenset(c.lower() for c in (_ASCII if empty else chars)), _has_digit(tree)


def _has_digit(items: Iterable[tuple[Any, Any]]) -> bool:
    return any(_is_digit(str(op), argument) for op, argument in items)


def _is_digit(op: str, argument: Any) -> bool:
    match op:
        case "LITERAL":
            return chr(argument).isdecimal()
        case "IN":
            return all(_holds_digits(str(name), what) for name, what in argument)
        case "SUBPATTERN":
            return _has_digit(argument[3])
        case "ATOMIC_GROUP":
            return _has_digit(argument)
        case "ASSERT":
            return _has_digit(argument[1])
        case "BRANCH":
            return all(map(_has_digit, argument[1]))
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return int(argument[0]) > 0 and _has_digit(argument[2])
        case _:
            return False


def _holds_digits(name: str, what: Any) -> bool:
    match name:
        case "LITERAL":
            return chr(what).isdecimal()
        case "RANGE":
            return all(chr(code).isdecimal() for code in range(what[0], what[1] + 1))
        case _:
            return name == "CATEGORY" and str(what) == "CATEGORY_DIGIT"


def _sequence(items: Iterable[tuple[Any, Any]]) -> _First:
    chars: frozenset[str] = frozenset()
    for op, argument in items:
        first, empty = _item(str(op), argument)
        chars |= first
        if not empty:
            return chars, False
    return chars, True


def _item(op: str, argument: Any) -> _First:
    match op:
        case "LITERAL":
            return _literal(argument), False
        case "IN":
            return _one_of(argument), False
        case "ANY" | "NOT_LITERAL":
            return _ASCII, False
        case "SUBPATTERN":
            return _sequence(argument[3])
        case "ATOMIC_GROUP":
            return _sequence(argument)
        case "BRANCH":
            branches = [_sequence(branch) for branch in argument[1]]
            return frozenset().union(*(chars for chars, _ in branches)), any(empty for _, empty in branches)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            chars, empty = _sequence(argument[2])
            return chars, empty or int(argument[0]) == 0
        case "ASSERT" | "ASSERT_NOT" | "AT":
            return frozenset(), True
        case _:
            return _ASCII, True


def _literal(code: int) -> frozenset[str]:
    char = _TWINS.get(chr(code), chr(code))
    return frozenset((char.lower(), char.upper())) & _ASCII


def _one_of(items: Sequence[tuple[Any, Any]]) -> frozenset[str]:
    if items and str(items[0][0]) == "NEGATE":
        return _ASCII - _surely(items[1:])
    chars = set[str]()
    for name, argument in items:
        op = str(name)
        if op == "LITERAL":
            chars |= _literal(argument)
        elif op == "RANGE":
            low, high = argument
            inside = {c for c in (*_ASCII, *_TWINS) if low <= ord(c) <= high}
            chars |= {case for c in inside for case in _literal(ord(c))}
        elif op == "CATEGORY" and str(argument) in _CATEGORIES:
            chars |= set(filter(_CATEGORIES[str(argument)], _ASCII))
        else:
            return _ASCII
    return frozenset(chars)


def _surely(items: Sequence[tuple[Any, Any]]) -> frozenset[str]:
    """The characters that a negated set leaves out whatever their case."""
    out = set[str]()
    for name, argument in items:
        category = str(argument)
        if str(name) == "LITERAL" and chr(argument).lower() == chr(argument).upper():
            out.add(chr(argument))
        if str(name) != "CATEGORY":
            continue
        if category in _CATEGORIES:
            out |= set(filter(_CATEGORIES[category], _ASCII))
        elif (other := category.replace("_NOT_", "_")) in _CATEGORIES:
            out |= {c for c in _ASCII if not _CATEGORIES[other](c)}
    return frozenset(out)
