"""Text that already holds our marker, from a proxy in front of this one or quoted by somebody: nothing is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from prompting import prompt_of, rendered, texts

from prefixproxy.prompt import Prompt
from prefixproxy.stabilise.notes import MARKER, SEAM
from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.volatile.files import load_rules

RULES = load_rules()
AGENT = "You are the clerk of a map archive.\nName the rule you used."
HEADS = [
    "{clock}\n" + AGENT + SEAM + "Lane: 9",
    AGENT + SEAM + "{clock}",
    MARKER + "\n{clock}\n" + AGENT,
    "{clock}\n" + MARKER + "\n" + AGENT,
    AGENT + "\n" + MARKER + "\n{clock}\nBe brief.",
    "{clock}\n" + AGENT + "\nA note starts with `" + MARKER + "`.",
]
USERS = ["Hi", "What is" + SEAM + "Lane: 9", MARKER, SEAM + "Current time: 10:00:00", "Hi" + SEAM]


def clock(second: int) -> str:
    return f"Current time: 10:00:{second:02}"


def lines(prompt: Prompt) -> Counter[str]:
    return Counter(line.strip() for text in texts(prompt) for line in text.split("\n") if line.strip())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("user", USERS)
def test_a_marker_in_the_text_costs_nothing(head: str, user: str) -> None:
    s, turns, before = Stabiliser(RULES), list[str | dict[str, Any]](), b""
    for second in range(3):
        turns.append(f"u:{user} {second}")
        sent = prompt_of(head.format(clock=clock(second)), *turns)
        done = s.apply(sent, float(second))
        assert lines(sent) <= lines(done.prompt)
        for own, forwarded in zip(texts(sent)[1:], texts(done.prompt)[1:], strict=True):
            assert forwarded == own or forwarded.startswith(own + SEAM)
        assert s.preview(done.prompt, float(second)).edits == ()
        if second > 1:
            assert rendered(done.prompt).startswith(before)
        before = rendered(done.prompt)
        turns.append("a:Yes.")


def test_a_second_proxy_behind_this_one_changes_nothing_more() -> None:
    first, second = Stabiliser(RULES), Stabiliser(RULES)
    turns: list[str | dict[str, Any]] = []
    for number in range(4):
        turns.append(f"u:Question {number}")
        once = first.apply(prompt_of(f"{clock(number)}\n{AGENT}\nLane: 3", *turns), float(number))
        assert once.notes
        assert second.apply(once.prompt, float(number)).edits == ()
        turns.append("a:Yes.")
