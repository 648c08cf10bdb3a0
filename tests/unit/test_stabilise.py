"""Notes: where they go, that they come again, that they freeze, and whose they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import orjson
import pytest
from prompting import answer_bytes, head_text, parsed, prompt_of, rendered, texts

from prefixproxy.prompt import AppendItem, Remove, SetText
from prefixproxy.stabilise.notes import SEAM, count_tokens, is_small
from prefixproxy.stabilise.stabiliser import Learned, Stabilised, StabilisePolicy, Stabiliser
from prefixproxy.types import Api
from prefixproxy.volatile.files import load_rules

RULES = load_rules()
AGENT = "You are a coding agent. Read files before you change them. Keep changes small."
LARGE = (
    "<memory_context>\n" + "\n".join(f"- fact {i} about the map archive and its shelves" for i in range(12)) + "\n%s"
)
MEMORY = LARGE + "\n</memory_context>"


def clock(n: int) -> str:
    return f"Current time: 10:00:{n:02}"


def head(n: int) -> str:
    return f"{clock(n)}\n{AGENT}"


def new(learned: Learned = "suggest", **policy: int) -> Stabiliser:
    return Stabiliser(RULES, StabilisePolicy(learned=learned, **policy))


def note(*lines: str) -> str:
    return SEAM + "\n".join(lines)


def extends(earlier: Stabilised, answer: str, later: Stabilised) -> bool:
    answered = rendered(earlier.prompt) + answer_bytes({"role": "assistant", "content": answer})
    return rendered(later.prompt).startswith(answered)


# Where a note goes


def test_a_note_stands_behind_a_blank_line_and_the_marker() -> None:
    done = new().apply(prompt_of(head(1), "u:Hi"), 0.0)
    assert texts(done.prompt) == [AGENT, f"Hi{SEAM}{clock(1)}"]
    assert SEAM.startswith("\n\n")
    assert SEAM.count("\n") == 3
    assert [(r.rule, r.segment, r.bytes) for r in done.relocations] == [("clock", "system[0]", len(clock(1)))]


def test_fields_of_one_message_share_one_seam_in_the_order_of_the_head() -> None:
    done = new().apply(prompt_of(f"Lane: red\n{AGENT}\n\n{clock(1)}", "u:Hi"), 0.0)
    assert texts(done.prompt)[-1] == "Hi" + note("Lane: red", clock(1))


def test_a_new_conversation_is_told_in_its_first_user_message() -> None:
    done = new().apply(prompt_of(head(1), "u:Context", "u:Question"), 0.0)
    assert texts(done.prompt)[1:] == ["Context" + note(clock(1)), "Question"]


def test_what_is_first_cut_behind_an_answer_is_told_in_the_newest_user_message() -> None:
    done = new().apply(prompt_of(head(1), "u:One", "a:Two", "u:Three"), 0.0)
    assert texts(done.prompt)[1:] == ["One", "Two", "Three" + note(clock(1))]


def test_without_user_messages_the_note_closes_the_head() -> None:
    done = new().apply(prompt_of(head(1)), 0.0)
    assert texts(done.prompt) == [AGENT + note(clock(1))]


def test_without_user_messages_what_closes_the_head_already_stays() -> None:
    assert new().apply(prompt_of(f"{AGENT}\n{clock(1)}"), 0.0).edits == ()


def test_a_note_at_the_end_of_the_head_stays_there_when_the_user_speaks() -> None:
    stabiliser = new()
    stabiliser.apply(prompt_of(head(1)), 0.0)
    done = stabiliser.apply(prompt_of(head(2), "a:Hello", "u:Hi"), 1.0)
    assert texts(done.prompt) == [AGENT + note(clock(1)), "Hello", "Hi" + note(clock(2))]


def test_parts_take_a_note_in_their_last_text_or_in_a_new_part() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    text = {"type": "text", "text": "What is this?"}
    for content, edit in (([image, text], SetText), ([text, image], AppendItem)):
        done = new().apply(prompt_of(head(1), {"role": "user", "content": content}), 0.0)
        assert isinstance(done.edits[-1], edit)
        assert note(clock(1)) in texts(done.prompt)[-1]


def test_a_user_message_without_content_is_passed_over() -> None:
    done = new().apply(prompt_of(head(1), "u:Hi", {"role": "user", "content": None}), 0.0)
    assert texts(done.prompt)[1:] == ["Hi" + note(clock(1)), ""]


def test_a_prefill_stays_last() -> None:
    done = new().apply(prompt_of(head(1), "u:Hi", "a:The answer is"), 0.0)
    assert texts(done.prompt) == [AGENT, "Hi" + note(clock(1)), "The answer is"]


def test_system_messages_behind_the_head_are_left_alone() -> None:
    turns = ("u:Hi", f"s:{clock(5)}", "a:Yes", f"s:{clock(6)}", "u:Go on")
    assert new().apply(prompt_of(AGENT, *turns), 0.0).edits == ()


# Stripping and emptied texts

BILLING = "x-anthropic-billing-header: cc_version=9.4.2.a1b; cc_entrypoint=cli; cch=%s;"


def test_the_billing_line_goes_with_its_line_end_and_makes_no_note() -> None:
    done = new().apply(prompt_of(f"\n{BILLING % 'a1'}\n\n{AGENT}", "u:Hi"), 0.0)
    assert texts(done.prompt) == [AGENT, "Hi"]
    assert [(r.rule, r.bytes) for r in done.relocations] == [("claude-code-billing", len(BILLING % "a1"))]


def test_the_first_line_of_the_head_is_the_one_behind_the_strip() -> None:
    done = new().apply(prompt_of(f"{BILLING % 'a1'}\n{head(1)}", "u:Hi"), 0.0)
    assert texts(done.prompt) == [AGENT, "Hi" + note(clock(1))]


def test_a_block_emptied_by_a_strip_is_dropped() -> None:
    system = [{"type": "text", "text": BILLING % "a1"}, {"type": "text", "text": AGENT}]
    body = {"model": "m", "system": system, "messages": [{"role": "user", "content": "Hi"}]}
    done = new().apply(parsed(body, Api.MESSAGES), 0.0)
    assert done.edits == (Remove(("system", 0)),)
    assert texts(done.prompt) == [AGENT, "Hi"]


@pytest.mark.parametrize("system", [BILLING % "a1", [{"type": "text", "text": BILLING % "a1"}]])
def test_a_message_emptied_by_a_strip_is_dropped(system: Any) -> None:
    body = {"model": "m", "system": system, "messages": [{"role": "user", "content": "Hi"}]}
    done = new().apply(parsed(body, Api.MESSAGES), 0.0)
    assert done.edits == (Remove(("system",)),)
    assert texts(done.prompt) == ["Hi"]


def test_families_with_and_without_the_stripped_line_are_one() -> None:
    plain, billed = prompt_of(AGENT, "u:Hi"), prompt_of(f"{BILLING % 'a1'}\n{AGENT}", "u:Hi")
    stabiliser = new()
    assert stabiliser.apply(plain, 0.0).family == stabiliser.apply(billed, 1.0).family


def test_a_system_message_that_is_nothing_but_a_clock_goes_if_another_one_stays() -> None:
    done = new().apply(prompt_of([AGENT, clock(1)], "u:Hi"), 0.0)
    assert texts(done.prompt) == [AGENT, "Hi" + note(clock(1))]


def test_a_head_that_is_nothing_but_a_clock_stays() -> None:
    stabiliser = new()
    assert [stabiliser.apply(prompt_of(clock(i), "u:Hi"), 0.0).edits for i in (1, 2)] == [(), ()]


def test_blank_lines_on_both_sides_of_a_cut_become_one() -> None:
    stabiliser = new()
    done = [stabiliser.apply(prompt_of(f"One.\n\n{clock(i)}\n\nTwo.", "u:Hi"), 0.0) for i in (1, 2)]
    assert head_text(done[1].prompt) == "One.\n\nTwo."


def test_carriage_returns_are_kept() -> None:
    done = new().apply(prompt_of(f"{clock(1)}\r\nOne.\r\nTwo.\r\n", "u:Hi\r\n"), 0.0)
    assert texts(done.prompt) == ["One.\r\nTwo.\r\n", "Hi\r\n" + note(clock(1))]


# Replay


def test_each_turn_goes_on_from_the_one_before() -> None:
    stabiliser, turns = new(), list[str]()
    done = list[Stabilised]()
    for i in range(5):
        turns.append(f"u:Question {i}")
        done.append(stabiliser.apply(prompt_of(head(i), *turns), float(i)))
        turns.append(f"a:Answer {i}")
    assert all(extends(a, f"Answer {i}", b) for i, (a, b) in enumerate(pairwise(done)))
    assert texts(done[-1].prompt)[1::2] == [f"Question {i}{note(clock(i))}" for i in range(5)]
    assert len({one.conversation for one in done}) == 1


def test_an_unchanged_value_is_told_once() -> None:
    stabiliser = new()
    stabiliser.apply(prompt_of(head(1), "u:One"), 0.0)
    done = stabiliser.apply(prompt_of(head(1), "u:One", "a:Two", "u:Three"), 1.0)
    assert texts(done.prompt)[1:] == ["One" + note(clock(1)), "Two", "Three"]


def test_within_a_tool_loop_the_value_is_frozen() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks = {"role": "assistant", "content": "", "tool_calls": [call]}
    stabiliser = new()
    stabiliser.apply(prompt_of(head(1), "u:One"), 0.0)
    loop = stabiliser.apply(prompt_of(head(2), "u:One", asks, "t:done"), 1.0)
    assert texts(loop.prompt)[1:] == ["One" + note(clock(1)), "", "done"]
    later = stabiliser.apply(prompt_of(head(3), "u:One", asks, "t:done", "a:Fine.", "u:Two"), 2.0)
    assert texts(later.prompt)[1:] == ["One" + note(clock(1)), "", "done", "Fine.", "Two" + note(clock(3))]


def test_a_tool_loop_that_is_seen_first_in_its_middle_is_told_at_its_start_and_frozen() -> None:
    stabiliser, loop = new(), ["a:call", "t:result"]
    for i in (1, 2, 3):
        done = stabiliser.apply(prompt_of(head(i), "u:One", *loop * i), float(i))
        assert texts(done.prompt)[1] == "One" + note(clock(1))


def test_a_clock_that_is_first_seen_to_change_in_a_tool_loop_goes_into_its_question() -> None:
    stabiliser = new()
    middle = "Be kind.\n%s\nBe brief."
    first = stabiliser.apply(prompt_of(middle % clock(1), "u:One"), 0.0)
    assert first.edits == ()
    done = stabiliser.apply(prompt_of(middle % clock(2), "u:One", "a:call", "t:result"), 1.0)
    assert texts(done.prompt) == ["Be kind.\nBe brief.", "One" + note(clock(2)), "call", "result"]
    again = stabiliser.apply(prompt_of(middle % clock(3), "u:One", "a:call", "t:result", "a:call", "t:more"), 2.0)
    assert texts(again.prompt)[1] == "One" + note(clock(2))


def test_the_same_question_at_another_time_is_another_conversation() -> None:
    stabiliser = new()
    done = [stabiliser.apply(prompt_of(head(i), "u:Hi"), float(i)) for i in (1, 2)]
    assert [texts(one.prompt)[1] for one in done] == ["Hi" + note(clock(1)), "Hi" + note(clock(2))]


def test_a_question_sent_again_behind_an_answer_is_told_the_new_value() -> None:
    stabiliser = new()
    stabiliser.apply(prompt_of(head(1), "u:One"), 0.0)
    for i in (2, 3):
        done = stabiliser.apply(prompt_of(head(i), "u:One", "a:Two", "u:Three"), float(i))
        assert texts(done.prompt)[1:] == ["One" + note(clock(1)), "Two", "Three" + note(clock(i))]


def test_a_rewritten_question_keeps_the_notes_before_it() -> None:
    stabiliser = new()
    stabiliser.apply(prompt_of(head(1), "u:One"), 0.0)
    stabiliser.apply(prompt_of(head(2), "u:One", "a:Two", "u:Three"), 1.0)
    done = stabiliser.apply(prompt_of(head(3), "u:One", "a:Two", "u:Four"), 2.0)
    assert texts(done.prompt)[1:] == ["One" + note(clock(1)), "Two", "Four" + note(clock(3))]
    both = stabiliser.apply(prompt_of(head(4), "u:One", "a:Two", "u:Three", "a:x", "u:Five"), 3.0)
    assert texts(both.prompt)[1:] == [
        "One" + note(clock(1)),
        "Two",
        "Three" + note(clock(2)),
        "x",
        "Five" + note(clock(4)),
    ]


def test_an_unknown_history_carries_no_notes() -> None:
    stabiliser = new()
    stabiliser.apply(prompt_of(head(1), "u:One"), 0.0)
    done = stabiliser.apply(prompt_of(head(2), "u:Else", "a:Two", "u:Three"), 1.0)
    assert texts(done.prompt)[1:] == ["Else", "Two", "Three" + note(clock(2))]


def test_another_model_is_another_family() -> None:
    stabiliser = new()
    stabiliser.apply(prompt_of(head(1), "u:One"), 0.0)
    done = stabiliser.apply(prompt_of(head(2), "u:One", "a:Two", "u:Three", model="other"), 1.0)
    assert texts(done.prompt)[1] == "One"


# Lanes


def lane_head(lane: str, n: int) -> str:
    return f"Lane: {lane} | 2026-03-14 10:00:{n:02}\n{AGENT}"


def test_lanes_that_share_question_and_answer_keep_their_own_notes() -> None:
    stabiliser, lanes = new(), ("red", "blue", "green")
    for i, lane in enumerate(lanes):
        stabiliser.apply(prompt_of(lane_head(lane, i), "u:One"), float(i))
    for i, lane in enumerate(lanes):
        done = stabiliser.apply(prompt_of(lane_head(lane, 10 + i), "u:One", "a:Two", "u:Three"), 10.0 + i)
        told = [note(f"Lane: {lane} | 2026-03-14 10:00:{n:02}") for n in (i, 10 + i)]
        assert texts(done.prompt)[1:] == ["One" + told[0], "Two", "Three" + told[1]]


def test_a_lane_whose_first_turn_was_not_seen_gets_nobody_elses_notes() -> None:
    stabiliser = new()
    stabiliser.apply(prompt_of(lane_head("red", 1), "u:One"), 0.0)
    done = stabiliser.apply(prompt_of(lane_head("blue", 2), "u:One", "a:Two", "u:Three"), 1.0)
    assert "red" not in "".join(texts(done.prompt))


def test_an_id_that_is_not_cut_keeps_lanes_apart_too() -> None:
    stabiliser = new()
    inside = f"%s\nBe kind.\nSession: s-%d\n{AGENT}"
    stabiliser.apply(prompt_of(inside % (clock(1), 1), "u:One"), 0.0)
    stabiliser.apply(prompt_of(inside % (clock(2), 1), "u:Other"), 1.0)
    done = stabiliser.apply(prompt_of(inside % (clock(3), 2), "u:One", "a:Two", "u:Three"), 2.0)
    assert clock(1) not in "".join(texts(done.prompt))


def test_the_client_may_name_its_lane() -> None:
    stabiliser = new()
    for i, lane in enumerate(("x", "y")):
        stabiliser.apply(prompt_of(head(i), "u:One"), float(i), lane=lane)
    for i, lane in enumerate(("x", "y")):
        done = stabiliser.apply(prompt_of(head(9), "u:One", "a:Two", "u:Three"), 9.0, lane=lane)
        assert texts(done.prompt)[1] == "One" + note(clock(i))


def test_snapshots_of_different_folders_are_never_mixed() -> None:
    stabiliser = new()
    env = f"<env>\nWorking directory: /srv/%s\nFiles: %d\n</env>\n{AGENT}"
    for name in "abc":
        stabiliser.apply(prompt_of(env % (name, 1), "u:One"), 0.0)
    for name in "bc":
        done = stabiliser.apply(prompt_of(env % (name, 2), "u:One", "a:Two", "u:Three"), 1.0)
        others = {f"/srv/{other}" for other in "abc" if other != name}
        assert not any(other in "".join(texts(done.prompt)) for other in others)
        assert texts(done.prompt)[1].startswith("One" + SEAM)


# Large texts


def memory(n: int) -> str:
    return MEMORY % f"- returns on day {n}"


def test_a_large_text_stands_in_the_newest_user_message_only() -> None:
    stabiliser = new()
    base = f"{AGENT}\n%s"
    stabiliser.apply(prompt_of(base % memory(1), "u:One"), 0.0)
    turns = ["u:One", "a:Two", "u:Three"]
    two = stabiliser.apply(prompt_of(base % memory(2), *turns), 1.0)
    assert texts(two.prompt) == [AGENT, "One", "Two", "Three" + note(memory(2))]
    three = stabiliser.apply(prompt_of(base % memory(2), *turns, "a:Four", "u:Five"), 2.0)
    assert texts(three.prompt) == [AGENT, "One", "Two", "Three", "Four", "Five" + note(memory(2))]


def test_a_limit_above_a_constant_block_tells_it_once_and_each_turn_extends_the_one_before() -> None:
    stabiliser = new(replay_limit_tokens=512)
    base, turns = f"{AGENT}\n%s", list[str]()
    folder = "/srv/maps/of/the/reading/room" * 12
    block = f"<env>\n  Working directory: {folder}%d\n</env>"
    assert not is_small(block % 1, 64)
    stabiliser.observe(prompt_of(base % (block % 0), "u:Zero"), 0.0)
    before = b""
    for i in range(4):
        turns.append(f"u:Question {i}")
        done = stabiliser.apply(prompt_of(base % (block % 1), *turns, "a:call", "t:result"), float(i))
        assert texts(done.prompt)[1] == "Question 0" + note(block % 1)
        assert rendered(done.prompt).startswith(before)
        before = rendered(done.prompt)
        turns += ["a:call", "t:result", f"a:Answer {i}"]


def test_small_notes_stand_before_large_ones_and_stay() -> None:
    stabiliser = new()
    base = f"%s\n{AGENT}\n%s"
    stabiliser.apply(prompt_of(base % (clock(1), memory(1)), "u:One"), 0.0)
    turns = ["u:One", "a:Two", "u:Three"]
    two = stabiliser.apply(prompt_of(base % (clock(2), memory(2)), *turns), 1.0)
    assert texts(two.prompt)[1:] == ["One" + note(clock(1)), "Two", "Three" + note(clock(2), memory(2))]
    three = stabiliser.apply(prompt_of(base % (clock(3), memory(3)), *turns, "a:Four", "u:Five"), 2.0)
    assert texts(three.prompt)[3:] == ["Three" + note(clock(2)), "Four", "Five" + note(clock(3), memory(3))]


def test_a_large_text_is_frozen_in_a_tool_loop() -> None:
    stabiliser = new()
    base = f"{AGENT}\n%s"
    stabiliser.observe(prompt_of(base % memory(0), "u:Zero"), 0.0)
    for i in (1, 2, 3):
        loop = ["a:call", "t:result"] * (i - 1)
        done = stabiliser.apply(prompt_of(base % memory(i), "u:One", *loop), float(i))
        assert texts(done.prompt)[1] == "One" + note(memory(1))


def test_state_is_never_told_twice_however_short_it_is() -> None:
    stabiliser, turns = new(), list[str]()
    state = f"{AGENT}\nAn overview of the areas and devices:\n- lamp: day %d"
    stabiliser.observe(prompt_of(state % 9, "u:Zero"), 0.0)
    for i in range(3):
        turns.append(f"u:Question {i}")
        done = stabiliser.apply(prompt_of(state % i, *turns), float(i))
        own = note(f"An overview of the areas and devices:\n- lamp: day {i}")
        assert texts(done.prompt)[1::2] == [*(f"Question {k}" for k in range(i)), f"Question {i}{own}"]
        turns.append(f"a:Answer {i}")


def test_the_limit_counts_tokens_of_the_text_without_the_marker() -> None:
    line = "Current time: 10:00:01"
    n = count_tokens(line)
    assert not is_small(line, n - 1)
    assert is_small(line, n)
    assert is_small("x" * 64, 64)
    assert not is_small("word " * 10_000, 64, count=lambda _: pytest.fail("counted although its length decides"))
    stabiliser = new(replay_limit_tokens=n - 1)
    stabiliser.apply(prompt_of(head(1), "u:One"), 0.0)
    done = stabiliser.apply(prompt_of(head(2), "u:One", "a:Two", "u:Three"), 1.0)
    assert texts(done.prompt)[1:] == ["One", "Two", "Three" + note(clock(2))]


# Evidence, requests that wait, requests never sent


def test_a_head_that_waits_for_evidence_says_so() -> None:
    stabiliser = new()
    assert stabiliser.preview(prompt_of(f"Be kind.\n{clock(1)}\n{AGENT}", "u:One"), 0.0).undecided
    assert not stabiliser.preview(prompt_of(head(1), "u:One"), 0.0).undecided
    assert not stabiliser.preview(prompt_of(AGENT, "u:One"), 0.0).undecided
    for i in (1, 2):
        done = stabiliser.apply(prompt_of(f"Be kind.\n{clock(i)}\n{AGENT}", "u:One"), 0.0)
        assert done.undecided == (i == 1)


MIDDLE = f"Be kind.\n%s\n{AGENT}"


def test_requests_that_wait_are_evidence() -> None:
    stabiliser = new()
    waiting = [prompt_of(MIDDLE % clock(i), f"u:Lane {i}") for i in range(3)]
    assert [stabiliser.observe(p, 0.0, request_id=str(i)) for i, p in enumerate(waiting)] == [False, True, False]
    done = [stabiliser.apply(p, 1.0, request_id=str(i)) for i, p in enumerate(waiting)]
    assert {head_text(one.prompt) for one in done} == {f"Be kind.\n{AGENT}"}


def test_a_request_is_not_its_own_evidence() -> None:
    stabiliser = new()
    prompt = prompt_of(MIDDLE % clock(1), "u:One")
    assert not stabiliser.observe(prompt, 0.0, request_id="1")
    assert [stabiliser.apply(prompt, 1.0, request_id="1").edits for _ in range(3)] == [(), (), ()]


def test_applying_again_replaces_what_was_remembered() -> None:
    stabiliser = new()
    prompt = prompt_of(f"{clock(1)}\nBe kind.\nSession: s-1\n{AGENT}", "u:One")
    first = stabiliser.apply(prompt, 0.0, request_id="1")
    assert first.notes == (clock(1),)
    stabiliser.observe(prompt_of(f"{clock(2)}\nBe kind.\nSession: s-2\n{AGENT}", "u:Two"), 1.0, request_id="2")
    again = stabiliser.apply(prompt, 2.0, request_id="1")
    assert again.notes == (clock(1), "Session: s-1")
    assert len(stabiliser.export()["conversations"]) == 1


def test_a_request_that_was_never_sent_is_in_nobodys_history() -> None:
    stabiliser = new()
    stabiliser.apply(prompt_of(head(1), "u:One"), 0.0, request_id="1")
    stabiliser.apply(prompt_of(head(2), "u:One", "a:Two", "u:Three"), 1.0, request_id="2")
    before = stabiliser.export()["conversations"]
    turns = ["u:One", "a:Two", "u:Three", "a:Four", "u:Five"]
    stabiliser.apply(prompt_of(head(3), *turns), 2.0, request_id="3")
    stabiliser.forget_request("3")
    stabiliser.forget_request("unknown")
    assert stabiliser.export()["conversations"] == before
    done = stabiliser.apply(prompt_of(head(4), *turns), 3.0, request_id="4")
    assert clock(3) not in "".join(texts(done.prompt))


def test_a_preview_is_what_apply_answers_and_remembers_nothing() -> None:
    stabiliser = new()
    stabiliser.apply(prompt_of(MIDDLE % clock(1), "u:One"), 0.0)
    before = stabiliser.export()
    prompt = prompt_of(MIDDLE % clock(2), "u:Two")
    seen = stabiliser.preview(prompt, 1.0)
    assert stabiliser.export() == before
    assert stabiliser.apply(prompt, 1.0) == seen
    assert seen.notes == (clock(2),)


def test_a_conversation_that_was_told_a_value_needs_no_evidence_again() -> None:
    stabiliser = new(max_families=1)
    stabiliser.observe(prompt_of(MIDDLE % clock(0), "u:Zero"), 0.0)
    stabiliser.apply(prompt_of(MIDDLE % clock(1), "u:One"), 0.0)
    stabiliser.apply(prompt_of("Something else.", "u:One"), 1.0)
    stabiliser.apply(prompt_of("Lane: 3\nSomething else.", "u:One"), 1.0)
    done = stabiliser.apply(prompt_of(MIDDLE % clock(2), "u:One", "a:Two", "u:Three"), 2.0)
    assert texts(done.prompt) == [f"Be kind.\n{AGENT}", "One" + note(clock(1)), "Two", "Three" + note(clock(2))]


def test_the_family_masks_spans_and_the_order_of_tools() -> None:
    tools = [{"type": "function", "function": {"name": n, "parameters": {}}} for n in "ab"]
    stabiliser = new()
    families = {
        stabiliser.apply(prompt_of(head(i), f"u:{i}", tools=order), 0.0).family
        for i, order in enumerate((tools, tools[::-1], tools))
    }
    assert [len(family) for family in families] == [16]
    other = stabiliser.apply(prompt_of(head(1), "u:1", tools=tools[:1]), 0.0).family
    assert other not in families


# Nothing to do


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "messages": [{"role": "user", "content": f"{clock(1)}\nHi"}]},
        {"model": "m", "messages": []},
        {"messages": [{"role": "system", "content": None}, {"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "system", "content": []}, {"role": "user", "content": ""}]},
        {"messages": [{"role": "system", "content": "\ud800 text"}, {"role": "user", "content": "\udc00"}]},
        {"messages": [{"role": "system", "content": [{"type": "mystery"}, {"type": "text", "text": "x"}]}]},
    ],
)
def test_bodies_without_anything_volatile_come_out_untouched(body: dict[str, Any]) -> None:
    done = new().apply(parsed(body), 0.0)
    assert (done.edits, done.relocations, done.notes) == ((), (), ())


def test_a_raw_prompt_is_never_cut() -> None:
    done = new().apply(parsed({"prompt": head(1)}, Api.COMPLETION), 0.0)
    assert done.edits == ()


def test_lone_surrogates_move_and_are_left_out_of_the_state() -> None:
    stabiliser = new()
    odd = f"{clock(1)}\nBe \ud800 kind."
    done = stabiliser.apply(prompt_of(odd, "u:One"), 0.0)
    assert done.notes == (clock(1),)
    orjson.dumps(stabiliser.export())
    odd_lane = 'Session id: "\ud800"\nBe kind.'
    stabiliser.apply(prompt_of(odd_lane, "u:One"), 0.0)
    orjson.dumps(stabiliser.export())


# State


def test_after_a_restart_the_next_turn_goes_on_byte_for_byte() -> None:
    old = new()
    one = old.apply(prompt_of(MIDDLE % clock(1), "u:One"), 0.0)
    turns = ["u:One", "a:Two", "u:Three"]
    two = old.apply(prompt_of(MIDDLE % clock(2), *turns), 1.0)
    restarted = new()
    assert restarted.load(json.loads(json.dumps(old.export()))) == []
    three = restarted.apply(prompt_of(MIDDLE % clock(3), *turns, "a:Four", "u:Five"), 2.0)
    assert one.notes == ()
    assert extends(two, "Four", three)
    assert texts(three.prompt)[-1] == "Five" + note(clock(3))


def test_after_a_restart_a_prefill_is_still_known_as_one() -> None:
    old, restarted = new(), new()
    old.apply(prompt_of(head(1), "u:One", "a:The answer"), 0.0)
    assert restarted.load(json.loads(json.dumps(old.export()))) == []
    for stabiliser in (old, restarted):
        done = stabiliser.apply(prompt_of(head(2), "u:One", "a:The answer"), 1.0)
        assert texts(done.prompt)[1] == "One" + note(clock(2))
        later = stabiliser.apply(prompt_of(head(3), "u:One", "a:The answer is 7.", "u:Two"), 2.0)
        assert texts(later.prompt)[1:] == ["One" + note(clock(2)), "The answer is 7.", "Two" + note(clock(3))]


def test_changes_laid_over_each_other_are_the_export() -> None:
    stabiliser = new(max_conversations=3, max_families=2)
    kept: dict[str, dict[str, Any]] = {"families": {}, "conversations": {}, "suggestions": {}}
    for i in range(8):
        name = "ABC"[i % 3]
        stabiliser.apply(prompt_of(f"{clock(i)}\nYou are {name}.", f"u:Question {i}"), float(i))
        changes = stabiliser.changes()
        for part, entries in kept.items():
            entries.update(changes[part])
    exported = stabiliser.export()
    for part, entries in kept.items():
        assert {k: v for k, v in entries.items() if v is not None} == exported[part]
    assert stabiliser.changes() == {"format": 1, "families": {}, "conversations": {}, "suggestions": {}}


def damage(change: Callable[[dict[str, Any]], object]) -> int:
    stabiliser = new()
    stabiliser.apply(prompt_of(head(1), "u:One"), 0.0)
    state = json.loads(json.dumps(stabiliser.export()))
    change(state)
    return len(new().load(state))


def test_damaged_state_is_left_out_and_counted() -> None:
    def first(state: dict[str, Any], part: str) -> dict[str, Any]:
        entry: dict[str, Any] = next(iter(state[part].values()))
        return entry

    assert damage(lambda s: None) == 0
    assert damage(lambda s: first(s, "conversations").pop("steps")) == 1
    assert damage(lambda s: first(s, "conversations").update(notes=[])) == 1
    assert damage(lambda s: first(s, "conversations").update(steps=[])) == 1
    assert damage(lambda s: first(s, "families").update(first=["zz"])) == 1
    assert damage(lambda s: s["families"].update(xyz={})) == 1
    assert damage(lambda s: s.update(families=None, conversations=[])) == 0
    assert damage(lambda s: s.update(format=99)) == 2


def test_memory_is_bounded() -> None:
    stabiliser = new(max_conversations=5, max_families=3, max_bytes=4_000)
    for i in range(40):
        stabiliser.apply(prompt_of(f"{clock(i)}\nYou are {i % 7}.", f"u:Question {i}"), float(i))
    state = stabiliser.export()
    assert len(state["families"]) <= 3
    assert len(state["conversations"]) <= 5


# Learned rules

UNKNOWN = f"{AGENT}\nToday's cook is number %d of the house.\nBe brief."


def test_text_that_changes_though_no_rule_knows_it_is_suggested() -> None:
    stabiliser = new()
    for i in range(3):
        assert stabiliser.apply(prompt_of(UNKNOWN % i, "u:Hi"), float(i)).edits == ()
    (suggestion,) = stabiliser.suggestions()
    assert (suggestion.values, suggestion.segment, suggestion.line, suggestion.last_seen) == (3, "system[0]", 2, 2.0)
    with_it = Stabiliser(load_rules([("pasted.toml", suggestion.toml)]))
    done = [with_it.apply(prompt_of(UNKNOWN % i, "u:Hi"), float(i)) for i in range(3)]
    assert [one.notes for one in done] == [(), *((f"Today's cook is number {i} of the house.",) for i in (1, 2))]
    assert done[1].relocations[0].rule == suggestion.name


def test_a_sentence_is_suggested_alone() -> None:
    stabiliser = new()
    text = "You are X. The cook of the day is called number %d today. Be brief and kind to everybody in the house."
    for i in range(2):
        stabiliser.apply(prompt_of(text % i, "u:Hi"), float(i))
    (suggestion,) = stabiliser.suggestions()
    with_it = Stabiliser(load_rules([("pasted.toml", suggestion.toml)]))
    done = [with_it.apply(prompt_of(text % i, "u:Hi"), float(i)) for i in range(2)]
    assert done[1].notes == ("The cook of the day is called number 1 today.",)


def test_set_to_apply_a_learned_rule_acts_once_its_text_changes_again() -> None:
    stabiliser = new("apply")
    done = [stabiliser.apply(prompt_of(UNKNOWN % i, "u:Hi"), float(i)) for i in range(5)]
    assert [bool(one.notes) for one in done] == [False, False, False, True, True]


def test_set_to_off_nothing_is_learned() -> None:
    stabiliser = new("off")
    for i in range(3):
        stabiliser.apply(prompt_of(UNKNOWN % i, "u:Hi"), float(i))
    assert stabiliser.suggestions() == ()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (AGENT, f"{AGENT}\nNew project rule: never touch geo.py."),
        (AGENT, "You play chess. Move only when asked. Keep quiet otherwise, and be polite to everyone."),
        (f"{AGENT}\n1", f"{AGENT}\n2"),
        (f"{AGENT}\nmore", f"{AGENT}\nless"),
        ("Title of the play: Hamlet, prince of Denmark\nGo.", "Title of the play: As you like it, or not\nGo."),
    ],
)
def test_what_is_no_change_of_a_value_is_not_suggested(one: str, two: str) -> None:
    stabiliser = new()
    for i, text in enumerate((one, two)):
        stabiliser.apply(prompt_of(text, "u:Hi"), float(i))
    assert stabiliser.suggestions() == ()


def test_suggestions_are_bounded() -> None:
    stabiliser = new()
    for i in range(300):
        name = "".join(chr(97 + (i // 26**k) % 26) for k in range(3)) * 3
        stabiliser.apply(prompt_of(f"{AGENT}\nThe {name} of the house is {i}.", "u:Hi"), float(i))
        stabiliser.apply(prompt_of(f"{AGENT}\nThe {name} of the house is {i}0.", "u:Hi"), float(i))
    assert 0 < len(stabiliser.suggestions()) <= 64
