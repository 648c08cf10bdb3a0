"""A suggested rule knows the next value too, not only the two it was learned from."""

from __future__ import annotations

import re

import pytest
from prompting import prompt_of

from prefixproxy.stabilise import Stabiliser
from prefixproxy.volatile import load_rules

RULES = load_rules([], frozenset())
HEAD = "You are the clerk of a map archive.\n{}\nName the rule you used, and never guess a shelf number."


@pytest.mark.parametrize(
    ("first", "second", "later"),
    [
        ("Deck clock reads 10:00", "Deck clock reads 10:01", "Deck clock reads 11:07"),
        (
            "Tide table of 2026-11-28 is in force",
            "Tide table of 2026-11-29 is in force",
            "Tide table of 2027-01-02 is in force",
        ),
        ("Water stands at 3.41 m", "Water stands at 3.42 m", "Water stands at 12.05 m"),
        ("Harbour light: red 1", "Harbour light: red 2", "Harbour light: red 17"),
    ],
)
def test_it_matches_values_that_share_less(first: str, second: str, later: str) -> None:
    s = Stabiliser(RULES)
    for now, line in enumerate((first, second)):
        s.apply(prompt_of(HEAD.format(line), "u:Hello"), float(now))
    (suggestion,) = s.suggestions()
    (pattern,) = re.findall(r"^pattern = '(.*)'$|^pattern = \"(.*)\"$", suggestion.toml, re.MULTILINE)
    found = re.compile((pattern[0] or pattern[1]).replace("\\\\", "\\"))
    assert [bool(found.fullmatch(line)) for line in (first, second, later)] == [True, True, True]
