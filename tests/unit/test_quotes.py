"""Quoted answers are recognised by their words, and by nothing shorter than a sentence."""

from __future__ import annotations

import json

from prefixproxy.quotes import Quotes


def answer(topic: str) -> str:
    return " ".join(f"{topic}-{i} rose. And" if i % 9 == 0 else f"{topic}-{i}" for i in range(200))


def test_a_quoted_answer_is_found_also_inside_json() -> None:
    quotes = Quotes(10)
    quotes.remember("a", answer("cpu"))
    quotes.remember("b", answer("disk").replace(". ", ".\n"))
    plain = f"Summarise:\nLane A: {answer('cpu')}\nLane B: nothing yet"
    assert quotes.quoted_in(plain) == {"a"}
    assert quotes.quoted_in(json.dumps({"lanes": [answer("cpu"), answer("disk").replace(". ", ".\n")]})) == {"a", "b"}


def test_other_text_and_short_answers_are_not_quotes() -> None:
    quotes = Quotes(10)
    quotes.remember("a", answer("cpu"))
    quotes.remember("short", "Yes, done.")
    assert len(quotes) == 1
    assert quotes.quoted_in(answer("network")) == set()
    assert quotes.quoted_in("Yes, done.") == set()
    assert quotes.quoted_in("") == set()


def test_only_the_newest_answers_are_kept() -> None:
    quotes = Quotes(2)
    for name in ("one", "two", "three"):
        quotes.remember(name, answer(name))
    assert len(quotes) == 2
    assert quotes.quoted_in(answer("one")) == set()
    assert quotes.quoted_in(answer("three")) == {"three"}


def test_an_answer_given_again_replaces_the_first() -> None:
    quotes = Quotes(2)
    quotes.remember("a", answer("one"))
    quotes.remember("a", answer("two"))
    assert len(quotes) == 1
    assert quotes.quoted_in(answer("one")) == set()
    assert quotes.quoted_in(answer("two")) == {"a"}
    quotes.forget("a")
    quotes.forget("never there")
    assert (len(quotes), quotes.quoted_in(answer("two"))) == (0, set())


def test_a_memory_of_nothing_keeps_nothing() -> None:
    quotes = Quotes(0)
    quotes.remember("a", answer("one"))
    assert (len(quotes), quotes.quoted_in(answer("one"))) == (0, set())
