"""What belongs together stays together: dotted names, records under one label, list items, headings, documents."""

from __future__ import annotations

import pytest
from prompting import head_text, prompt_of

from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.volatile.files import load_rules

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


STAYS_TWICE = [
    "Facts:\n1. Current time: 10:00:0%d\n2. The user is Ann.\n3. The user is in Rome.\nBe brief.",
    "Call the tool with exactly this argument:\nSession ID: s-123%d\nThen answer.",
    "Translate:\n\nThe current time is 8:3%d PM.\n\nAnswer in German only.",
    "Translate:\nThe current time is 8:3%d PM. The ship sails.\nAnswer in German only.",
    "Answer in this form:\nSession ID: s-123%d\nRequest ID: r-123%d\nThen stop.",
]


@pytest.mark.parametrize("head", STAYS_TWICE)
def test_what_is_part_of_a_list_or_of_an_order_stays_even_when_it_changes(head: str) -> None:
    n = head.count("%d")
    sent = [head % ((i,) * n) for i in (1, 2, 3)]
    assert heads_sent(*sent) == sent


@pytest.mark.parametrize(
    ("head", "left"),
    [
        ("Rules.\n1. Be brief.\n2. Current time: 10:00:0%d\n\nNever guess.", "Rules.\n1. Be brief.\n\nNever guess."),
        ("## Current time\n\nIt is 10:00:0%d.\n\n## Rules\nBe brief.", "## Rules\nBe brief."),
        ("## Context\n- Current time: 10:00:0%d\n\n## Rules\nBe brief.", "## Context\n\n## Rules\nBe brief."),
        ("---\nlane: %d\nrun_id: r-1\n---\nYou help.", "You help."),
        ("---\nname: clerk\nlane: %d\n---\nYou help.", "---\nname: clerk\n---\nYou help."),
        ("You help.\n\nContext:\nSession ID: s-%d\n\nBe brief.", "You help.\n\nContext:\n\nBe brief."),
        (
            "You help.\nHere is some information about the run:\nRun ID: r-%d\nLane: 3\nBe brief.",
            "You help.\nHere is some information about the run:\nLane: 3\nBe brief.",
        ),
    ],
)
def test_what_moves_once_seen_to_change_leaves_no_empty_item_or_frame(head: str, left: str) -> None:
    assert heads_sent(head % 1, head % 2) == [head % 1, left]


DOCUMENTS = [
    "Date: Sat, 14 Mar 2026 20:37:19 +0100\nFrom: a@x.org\nTo: b@x.org\nSubject: Parcel\n\nSummarise the mail above.",
    "Message-ID: 8f3a-0042\nDate: Sat, 14 Mar 2026 20:37:19 +0100\nFrom: a@x.org\n\nSummarise the mail above.",
    "Explain this .env file.\nDB=a\nSESSION_ID=5e0c1f3a12",
    "SESSION_ID=5e0c1f3a12\nDB=a\nExplain the .env file.",
    "Explain the response headers.\nServer: x\nX-Request-ID: 8f3a-0042",
    "Translate.\n1\n00:00:01,000 --> 00:00:02,000\nCurrent time: 20:37:19",
    "current_time: 2026-03-14T20:37:19Z\nfoo: bar\nExplain this YAML.",
    "Pretend that the following holds.\nCurrent time: 09:00",
]


@pytest.mark.parametrize("head", DOCUMENTS)
def test_a_field_of_a_document_at_the_border_of_the_head_waits_for_evidence(head: str) -> None:
    assert heads_sent(head) == [head]


@pytest.mark.parametrize(
    ("head", "left"),
    [
        ("Current time: 10:00:01\nYou help.\nBe brief: three lines.", "You help.\nBe brief: three lines."),
        ("Lane: 3\nClock: 10:00:01\nYou help.", "You help."),
        (
            "Lane: 3\nTask: read all rules of the payments team.\nBe brief.",
            "Task: read all rules of the payments team.\nBe brief.",
        ),
        ("Lane: 3\nRules:\n- Be brief.", "Rules:\n- Be brief."),
        ("You help.\n\nModel: m-1\nCurrent time: 10:00:01", "You help.\n\nModel: m-1"),
        ("You help.\nSession ID: s-17\nCurrent time: 10:00:01", "You help."),
    ],
)
def test_a_clock_or_an_id_beside_prose_or_its_like_acts_at_first_sight(head: str, left: str) -> None:
    assert heads_sent(head) == [left]
