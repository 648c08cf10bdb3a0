"""What belongs together stays together: dotted names, records under one label, list items, headings, documents."""

from __future__ import annotations

import pytest
from prompting import head_text, prompt_of

from prefixproxy.stabilise import Stabiliser
from prefixproxy.volatile import load_rules

RULES = load_rules()


def heads_sent(*heads: str) -> list[str]:
    """What is left of each of these heads, sent one after the other with a question of its own."""
    stabiliser = Stabiliser(RULES)
    done = (stabiliser.apply(prompt_of(head, f"u:Question {i}"), float(i)) for i, head in enumerate(heads))
    return [head_text(one.prompt) for one in done]


@pytest.mark.parametrize(
    "head",
    [
        "You help.\nsys.current_time = 2026-03-14T20:37:1%d",
        "You help.\nobj.current_time: 2026-03-14T20:37:1%d",
        "You help.\nuser.current_time is 2026-03-14T20:37:1%d.",
        "app.current_time: 2026-03-14T20:37:1%d\nYou help.",
        "You help.\nVars:\nsys.current_time = 2026-03-14T20:37:1%d\nsys.user = Ann\nBe brief.",
        "You help. See https://a.example/?now=2026-03-14T20:37:1%d for more.",
    ],
)
def test_a_dotted_name_is_not_cut_in_half(head: str) -> None:
    assert heads_sent(*(head % i for i in (1, 2, 2))) == [head % 1, head % 2, head % 2]


def test_a_sentence_begins_behind_white_space() -> None:
    head = 'You are "X." The current time is 10:00:0%d. Be brief.'
    assert heads_sent(head % 1, head % 2) == [head % 1, 'You are "X." Be brief.']


RECORDS = [
    "You debug two requests.\n\nRequest ID: a-%d\nTook 4 s\n\nRequest ID: b-%d\nTook 9 s\n\nWhich was slower?",
    "Compare.\nSnapshot: 2026-03-13 10:00\na=1\nSnapshot: 2026-03-1%d 10:0%d\na=2\nEnd.",
    "You compare two runs.\n## First\nRun ID: 81%d\nErrors: 4\n## Second\nRun ID: 82%d\nErrors: 9\nSay what got worse.",
    "Compare.\n<now>2026-03-13T10:00:0%d</now>\nfirst\n<now>2026-03-13T11:00:0%d</now>\nsecond\nEnd.",
    "Two calls. The current time is 10:00:0%d. One. The current time is 10:01:0%d. Two.",
]


@pytest.mark.parametrize("head", RECORDS)
def test_a_label_that_stands_more_than_once_stays_with_its_records(head: str) -> None:
    sent = [head % (1, 1), head % (3, 4), head % (3, 5)]
    assert heads_sent(*sent) == sent


def test_a_clock_beside_such_records_still_moves() -> None:
    head = "Current time: 10:00:0%d\n" + RECORDS[0] % (1, 2)
    assert heads_sent(head % 1, head % 2) == [RECORDS[0] % (1, 2)] * 2


def test_a_label_that_stands_more_than_once_is_no_suggestion() -> None:
    stabiliser = Stabiliser(RULES)
    head = "You compare two parcels.\nWeighed in hall: 1%d\nto Oslo\n\nWeighed in hall: 2%d\nto Rome\n\nWhich is late?"
    for i in range(3):
        stabiliser.apply(prompt_of(head % (i, i), "u:Hi"), float(i))
    assert stabiliser.suggestions() == ()
