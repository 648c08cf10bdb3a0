"""A running conversation keeps what it was sent with: evidence from elsewhere moves nothing of its head."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from prompting import answer_bytes, head_text, prompt_of, rendered, texts

from prefixproxy.stabilise.stabiliser import Stabilised, Stabiliser
from prefixproxy.volatile.files import load_rules

RULES = load_rules()
LANES = "You review the payments code.\nRead all rules.\nLane: {}\nNever guess.\nBe brief."
GIT = "You are an agent.\n\ngitStatus: This is the git status at the start.\nCurrent branch: main\n\nStatus:\n M {}.py"
REST = LANES.replace("Lane: {}\n", "")


def turn(stabiliser: Stabiliser, head: str, n: int, who: str = "go") -> Stabilised:
    """Turn number n of a conversation that opens with `who`; all its answers are "Done"."""
    turns = [f"u:{who}"] + [t for i in range(1, n) for t in ("a:Done", f"u:Next {i}")]
    return stabiliser.apply(prompt_of(head, *turns), float(n), request_id=f"{who}-{head}-{n}")


def extends(earlier: Stabilised, later: Stabilised) -> bool:
    answered = rendered(earlier.prompt) + answer_bytes({"role": "assistant", "content": "Done"})
    return rendered(later.prompt).startswith(answered)


@pytest.mark.parametrize("who", ["go", "another task"])
@pytest.mark.parametrize("head", [LANES, GIT])
def test_another_lane_moves_nothing_of_a_running_conversation(head: str, who: str) -> None:
    stabiliser = Stabiliser(RULES)
    first = [turn(stabiliser, head.format("1"), n) for n in (1, 2, 3)]
    other = turn(stabiliser, head.format("2"), 1, who)
    first += [turn(stabiliser, head.format("1"), n) for n in (4, 5)]
    assert all(extends(a, b) for a, b in pairwise(first))
    assert [one.notes for one in first] == [()] * 5
    assert len(other.notes) == 1
    assert extends(other, turn(stabiliser, head.format("2"), 2, who))
    assert not first[-1].undecided


def test_a_conversation_that_begins_later_moves_it_whatever_its_value() -> None:
    stabiliser = Stabiliser(RULES)
    for lane in ("1", "2"):
        turn(stabiliser, LANES.format(lane), 1)
    later = turn(stabiliser, LANES.format("1"), 1, "another task")
    assert (head_text(later.prompt), later.notes) == (REST, ("Lane: 1",))


def test_its_own_change_moves_it() -> None:
    head = LANES.replace("Lane: {}", "Current time: 10:00:0{}")
    stabiliser = Stabiliser(RULES)
    turn(stabiliser, head.format(1), 1)
    turn(stabiliser, head.format(2), 1, "another task")
    assert head_text(turn(stabiliser, head.format(1), 2).prompt) == head.format(1)
    done = turn(stabiliser, head.format(3), 3)
    assert (head_text(done.prompt), texts(done.prompt)[1], done.notes) == (REST, "go", ("Current time: 10:00:03",))


def test_the_one_with_the_value_in_its_place_is_meant_where_all_said_the_same() -> None:
    head = LANES.replace("Lane: {}", "Current time: 10:00:0{}")
    stabiliser = Stabiliser(RULES)
    first = turn(stabiliser, head.format(1), 1)
    other = turn(stabiliser, head.format(2), 1)
    assert other.notes == ("Current time: 10:00:02",)
    assert extends(first, turn(stabiliser, head.format(1), 2))


def test_it_is_kept_after_a_restart_too() -> None:
    old, restarted = Stabiliser(RULES), Stabiliser(RULES)
    first = turn(old, LANES.format("1"), 1)
    turn(old, LANES.format("2"), 1)
    assert restarted.load(json.loads(json.dumps(old.export()))) == []
    assert extends(first, turn(restarted, LANES.format("1"), 2))


def test_state_of_an_earlier_version_tells_of_nothing_in_its_place() -> None:
    old, restarted = Stabiliser(RULES), Stabiliser(RULES)
    turn(old, LANES.format("1"), 1)
    state = json.loads(json.dumps(old.export()))
    for entry in state["conversations"].values():
        entry["steps"] = [row[:7] for row in entry["steps"]]
    assert restarted.load(state) == []
    turn(restarted, LANES.format("2"), 1)
    assert turn(restarted, LANES.format("1"), 2).notes == ("Lane: 1",)


def test_a_request_that_was_never_sent_keeps_nothing() -> None:
    stabiliser = Stabiliser(RULES)
    turn(stabiliser, LANES.format("1"), 1)
    turn(stabiliser, LANES.format("2"), 1)
    stabiliser.forget_request(f"go-{LANES.format('1')}-1")
    assert turn(stabiliser, LANES.format("1"), 2).notes == ("Lane: 1",)


def test_what_comes_to_the_border_by_its_own_change_beside_it_goes_along() -> None:
    head = "You help.\nLane: 0\n<memory_context>\n- seen {} maps\n</memory_context>"
    stabiliser = Stabiliser(RULES)
    assert turn(stabiliser, head.format(1), 1).notes == ()
    done = turn(stabiliser, head.format(2), 2)
    assert head_text(done.prompt) == "You help."
    assert stabiliser.preview(done.prompt, 3.0).edits == ()
