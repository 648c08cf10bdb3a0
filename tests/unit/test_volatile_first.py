"""What a text must have for a pattern to match is never asked too strictly."""

from __future__ import annotations

import re
import string

import pytest

from prefixproxy.volatile.first import first_chars, needs_digit


def chars(pattern: str) -> str:
    return "".join(sorted(first_chars(re.compile(pattern, re.IGNORECASE))))


@pytest.mark.parametrize(
    ("pattern", "begins_with"),
    [
        ("Lane", "l"),
        ("(?:the|your)? ?lane", " lty"),
        ("(?>time|date):", "dt"),
        ("(?P<a>x)?+[a-c]y", "abcx"),
        (r"(?!no)(?<=:)\bcwd", "c"),
        (r"\d{2}:", "0123456789"),
        (r"[^\W\d_]+", string.ascii_lowercase),
        ("\N{LATIN SMALL LETTER LONG S}ession", "s"),
        ("[\u2100-\u2130]elvin", "k"),
        ("日付", ""),
    ],
)
def test_the_characters_a_match_can_begin_with(pattern: str, begins_with: str) -> None:
    assert chars(pattern) == begins_with


@pytest.mark.parametrize("pattern", [".x", "[^x]y", r"(x)?\1y", "x*", r"[^\D]?"])
def test_what_can_begin_with_anything(pattern: str) -> None:
    assert len(chars(pattern)) == 128 - 26  # in lower case


@pytest.mark.parametrize(
    ("pattern", "digit"),
    [
        (r"time: \d+", True),
        (r"time: \d*", False),
        (r"(?:[0-9]|lundi)", False),
        (r"(?:[0-9]{2}|1st)", True),
        (r"(?=.{0,9}\d)id \w+", True),
        (r"(?!.{0,9}\d)id \w+", False),
        (r"[\dx]", False),
        (r"[^\d]", False),
        (r"(?>(?P<n>[3-5]))?", False),
    ],
)
def test_whether_a_match_holds_a_digit(pattern: str, digit: bool) -> None:
    assert needs_digit(re.compile(pattern, re.IGNORECASE)) is digit
