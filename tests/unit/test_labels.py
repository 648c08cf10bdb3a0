"""Bounded label sets: few names keep their own label for good, one-off names cannot take them all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.labels import CANDIDATES_PER_LABEL, OTHER, TRIALS, Labels


def test_the_first_half_gets_labels_at_once() -> None:
    label = Labels(4)
    assert [label("a"), label("b"), label("c")] == ["a", "b", OTHER]


def test_the_second_half_is_for_names_that_keep_coming() -> None:
    label = Labels(4)
    label("a"), label("b")
    assert [label("busy") for _ in range(TRIALS)] == [OTHER] * (TRIALS - 1) + ["busy"]
    assert label("once") == OTHER


def test_one_off_names_leave_room_for_a_busy_one() -> None:
    label = Labels(4)
    for i in range(1000):
        label(f"one-off-{i}")
    assert [label("busy") for _ in range(TRIALS)][-1] == "busy"


def test_when_all_labels_are_taken_even_a_busy_name_is_other() -> None:
    label = Labels(2)
    label("a")
    for _ in range(TRIALS):
        label("b")
    assert {label("c") for _ in range(3 * TRIALS)} == {OTHER}
    assert (label("a"), label("b")) == ("a", "b")


def test_names_seen_too_long_ago_start_their_trial_again() -> None:
    label = Labels(2)
    label("a")
    for _ in range(TRIALS - 1):
        label("rare")
    for i in range(2 * CANDIDATES_PER_LABEL):
        label(f"x{i}")
    assert label("rare") == OTHER


def test_an_empty_name_is_unknown() -> None:
    assert Labels(2)("") == "unknown"


def test_a_limit_too_small_to_split_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Labels(1)


@given(limit=st.integers(2, 9), names=st.lists(st.integers(0, 30).map(str), max_size=300))
def test_labels_are_bounded_and_never_taken_back(limit: int, names: list[str]) -> None:
    label, own = Labels(limit), set[str]()
    for name in names:
        given_label = label(name)
        assert given_label in (name, OTHER)
        assert given_label == name or name not in own
        own |= {name} & {given_label}
        assert len(own) == len(label) <= limit
