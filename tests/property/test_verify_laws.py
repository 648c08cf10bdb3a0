"""Laws of comparing answers: whatever the server says, equal is equal, and which of two comes first does not matter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.verify.compare import Answer, Token, difference, limit_of, noise_of

nats = st.floats(-30.0, 0.0)
tokens = st.dictionaries(st.integers(0, 5), nats, min_size=1, max_size=4).map(
    lambda top: Token(max(top, key=lambda one: top[one]), "x", top)
)
answers = st.builds(
    lambda said, complete: Answer("x" * len(said), tuple(said), 0, 1, complete),
    st.lists(tokens, max_size=5),
    st.booleans(),
)


@given(answers)
def test_an_answer_does_not_differ_from_itself(one: Answer) -> None:
    found = difference(one, one)
    assert (found.nats, found.split) == (0.0, None)


@given(answers, answers)
def test_it_does_not_matter_which_comes_first(one: Answer, other: Answer) -> None:
    assert difference(one, other) == difference(other, one)


@given(answers, answers, answers)
def test_what_comes_behind_the_split_says_nothing(one: Answer, other: Answer, more: Answer) -> None:
    found = difference(one, other)
    if found.split is not None and found.split < min(len(one.tokens), len(other.tokens)):
        longer = Answer(one.text + more.text, (*one.tokens, *more.tokens), 0, 1, one.complete)
        assert difference(longer, other) == found


@given(st.lists(st.tuples(answers, answers), max_size=4))
def test_noise_alone_never_counts(pairs: list[tuple[Answer, Answer]]) -> None:
    limit = limit_of(noise_of(pairs))
    assert all(difference(one, other).nats <= limit for one, other in pairs)
