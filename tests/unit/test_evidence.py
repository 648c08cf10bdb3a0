"""What counts as a change, and what is forgotten first."""

from __future__ import annotations

import pytest

from prefixproxy.evidence import Evidence, value_digest

A, B, C = (value_digest(text) for text in "abc")


def test_a_second_value_is_a_change_on_the_very_request_that_shows_it() -> None:
    evidence = Evidence(10)
    assert evidence.changed(b"k", [A, A]) == (False, False)
    assert evidence.learn(b"k", [A, A]) is False
    assert evidence.changed(b"k", [A, B]) == (False, True)
    assert evidence.learn(b"k", [A, B]) is True
    assert evidence.changed(b"k", [A, A]) == (False, True)


def test_the_same_values_again_teach_nothing() -> None:
    evidence = Evidence(10)
    assert [evidence.learn(b"k", [A]) for _ in range(3)] == [False, False, False]
    assert evidence.learn(b"k", [B]) is True
    assert evidence.learn(b"k", [C]) is False


def test_families_do_not_learn_from_each_other() -> None:
    evidence = Evidence(10)
    evidence.learn(b"k", [A])
    assert evidence.learn(b"l", [B]) is False
    assert evidence.changed(b"l", [B]) == (False,)


def test_another_number_of_spans_starts_anew() -> None:
    evidence = Evidence(10)
    evidence.learn(b"k", [A])
    assert evidence.changed(b"k", [B, C]) == (False, False)
    assert evidence.learn(b"k", [B, C]) is False
    assert evidence.changed(b"k", [B, A]) == (False, True)


def test_asking_remembers_nothing() -> None:
    evidence = Evidence(10)
    evidence.changed(b"k", [A])
    assert len(evidence) == 0


def test_the_family_not_seen_for_longest_is_forgotten() -> None:
    evidence = Evidence(2)
    for key in (b"a", b"b", b"a", b"c"):
        evidence.learn(key, [A])
    assert evidence.keys() == (b"a", b"c")
    assert evidence.fresh == {b"a", b"b", b"c"}
    assert evidence.export(b"b") is None


def test_families_survive_export_and_load() -> None:
    evidence, other = Evidence(10), Evidence(10)
    evidence.learn(b"k", [A, B])
    evidence.learn(b"k", [A, C])
    exported = evidence.export(b"k")
    assert exported is not None
    other.load(b"k", exported)
    assert other.changed(b"k", [A, B]) == (False, True)


@pytest.mark.parametrize("entry", [{}, {"first": ["zz"], "changed": [True]}, {"first": ["00"], "changed": []}])
def test_a_damaged_family_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        Evidence(10).load(b"k", entry)
