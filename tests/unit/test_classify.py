"""Each kind and each miss reason from the evidence that means it, in small made-up conversations.

A prompt is written as a list of "role:text"; parts are long, so that one token is about four bytes throughout.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.classify import MAX_HEADS, History
from prefixproxy.misses import Evidence, Verdict
from prefixproxy.prefix import chain_of
from prefixproxy.sightings import Sight, entry_of
from prefixproxy.types import FirstDifference, Kind, MissReason

BYTES_PER_TOKEN = 4
HEAD = ("system", "tools")


def text(name: str, lines: int = 40) -> str:
    return "\n".join(f"{name} line {i}: the quick brown fox jumps over the lazy dog." for i in range(lines))


def prose(name: str) -> str:
    return " ".join(f"{name}-{i}" for i in range(200))


def sight(request_id: str, *messages: str, lane: str = "", family: str = "", side: bool = False) -> Sight:
    roles = [message.partition(":")[0] for message in messages]
    parts = tuple(message.encode() for message in messages)
    labels = tuple("tools" if role == "tools" else f"{role}[{i}]" for i, role in enumerate(roles))
    n_head = next((i for i, role in enumerate(roles) if role not in HEAD), len(roles))
    return Sight(request_id, "m", family, lane, parts, labels, n_head, chain_of(parts, b"m"), side)


def raw(request_id: str, prompt: str) -> Sight:
    return Sight(request_id, "m", "", "", (prompt.encode(),), ("prompt[0]",), 0, chain_of([prompt.encode()], b"m"))


SYSTEM = "system:" + text("briefing", 100)
TOOLS = "tools:" + text("tool", 30)
ROOT = (TOOLS, SYSTEM)


def user(name: str) -> str:
    return "user:" + text(f"question {name}", 10)


def answer(name: str) -> str:
    return "assistant:" + text(f"answer {name}", 10)


@dataclass
class Scene:
    """A history with a clock of its own; every request sent is evaluated unless said otherwise."""

    history: History = field(default_factory=History)
    now: float = 0.0
    sent: int = 0

    def send(self, request: Sight, *, evaluated: bool = True) -> Verdict:
        self.now += 1
        verdict = self.history.classify(request)
        if evaluated:
            self.history.evaluated(request.request_id, self.now)
        return verdict

    def chat(self, *messages: str, lane: str = "", evaluated: bool = True) -> Verdict:
        self.sent += 1
        return self.send(sight(f"r{self.sent}", *messages, lane=lane), evaluated=evaluated)

    def kind(self, *messages: str, lane: str = "") -> Kind:
        return self.chat(*messages, lane=lane).kind


def prompt_tokens(verdict: Verdict) -> int:
    return verdict.entry.n_bytes // BYTES_PER_TOKEN


def head_tokens(verdict: Verdict) -> int:
    return verdict.entry.head_bytes // BYTES_PER_TOKEN


def why(scene: Scene, verdict: Verdict, cached: int | None, **facts: object) -> MissReason:
    evidence = Evidence(scene.now, prompt_tokens(verdict), cached)
    return scene.history.explain_miss(verdict, replace(evidence, **facts), scene.now + 0.5)[0]  # type: ignore[arg-type]


# Kinds


def test_root_then_fork() -> None:
    scene = Scene()
    assert scene.kind(*ROOT, user("a")) is Kind.ROOT
    assert scene.kind(*ROOT, user("b")) is Kind.FORK


def test_five_lanes_at_once_are_one_root_and_four_forks() -> None:
    scene = Scene()
    kinds = [scene.chat(*ROOT, user(name), lane=name, evaluated=False).kind for name in "abcde"]
    assert kinds == [Kind.ROOT] + [Kind.FORK] * 4


def test_a_conversation_continues_turn_by_turn_and_through_tool_results() -> None:
    scene = Scene()
    turns = [*ROOT, user("a")]
    scene.kind(*turns)
    for more in ([answer("a"), user("b")], [answer("b"), "tool:" + text("result")], [answer("c"), user("d")]):
        turns += more
        assert scene.kind(*turns) is Kind.CONTINUATION


def test_the_same_prompt_again_is_a_continuation_but_not_in_another_lane() -> None:
    scene = Scene()
    scene.kind(*ROOT, user("a"), lane="one")
    assert scene.kind(*ROOT, user("a"), lane="one") is Kind.CONTINUATION
    assert scene.kind(*ROOT, user("a"), lane="two") is Kind.FORK


def conversation(*turns: str) -> list[str]:
    return [*ROOT, *(each for name in turns for each in (user(name), said(name)))]


def said(name: str) -> str:
    """An answer of many words, to be recognised."""
    return "assistant:" + prose(name)


def played(scene: Scene, messages: list[str], lane: str = "") -> None:
    """Turn by turn, up to these messages."""
    for n, message in enumerate(messages):
        if message.startswith("assistant"):
            scene.chat(*messages[:n], lane=lane)
            scene.history.answered(f"r{scene.sent}", message.partition(":")[2])


@pytest.mark.parametrize("lane", ["", "named"])
@pytest.mark.parametrize("edited", [user("b, edited"), answer("b, edited"), "tool:" + text("result, cut", 2)])
def test_an_edit_behind_the_first_turn_is_a_rewrite_though_that_turn_leads_it(edited: str, lane: str) -> None:
    scene = Scene()
    messages = conversation("a", "b", "c", "d")
    played(scene, messages, lane)
    at = len(ROOT) + (3 if edited.startswith("assistant") else 2)
    verdict = scene.chat(*messages[:at], edited, *messages[at + 1 :], user("e"), lane=lane)
    assert verdict.kind is Kind.REWRITE
    assert verdict.reference is not None
    assert verdict.reference.request_id == "r4"
    kept = verdict.entry.bytes_before(at) // BYTES_PER_TOKEN
    assert why(scene, verdict, kept) is MissReason.HISTORY_CHANGED
    difference = scene.history.explain_miss(verdict, Evidence(scene.now, prompt_tokens(verdict), kept), scene.now)[1]
    assert difference is not None
    assert difference.segment.startswith(edited.partition(":")[0])
    messages = [*messages[:at], edited, *messages[at + 1 :], user("e"), answer("e"), user("f")]
    assert scene.kind(*messages, lane=lane) is Kind.CONTINUATION


@pytest.mark.parametrize("lane", ["", "named"])
def test_messages_dropped_behind_the_first_turn_are_a_compaction(lane: str) -> None:
    scene = Scene()
    messages = conversation("a", "b", "c", "d")
    played(scene, messages, lane)
    assert scene.kind(*messages[:4], *messages[8:], user("e"), lane=lane) is Kind.COMPACTION


def test_a_tool_result_cut_in_the_next_turn_is_a_rewrite() -> None:
    scene = Scene()
    before = [*ROOT, user("a"), said("a"), "tool:" + text("result")]
    played(scene, [*before, said("b")])
    verdict = scene.chat(*before[:-1], "tool:" + text("result", 2), said("b"), user("c"))
    assert verdict.kind is Kind.REWRITE
    assert verdict.reference is not None
    assert verdict.reference.request_id == "r2"


def test_a_summary_behind_the_first_question_of_a_named_lane_is_a_compaction() -> None:
    scene = Scene()
    messages = conversation("a", "b", "c", "d")
    played(scene, messages, "named")
    verdict = scene.chat(*ROOT, user("a"), answer("summary"), user("e"), lane="named")
    assert verdict.kind is Kind.COMPACTION
    assert why(scene, verdict, head_tokens(verdict)) is MissReason.HISTORY_CHANGED


@pytest.mark.parametrize("lane", ["", "named"])
def test_another_newest_question_edits_nothing(lane: str) -> None:
    scene = Scene()
    messages = conversation("a", "b", "c", "d")
    played(scene, messages, lane)
    assert scene.kind(*messages[:4], user("b, asked anew"), lane=lane) is Kind.CONTINUATION
    assert scene.kind(*messages[:-1], lane=lane) is Kind.CONTINUATION, "the same again"


def test_lanes_that_read_the_same_file_behind_a_shared_turn_edit_nothing() -> None:
    scene = Scene()
    file = "tool:" + text("a file")
    for name in ("x", "y"):
        question = [*ROOT, user("plan"), answer("plan"), user(name)]
        scene.chat(*ROOT, user("plan"))
        scene.chat(*question)
        assert scene.kind(*question, answer(name), file) is Kind.CONTINUATION
        assert scene.kind(*question, answer(name), file, answer(f"{name} 2"), user("more")) is Kind.CONTINUATION


def test_a_lane_that_branches_off_a_conversation_is_a_fork() -> None:
    scene = Scene()
    history = (*ROOT, user("plan"))
    scene.kind(*history, lane="planner")
    assert scene.kind(*history, answer("plan"), user("task a"), lane="a") is Kind.FORK
    assert scene.kind(*history, answer("plan"), user("task b"), lane="b") is Kind.FORK


def test_two_questions_on_one_open_prompt_are_lanes() -> None:
    scene = Scene()
    shared = (*ROOT, user("document"))
    scene.kind(*shared)
    assert scene.kind(*shared, user("task a")) is Kind.CONTINUATION
    assert scene.kind(*shared, user("task b")) is Kind.FORK


def test_edited_history_is_a_rewrite() -> None:
    scene = Scene()
    scene.kind(*ROOT, user("a"), answer("a"), user("b"))
    verdict = scene.chat(*ROOT, user("A, edited"), answer("a"), user("b"), answer("b"), user("c"))
    assert verdict.kind is Kind.REWRITE
    assert verdict.reference is not None
    assert verdict.reference.request_id == "r1"


def test_a_lane_that_takes_its_last_message_back_is_a_rewrite() -> None:
    scene = Scene()
    scene.kind(*ROOT, user("a"), answer("a"), user("b"), lane="x")
    assert scene.kind(*ROOT, user("a"), answer("a"), user("B"), lane="x") is Kind.REWRITE
    assert scene.kind(*ROOT, user("a"), answer("a"), user("B"), lane="y") is Kind.FORK


def test_a_window_that_slides_is_a_rewrite() -> None:
    scene = Scene()
    scene.kind(*ROOT, user("a"), answer("a"), user("b"), answer("b"), user("c"))
    assert scene.kind(*ROOT, user("b"), answer("b"), user("c"), answer("c"), user("d")) is Kind.REWRITE


def test_a_summary_in_place_of_the_history_is_a_compaction() -> None:
    scene = Scene()
    scene.kind(*ROOT, user("a"), answer("a"), user("b"), answer("b"), user("c"))
    assert scene.kind(*ROOT, "user:" + text("summary", 5), user("c")) is Kind.COMPACTION


def test_a_shorter_history_in_the_same_lane_is_a_compaction() -> None:
    scene = Scene()
    scene.kind(*ROOT, user("a"), answer("a"), user("b"), lane="x")
    assert scene.kind(*ROOT, user("summary"), lane="x") is Kind.COMPACTION


def test_short_messages_are_no_evidence_of_a_shared_history() -> None:
    scene = Scene()
    scene.kind(*ROOT, user("a"), "assistant:yes", "user:go on")
    assert scene.kind(*ROOT, user("b"), "assistant:yes", "user:go on") is Kind.FORK


def test_a_prompt_that_quotes_two_lanes_is_a_reducer() -> None:
    scene = Scene()
    for name in ("cpu", "disk"):
        scene.chat(*ROOT, user(name), lane=name)
        scene.history.answered(f"r{scene.sent}", prose(name))
    one = "user:Lane cpu said: " + prose("cpu")
    both = one + "\nLane disk said: " + prose("disk")
    assert scene.kind(*ROOT, one) is Kind.FORK
    assert scene.kind(*ROOT, both) is Kind.REDUCER
    assert scene.kind("system:" + text("reducer"), both) is Kind.REDUCER


def test_a_lane_that_quotes_itself_is_no_reducer() -> None:
    scene = Scene()
    for turn in "ab":
        scene.chat(*ROOT, user(turn), lane="x")
        scene.history.answered(f"r{scene.sent}", prose(turn))
    assert scene.kind(*ROOT, "user:" + prose("a") + " " + prose("b"), lane="x") is not Kind.REDUCER


def test_an_answer_to_a_forgotten_request_is_not_kept() -> None:
    scene = Scene()
    scene.history.answered("never sent", text("finding"))
    assert scene.kind(*ROOT, "user:" + text("finding")) is Kind.ROOT


def test_side_requests_are_side_and_leave_their_lane_alone() -> None:
    scene = Scene()
    scene.kind(*ROOT, user("a"), lane="x")
    title = sight("title", "system:" + text("title"), user("a"), lane="x", side=True)
    assert scene.send(title).kind is Kind.SIDE
    assert scene.kind(*ROOT, user("a"), answer("a"), user("b"), lane="x") is Kind.CONTINUATION


def test_prompts_without_a_root() -> None:
    scene = Scene()
    assert scene.kind(user("a")) is Kind.UNIQUE
    assert scene.kind(user("b")) is Kind.UNIQUE
    assert scene.kind(user("a"), answer("a"), user("c")) is Kind.CONTINUATION


def test_raw_prompts_are_compared_by_blocks() -> None:
    scene = Scene()
    document = text("document", 100)
    assert scene.send(raw("r1", document + "Question one?")).kind is Kind.UNIQUE
    assert scene.send(raw("r2", document + "Question one? Yes. " + text("more"))).kind is Kind.CONTINUATION
    assert scene.send(raw("r3", document + text("another question"))).kind in (Kind.FORK, Kind.CONTINUATION)
    assert scene.send(raw("r4", text("something else", 100))).kind is Kind.UNIQUE
    assert scene.send(raw("r5", "tiny")).kind is Kind.UNIQUE
    assert scene.send(raw("r6", "tiny")).kind is Kind.CONTINUATION
    assert scene.send(raw("r7", "")).kind is Kind.UNIQUE


def test_models_do_not_share_prompts() -> None:
    scene = Scene()
    scene.kind(*ROOT, user("a"))
    other = replace(sight("other", *ROOT, user("a")), model="other", chain=chain_of([b"x"], b"other"))
    assert scene.send(other).kind is Kind.ROOT


# Memory


def test_a_request_that_was_never_sent_leaves_no_trace() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"), lane="x", evaluated=False)
    scene.history.forget("r1")
    scene.history.forget("r1")
    assert len(scene.history) == 0
    assert scene.kind(*ROOT, user("a"), lane="x") is Kind.ROOT


def test_a_root_stays_known_while_anybody_holds_it() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"))
    scene.chat(*ROOT, user("b"), evaluated=False)
    scene.history.forget("r2")
    assert scene.kind(*ROOT, user("c")) is Kind.FORK


def test_the_oldest_are_forgotten_first() -> None:
    scene = Scene(History(max_entries=2))
    scene.kind("system:" + text("one"), user("a"))
    scene.kind("system:" + text("two"), user("a"))
    scene.kind("system:" + text("three"), user("a"))
    assert len(scene.history) == 2
    assert scene.kind("system:" + text("two"), user("b")) is Kind.FORK
    assert scene.kind("system:" + text("one"), user("b")) is Kind.ROOT


def test_classifying_a_request_again_replaces_it() -> None:
    scene = Scene()
    scene.send(sight("same", *ROOT, user("a")), evaluated=False)
    assert scene.send(sight("same", *ROOT, user("a")), evaluated=False).kind is Kind.ROOT
    assert len(scene.history) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "forget", "evaluate"]), st.integers(0, 9), st.lists(st.integers(0, 2))),
        max_size=60,
    ),
    st.integers(1, 6),
)
def test_memory_is_bounded_and_empty_when_all_is_forgotten(
    steps: list[tuple[str, int, list[int]]], max_entries: int
) -> None:
    history = History(max_entries)
    for now, (step, number, messages) in enumerate(steps):
        if step == "send":
            history.classify(sight(str(number), "system:s", *(user(str(m)) for m in messages), lane=str(number % 3)))
        elif step == "forget":
            history.forget(str(number))
        else:
            history.evaluated(str(number), float(now))
        assert len(history) <= max_entries
    for number in range(10):
        history.forget(str(number))
    assert (len(history), history.remembered_marks) == (0, 0)


# Miss reasons


def test_none_when_the_known_prefix_was_reused() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"))
    fork = scene.chat(*ROOT, user("b"))
    assert why(scene, fork, cached=head_tokens(fork) - 1) is MissReason.NONE
    turn = scene.chat(*ROOT, user("b"), answer("b"), user("c"))
    assert why(scene, turn, cached=prompt_tokens(fork)) is MissReason.NONE


def test_none_for_a_first_root_that_was_warmed_for_it() -> None:
    scene = Scene()
    first = scene.chat(*ROOT, user("a"), evaluated=False)
    assert why(scene, first, cached=head_tokens(first), expected_cached=head_tokens(first)) is MissReason.NONE


def test_none_for_a_prompt_too_short_to_matter() -> None:
    scene = Scene()
    short = scene.chat("system:Be brief.", "user:Hello!", evaluated=False)
    assert why(scene, short, cached=0) is MissReason.NONE


def test_cold_root_at_first_sight() -> None:
    scene = Scene()
    assert why(scene, scene.chat(*ROOT, user("a"), evaluated=False), cached=0) is MissReason.COLD_ROOT


def test_cold_root_for_lanes_that_start_before_the_root_was_evaluated() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"), evaluated=False)
    second = scene.chat(*ROOT, user("b"), evaluated=False)
    assert second.kind is Kind.FORK
    assert why(scene, second, cached=0) is MissReason.COLD_ROOT


def test_cold_root_for_a_prompt_without_one() -> None:
    scene = Scene()
    assert why(scene, scene.chat(user("a"), evaluated=False), cached=0) is MissReason.COLD_ROOT


def test_slot_evicted_when_a_known_prefix_is_gone() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"))
    fork = scene.chat(*ROOT, user("b"), evaluated=False)
    assert why(scene, fork, cached=0, expected_cached=head_tokens(fork)) is MissReason.SLOT_EVICTED


def test_slot_evicted_when_only_the_root_is_left_of_a_conversation() -> None:
    scene = Scene()
    long = [*ROOT, *(turn for name in "abcdef" for turn in (user(name), answer(name)))]
    scene.chat(*long)
    turn = scene.chat(*long, user("g"), evaluated=False)
    assert why(scene, turn, cached=head_tokens(turn)) is MissReason.SLOT_EVICTED


def test_unknown_when_reuse_stops_where_no_difference_is_seen() -> None:
    scene = Scene()
    long = [*ROOT, *(turn for name in "abcdef" for turn in (user(name), answer(name)))]
    scene.chat(*long)
    turn = scene.chat(*long, user("g"), evaluated=False)
    somewhere = (head_tokens(turn) + prompt_tokens(turn)) // 2
    assert why(scene, turn, cached=somewhere, expected_cached=prompt_tokens(turn) - 200) is MissReason.UNKNOWN


def test_unknown_when_the_server_said_nothing() -> None:
    scene = Scene()
    assert why(scene, scene.chat(*ROOT, user("a"), evaluated=False), cached=None) is MissReason.UNKNOWN


def test_upstream_restarted_since_the_prefix_was_evaluated() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"))
    restarted = scene.now + 0.5
    fork = scene.chat(*ROOT, user("b"), evaluated=False)
    assert why(scene, fork, cached=0, upstream_since=restarted) is MissReason.UPSTREAM_RESTARTED
    after = scene.chat(*ROOT, user("c"), evaluated=False)
    assert why(scene, after, cached=0, upstream_since=restarted) is MissReason.SLOT_EVICTED


def test_fork_failed() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"))
    fork = scene.chat(*ROOT, user("b"), evaluated=False)
    assert why(scene, fork, cached=0, fork_failed=True) is MissReason.FORK_FAILED


def test_fork_failed_on_a_root_that_only_a_warm_up_had_evaluated() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"), evaluated=False)
    fork = scene.chat(*ROOT, user("b"), evaluated=False)
    assert why(scene, fork, cached=0, fork_failed=True) is MissReason.FORK_FAILED


def test_no_rollback() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"))
    fork = scene.chat(*ROOT, user("b"), evaluated=False)
    assert why(scene, fork, cached=0, no_rollback=lambda: True) is MissReason.NO_ROLLBACK


def test_reuse_off_only_where_there_was_something_to_reuse() -> None:
    scene = Scene()
    first = scene.chat(*ROOT, user("a"), evaluated=False)
    assert why(scene, first, cached=0, reuse_off=True) is MissReason.COLD_ROOT
    fork = scene.chat(*ROOT, user("b"), evaluated=False)
    assert why(scene, fork, cached=0, reuse_off=True) is MissReason.REUSE_OFF


def test_root_changed_in_the_same_lane() -> None:
    scene = Scene()
    scene.chat(TOOLS, SYSTEM + "\n12:01", user("a"), lane="x")
    changed = scene.chat(TOOLS, SYSTEM + "\n12:02", user("a"), lane="x", evaluated=False)
    assert changed.kind is Kind.ROOT
    assert why(scene, changed, cached=head_tokens(changed) // 8) is MissReason.ROOT_CHANGED


def test_root_changed_is_seen_by_its_lines_without_any_lane() -> None:
    scene = Scene()
    scene.chat("system:12:01\n" + text("briefing", 100), user("a"))
    changed = scene.chat("system:12:02\n" + text("briefing", 100), user("b"), evaluated=False)
    assert why(scene, changed, cached=0) is MissReason.ROOT_CHANGED
    other = scene.chat("system:" + text("another role", 100), user("b"), evaluated=False)
    assert why(scene, other, cached=0) is MissReason.COLD_ROOT


def test_only_the_newest_heads_are_compared_line_by_line() -> None:
    scene = Scene()
    first = "system:12:01\n" + text("briefing", 100)
    scene.chat(first, user("a"))
    for i in range(MAX_HEADS):
        scene.chat("system:" + text(f"other role {i}", 3), user("a"))
    changed = scene.chat(first.replace("12:01", "12:02"), user("b"), evaluated=False)
    assert why(scene, changed, cached=0) is MissReason.COLD_ROOT


def test_root_changed_is_seen_by_its_family() -> None:
    scene = Scene()
    scene.send(sight("one", "system:12:01", user("a"), family="f"))
    changed = scene.send(sight("two", "system:12:02", user("b"), family="f"), evaluated=False)
    assert why(scene, changed, cached=0) is MissReason.ROOT_CHANGED


def test_tools_changed() -> None:
    scene = Scene()
    scene.chat(TOOLS, SYSTEM, user("a"), lane="x")
    other_tools = scene.chat(TOOLS + "\none more", SYSTEM, user("a"), lane="x", evaluated=False)
    assert why(scene, other_tools, cached=0) is MissReason.TOOLS_CHANGED
    no_tools = scene.chat(SYSTEM, user("a"), lane="x", evaluated=False)
    assert why(scene, no_tools, cached=0) is MissReason.TOOLS_CHANGED


def test_history_changed() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"), answer("a"), user("b"), answer("b"), user("c"), lane="x")
    edited = scene.chat(*ROOT, user("A"), answer("a"), user("b"), answer("b"), user("c"), lane="x", evaluated=False)
    assert edited.kind is Kind.REWRITE
    assert why(scene, edited, cached=head_tokens(edited)) is MissReason.HISTORY_CHANGED
    compacted = scene.chat(*ROOT, user("summary"), lane="x", evaluated=False)
    assert compacted.kind is Kind.COMPACTION
    assert why(scene, compacted, cached=head_tokens(compacted)) is MissReason.HISTORY_CHANGED


def test_the_larger_loss_names_the_reason() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"), answer("a"), user("b"), lane="x")
    edited = scene.chat(*ROOT, user("a"), answer("a"), user("B"), lane="x", evaluated=False)
    assert edited.kind is Kind.REWRITE
    assert why(scene, edited, cached=0) is MissReason.SLOT_EVICTED


def test_every_reason_has_a_test() -> None:
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {reason.name for reason in MissReason} <= named
    assert {kind.name for kind in Kind} <= named


# First difference


def difference(scene: Scene, verdict: Verdict) -> FirstDifference | None:
    evidence = Evidence(scene.now, prompt_tokens(verdict), 0)
    return scene.history.explain_miss(verdict, evidence, scene.now)[1]


def test_the_first_difference_is_named_by_segment_and_offset() -> None:
    scene = Scene()
    before = text("briefing", 20)
    scene.chat("system:" + before + "\n12:01\n" + text("rest"), user("a"), lane="x")
    changed = scene.chat("system:" + before + "\n12:02\n" + text("rest"), user("a"), lane="x")
    first = difference(scene, changed)
    assert first is not None
    assert first.segment == "system[0]"
    exact = len("system:" + before + "\n12:0")
    assert exact - 64 < first.offset <= exact
    behind = (changed.entry.n_bytes - first.offset) / BYTES_PER_TOKEN
    assert first.tokens_after == pytest.approx(behind, abs=2)


def test_a_fork_differs_in_its_own_message() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"))
    first = difference(scene, scene.chat(*ROOT, user("b")))
    assert first is not None
    assert first.segment == "user[2]"


def test_no_difference_where_one_prompt_leads_the_other() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"))
    assert difference(scene, scene.chat(*ROOT, user("a"), answer("a"), user("b"))) is None
    assert difference(scene, scene.chat(*ROOT, user("a"))) is None
    assert difference(scene, scene.chat("system:" + text("new"), user("a"))) is None


def test_no_difference_without_a_token_count() -> None:
    scene = Scene()
    scene.chat(*ROOT, user("a"))
    fork = scene.chat(*ROOT, user("b"))
    evidence = Evidence(scene.now, None, None)
    assert scene.history.explain_miss(fork, evidence, scene.now) == (MissReason.UNKNOWN, None)


@given(st.lists(st.sampled_from("abc"), max_size=4), st.lists(st.sampled_from("abc"), max_size=4))
def test_two_prompts_share_exactly_the_parts_that_lead_both(one: list[str], two: list[str]) -> None:
    first, second = (entry_of(sight("x", *ROOT, *(user(n) for n in names))) for names in (one, two))
    common = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    assert first.common_parts(second) == second.common_parts(first) == len(ROOT) + common
