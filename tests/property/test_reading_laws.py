"""Reading heads fast changes nothing of what is read: what is tried first, what is left out, what is remembered."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from prompting import prompt_of

from prefixproxy.volatile.files import load_rules
from prefixproxy.volatile.first import first_chars, needs_digit
from prefixproxy.volatile.head import HeadReader, looked_at
from prefixproxy.volatile.lines import LineReader
from prefixproxy.volatile.spans import MAX_BLOCK, TextReader

RULES = load_rules()
LINES = LineReader(RULES)
PATTERNS = [(r.pattern, first_chars(r.pattern), needs_digit(r.pattern)) for r in (*RULES.rules, *RULES.companions)]
EXAMPLES = [
    line for r in RULES.rules if r.example for line in (r.example.before + "\n" + r.example.earlier).split("\n")
]
PIECES = [
    "current", "Time", "date", "is", ":", "now", "10:00", "2026-03-14", "Lane", "ſession", "id", "3 of 5", "<env>",
    "</env>", "```", '"""', "'''", "März", "heute ist", "Dienstag", "今天是", "日", "K", "\ud800", ".", " ", "  ",
    "User:", "Example:", "[", "(", "#", "-", "*",
]  # fmt: skip
LINE = st.one_of(
    st.sampled_from(EXAMPLES),
    st.lists(st.sampled_from(PIECES), max_size=8).map(" ".join),
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
)
OLD_FENCE = re.compile(r"\s{0,3}(`{3}|~{3}|\"{3}|'{3})|.*(\"{3}|'{3})\s*$")
quick = settings(deadline=None, max_examples=100)


@quick
@given(LINE, st.integers(0, 3))
def test_no_rule_that_matches_is_ever_left_out(line: str, pos: int) -> None:
    text = line[pos:]
    for pattern, firsts, digital in PATTERNS:
        found = pattern.match(text)
        if found:
            assert not text[0].isascii() or text[0].lower() in firsts
            assert not digital or any(c.isdecimal() for c in text)


@quick
@given(LINE)
def test_a_fence_is_what_it_was(line: str) -> None:
    found = OLD_FENCE.match(line)
    facts = LINES.facts(line)
    assert (facts.fence if facts else "") == ((found[1] or found[2]) if found else "")


@quick
@given(st.lists(LINE, max_size=12), st.integers(0, 12))
def test_the_lines_looked_at_are_the_text(lines: list[str], most: int) -> None:
    text = "\n".join(lines)
    taken, numbers = looked_at(text, most)
    assert "\n".join(taken) == text
    assert len(numbers) == min(len(taken), most // 2 * 2 if len(taken) > most else len(taken))


@settings(quick, max_examples=10)
@given(
    st.lists(LINE, min_size=4, max_size=30),
    st.lists(LINE, min_size=4, max_size=30),
    st.sampled_from(["x", "", "</env>"]),
)
def test_a_middle_that_is_taken_as_one_line_hides_nothing(first: list[str], last: list[str], filler: str) -> None:
    half, middle = 4, [filler] * (3 * MAX_BLOCK)
    lines = [*first, *middle, *last]
    text = "\n".join(lines)
    taken, numbers = looked_at(text, 2 * half)
    assert len(taken) < len(lines)
    whole = (*range(half), *range(len(lines) - half, len(lines)))
    few, all_of_them = (
        TextReader(text, some, {n: f for n in at if (f := LINES.facts(some[n].removesuffix("\r")))})
        for some, at in ((taken, numbers), (lines, whole))
    )
    assert few.found() == all_of_them.found()
    assert few.mentions() == all_of_them.mentions()


@quick
@given(st.lists(LINE, max_size=12), st.lists(LINE, max_size=4))
def test_reading_ahead_and_remembering_change_nothing(one: list[str], two: list[str]) -> None:
    steady = "\n".join(["x" * 600] * 30)
    heads = [prompt_of(["\n".join([*lines, steady]), *two]).head for lines in (one, two, one)]
    ahead = HeadReader(RULES)
    for head in heads:
        assert sum(1 for _ in ahead.read_ahead(head)) == 0
        assert ahead.read(head) == HeadReader(RULES).read(head)
