"""A suggested rule knows the next value too, not only the two it was learned from."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from prompting import prompt_of

from prefixproxy.stabilise.stabiliser import StabilisePolicy, Stabiliser
from prefixproxy.volatile.files import load_rules

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


def taught(*lines: str) -> Stabiliser:
    s = Stabiliser(RULES)
    for now, line in enumerate(lines):
        s.apply(prompt_of(HEAD.format(line), "u:Hello"), float(now))
    return s


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (("Deck clock reads 10:00", "Deck clock reads 10:01"), r"learned-deck-clock-reads-[0-9a-f]{4}"),
        (("Water (tide) stands at 3 m", "Water (tide) stands at 4 m"), r"learned-water-tide-stands-[0-9a-f]{4}"),
        (("Heute im Café: Gänge 3", "Heute im Café: Gänge 4"), r"learned-heute-cafe-gange-[0-9a-f]{4}"),
        (("今日の当番の番号は: 3", "今日の当番の番号は: 4"), r"learned-[0-9a-f]{4}"),
    ],
)
def test_its_name_is_made_of_the_words_it_knows(lines: tuple[str, str], name: str) -> None:
    (suggestion,) = taught(*lines).suggestions()
    assert re.fullmatch(name, suggestion.name)


def test_an_instruction_that_changed_is_no_suggestion_until_it_looks_like_state() -> None:
    s = taught("The watch is kept by Anna alone", "The watch is kept by Bert alone")
    assert s.suggestions() == ()
    s.apply(prompt_of(HEAD.format("The watch is kept by 2 alone"), "u:Hello"), 3.0)
    (suggestion,) = s.suggestions()
    assert suggestion.values == 3


def test_suggestions_survive_a_restart_and_learn_on() -> None:
    s = taught(
        "Deck clock reads 10:00", "Deck clock reads 10:01", "The watch is kept by Anna", "The watch is kept by Bert"
    )
    state = json.loads(json.dumps(s.export()))
    again = Stabiliser(RULES)
    assert again.load(state) == []
    assert again.suggestions() == s.suggestions() != ()
    assert again.changes()["suggestions"] == {}
    for line in ("Deck clock reads 10:02", "Deck clock reads 10:03"):
        again.apply(prompt_of(HEAD.format(line), "u:Hello"), 9.0)
    (suggestion,) = again.suggestions()
    assert (suggestion.values, suggestion.last_seen) == (4, 9.0)
    assert list(again.changes()["suggestions"]) == [suggestion.name]
    assert Stabiliser(RULES, StabilisePolicy(learned="off")).load(state) == []


def test_set_to_apply_a_learned_rule_acts_after_a_restart_too() -> None:
    policy = StabilisePolicy(learned="apply")
    state = taught("Deck clock reads 10:00", "Deck clock reads 10:01").export()
    again = Stabiliser(RULES, policy)
    again.load(json.loads(json.dumps(state)))
    done = [again.apply(prompt_of(HEAD.format(f"Deck clock reads 11:0{i}"), "u:Hello"), float(i)) for i in range(2)]
    assert done[1].notes == ("Deck clock reads 11:01",)


@pytest.mark.parametrize(
    "broken", [{"where": "anywhere"}, {"pattern": "("}, {"pattern": "(a+)+b"}, {"values": ["x"]}, {"line": None}]
)
def test_what_is_no_suggestion_is_not_taken_back(broken: dict[str, object]) -> None:
    state = taught("Deck clock reads 10:00", "Deck clock reads 10:01").export()
    (name,) = state["suggestions"]
    state["suggestions"][name] |= broken
    again = Stabiliser(RULES)
    assert again.load(state) == [("suggestions", name)]
    assert again.suggestions() == ()


def pattern_of(s: Stabiliser) -> re.Pattern[str]:
    (suggestion,) = s.suggestions()
    return re.compile(tomllib.loads(suggestion.toml)["rule"][0]["pattern"])


@pytest.mark.parametrize(
    ("first", "second", "tomorrow"),
    [
        (
            "Waktu di kantor: 14/03/2026 20:37:19",
            "Waktu di kantor: 14/03/2026 20:37:24",
            "Waktu di kantor: 02/11/2027 08:01:00",
        ),
        (
            "Deck clock reads Saturday, March 14, 2026 at 20:37",
            "Deck clock reads Saturday, March 14, 2026 at 20:38",
            "Deck clock reads Sunday, June 1, 2027 at 07:00",
        ),
        (
            "Deck clock reads 20:37 on March 14, 2026 in the hall",
            "Deck clock reads 20:38 on March 14, 2026 in the hall",
            "Deck clock reads 07:00 on June 1, 2027 in the hall",
        ),
        (
            "By the table of 2026-03-14 water stands at 3 m",
            "By the table of 2026-03-14 water stands at 4 m",
            "By the table of 2026-03-15 water stands at 5 m",
        ),
    ],
)
def test_what_looks_like_a_date_and_has_not_changed_yet_may_change_too(first: str, second: str, tomorrow: str) -> None:
    known = pattern_of(taught(first, second))
    assert all(known.fullmatch(line) for line in (first, second, tomorrow))
    assert not known.fullmatch("Waktu yang lain: 14/03/2026 20:37:19")


def test_an_instruction_behind_the_value_is_not_moved_with_it() -> None:
    head = "You are a reviewer. Waktu di kantor: 14/03/2026 20:37:1%d Be brief and read all rules. Read them twice."
    stabiliser = Stabiliser(RULES, StabilisePolicy(learned="apply"))
    for i in range(5):
        assert stabiliser.apply(prompt_of(head % i, f"u:Question {i}"), float(i)).edits == ()
    assert stabiliser.suggestions() == ()


@pytest.mark.parametrize(
    ("first", "second", "later", "instruction"),
    [
        ("3 wardens are on duty", "4 wardens are on duty", "12 wardens are on duty", "Say so if wardens are on duty"),
        (
            "14 March 2026 9:00 the watch begins",
            "15 March 2026 9:00 the watch begins",
            "1 May 2027 18:30 the watch begins",
            "Close every single drawer before the watch begins",
        ),
    ],
)
def test_a_value_that_opens_the_line_is_known_by_its_words_and_digits(
    first: str, second: str, later: str, instruction: str
) -> None:
    """Anything at all would be whichever line ends in the same words."""
    known = pattern_of(taught(first, second))
    assert all(known.fullmatch(line) for line in (first, second, later))
    assert not known.fullmatch(instruction)


def test_values_that_open_a_line_and_have_nothing_in_common_teach_nothing() -> None:
    assert taught("3 of nine wardens are on duty", "all nine 7 2 wardens are on duty").suggestions() == ()


def test_a_rule_that_was_learned_when_it_could_begin_with_anything_is_not_taken_back() -> None:
    state = taught("3 wardens are on duty", "4 wardens are on duty").export()
    (name,) = state["suggestions"]
    state["suggestions"][name]["pattern"] = r".{1,300}\swardens\sare\son\sduty"
    again = Stabiliser(RULES)
    assert again.load(state) == [("suggestions", name)]
    assert again.suggestions() == ()
