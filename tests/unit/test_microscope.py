"""The strip of a request, what it says about reuse, and that nothing in it grows without end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import records
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.advice import (
    ADVICE,
    OTHER_RULE,
    OUTCOME_ADVICE,
    REFUSAL_ADVICE,
    RULE_ADVICE,
    STRIPPED,
    TOO_LONG,
    rule_advice,
)
from prefixproxy.chat import MESSAGE
from prefixproxy.chat_parts import PART
from prefixproxy.microscope import MAX_SEGMENTS, Strip, Strips, explain, strip_of
from prefixproxy.types import FirstDifference, Kind, MissReason, Outcome, Relocation, RequestRecord
from prefixproxy.volatile.files import load_rules

RECORD = dataclasses.replace(
    records.RECORD,
    id="now",
    time=1700000000.0,
    kind=Kind.CONTINUATION,
    family="f00d",
    slot=1,
    cache_n=600,
    prompt_n=400,
    expected_cached=None,
    miss_reason=MissReason.NONE,
    queue_ms=0.0,
    ttft_ms=500.0,
    total_ms=900.0,
    predicted_n=8,
    fork=False,
    relocations=(),
)
SEGMENTS = (
    ("system[0]", 0, 1000),
    ("tools", 1000, 2000),
    ("user[1]", 2000, 2500),
    ("assistant[2]", 2500, 3000),
    ("user[3]", 3000, 4000),
)


def strips_with(strip: Strip | None = None, **more: Strip) -> Strips:
    strips = Strips(10)
    for name, each in {"now": strip or strip_of(SEGMENTS, 4000, 2000), **more}.items():
        strips.remember(name, each, ())
    return strips


def explained(
    record: RequestRecord = RECORD, strips: Strips | None = None, rate: float | None = None
) -> dict[str, Any]:
    return explain(record, strips_with() if strips is None else strips, rate, {})


def test_a_strip_names_every_segment_with_its_share_of_the_tokens() -> None:
    strip = explained()["strip"]
    assert [(s["segment"], s["part"], s["tokens"], s["cached"]) for s in strip] == [
        ("system[0]", "root", 250, 250),
        ("tools", "root", 250, 250),
        ("user[1]", "history", 125, 100),
        ("assistant[2]", "history", 125, 0),
        ("user[3]", "tail", 250, 0),
    ]
    assert all("text" not in s for s in strip)


def test_the_resident_prefix_ends_in_a_segment() -> None:
    assert explained()["resident"] == {"tokens": 600, "segment": "user[1]", "offset": 400}
    whole = dataclasses.replace(RECORD, cache_n=1000, prompt_n=0)
    assert explained(whole)["resident"] == {"tokens": 1000, "segment": "tail", "offset": 0}


def test_unknown_stays_unknown() -> None:
    record = dataclasses.replace(
        RECORD, prompt_tokens=None, cache_n=None, prompt_n=None, prompt_ms=None, miss_reason=MissReason.UNKNOWN
    )
    out = explained(record, rate=0.001)
    assert [s["tokens"] for s in out["strip"]] == [None] * 5
    assert (out["resident"], out["reusable_tokens"], out["first_difference"]) == (None, None, None)
    assert (out["cost"]["seconds"], out["cost"]["seconds_are"], out["cost"]["saved_seconds"]) == (None, "unknown", None)


def test_a_request_without_a_strip_is_explained_as_far_as_it_goes() -> None:
    out = explained(strips=Strips(0))
    assert (out["strip"], out["prompt_bytes"], out["resident"]) == ([], None, None)
    assert out["cost"]["seconds"] == 0.4


def test_the_cost_is_what_the_server_reported_else_tokens_at_the_measured_rate() -> None:
    reported = explained(rate=0.5)["cost"]
    assert (reported["seconds"], reported["seconds_are"]) == (0.4, "reported")
    assert reported["saved_seconds"] == pytest.approx(0.6), "its own rate is the better one"
    estimated = explained(dataclasses.replace(RECORD, prompt_ms=None), rate=0.002)["cost"]
    assert (estimated["seconds"], estimated["seconds_are"]) == (0.8, "estimated")
    assert estimated["saved_seconds"] == 1.2
    short = dataclasses.replace(RECORD, prompt_n=10, prompt_ms=90.0)
    assert explained(short)["cost"]["saved_seconds"] is None, "ten tokens tell no rate"


def test_a_difference_is_named_and_bounds_what_could_be_reused() -> None:
    record = dataclasses.replace(RECORD, cache_n=10, prompt_n=990, first_difference=FirstDifference("tools", 400, 650))
    out = explained(record, strips_with(strip_of(SEGMENTS, 4000, 2000, "then")))
    assert out["first_difference"] == {
        "segment": "tools",
        "offset": 400,
        "token": 350,
        "tokens_after": 650,
        "exact": False,
        "compared_with": "then",
    }
    assert out["reusable_tokens"] == 350


def test_a_prompt_that_leads_this_one_whole_could_have_been_in_the_slot() -> None:
    then = strip_of((("system[0]", 0, 1000), ("user[1]", 1000, 3000)), 3000, 1000)
    strips = strips_with(strip_of(SEGMENTS, 4000, 2000, "then"), then=then)
    evicted = dataclasses.replace(RECORD, cache_n=0, prompt_n=1000, miss_reason=MissReason.SLOT_EVICTED)
    assert explained(evicted, strips)["reusable_tokens"] == 750


@pytest.mark.parametrize(("expected", "reusable"), [(None, 600), (500, 600), (620, 600), (800, 800), (5000, 1000)])
def test_what_was_expected_could_have_been_reused(expected: int | None, reusable: int) -> None:
    assert explained(dataclasses.replace(RECORD, expected_cached=expected))["reusable_tokens"] == reusable


def canonical(role: str, text: str) -> bytes:
    return MESSAGE + role.encode() + PART + text.encode()


def test_with_text_the_difference_is_exact_and_shown() -> None:
    strips = Strips(10, store_text=True)
    parts = {
        "then": (canonical("system", "You check reports."), canonical("user", "Is it 12:00 yet? Say so.")),
        "now": (canonical("system", "You check reports."), canonical("user", "Is it 12:31 yet? Say so.")),
    }
    for name, texts in parts.items():
        first = len(texts[0])
        segments = (("system[0]", 0, first), ("user[1]", first, first + len(texts[1])))
        strips.remember(name, strip_of(segments, segments[1][2], first, "then" if name == "now" else ""), texts)
    record = dataclasses.replace(RECORD, first_difference=FirstDifference("user[1]", 0, 500))
    out = explained(record, strips)
    difference = out["first_difference"]
    assert (difference["segment"], difference["offset"], difference["exact"]) == ("user[1]", 15, True)
    assert difference["tokens_after"] == 1000 - difference["token"]
    assert [difference[name] for name in ("common", "before", "now")] == [
        "Is it 12:",
        "00 yet? Say so.",
        "31 yet? Say so.",
    ]
    assert [s["text"] for s in out["strip"]] == ["You check reports.", "Is it 12:31 yet? Say so."]


def test_text_that_ends_shows_nothing_of_the_next_message() -> None:
    strips = Strips(10, store_text=True)
    then, now = canonical("user", "One."), canonical("user", "One. And two.")
    strips.remember("then", strip_of((("user[0]", 0, len(then)),), len(then), 0), (then, canonical("assistant", "No")))
    strips.remember("now", strip_of((("user[0]", 0, len(now)),), len(now), 0, "then"), (now,))
    record = dataclasses.replace(RECORD, first_difference=FirstDifference("user[0]", 0, 500))
    difference = explained(record, strips)["first_difference"]
    assert [difference[name] for name in ("common", "before", "now")] == ["One.", "", " And two."]


def test_a_long_segment_is_shown_at_both_ends() -> None:
    strips = Strips(10, store_text=True)
    part = canonical("user", "begin" + "x" * 5000 + "end")
    strips.remember("now", strip_of((("user[0]", 0, len(part)),), len(part), 0), (part,))
    text = explained(strips=strips)["strip"][0]["text"]
    assert text.startswith("begin")
    assert text.endswith("end")
    assert len(text) < 700


def test_without_store_text_no_text_is_kept() -> None:
    strips = Strips(10)
    strips.remember("now", strip_of(SEGMENTS, 4000, 2000), (b"secret",) * 5)
    assert (strips.text("now"), strips.text_bytes) == (None, 0)


def test_only_the_newest_strips_are_kept_and_texts_as_far_as_they_fit() -> None:
    strips = Strips(3, store_text=True, max_text_bytes=25)
    for name in "abcde":
        strips.remember(name, strip_of((), 10, 0), (b"0123456789",))
    assert (len(strips), strips.text_bytes) == (3, 20)
    assert [name for name in "abcde" if strips.strip(name)] == ["c", "d", "e"]
    assert [name for name in "abcde" if strips.text(name)] == ["d", "e"]
    strips.remember("f", strip_of((), 100, 0), (b"x" * 100,))
    assert (strips.text_bytes, strips.text("f")) == (0, None)


def test_a_request_recorded_twice_is_counted_once() -> None:
    strips = Strips(3, store_text=True)
    for _ in range(2):
        strips.remember("a", strip_of((), 10, 0), (b"0123456789",))
    assert (len(strips), strips.text_bytes) == (1, 10)


def test_a_prompt_that_was_not_understood_is_one_segment() -> None:
    assert strip_of((), 300, 0) == Strip(("prompt",), (300,), 0)


def test_a_long_conversation_keeps_its_root_and_its_newest_messages() -> None:
    n = MAX_SEGMENTS + 50
    segments = [(f"user[{i}]", i * 10, i * 10 + 10) for i in range(n)]
    strip = strip_of(segments, n * 10, 20)
    assert len(strip.labels) == len(strip.ends) == MAX_SEGMENTS
    assert strip.labels[:4] == ("user[0]", "user[1]", "user[2] ... user[52]", "user[53]")
    assert strip.segments[2] == ("user[2] ... user[52]", 20, 530)
    assert strip.labels[-1] == f"user[{n - 1}]"


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=300),
    head=st.integers(0, 10_000),
    tokens=st.integers(0, 100_000),
    share=st.floats(0, 1),
)
def test_segments_add_up_to_the_prompt_however_it_is_cut(
    sizes: list[int], head: int, tokens: int, share: float
) -> None:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    segments = [(f"user[{i}]", end - size, end) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    strip = strip_of(segments, ends[-1], head)
    assert len(strip.labels) == len(strip.ends) <= MAX_SEGMENTS
    cached = round(tokens * share)
    record = dataclasses.replace(RECORD, prompt_tokens=tokens, cache_n=cached, prompt_n=tokens - cached)
    out = explained(record, strips_with(strip))["strip"]
    assert sum(s["bytes"] for s in out) == ends[-1]
    if ends[-1]:
        assert sum(s["tokens"] for s in out) == tokens
        assert sum(s["cached"] for s in out) == cached
    assert all(0 <= s["cached"] <= s["tokens"] for s in out)


def test_what_rules_moved_is_told_by_rule_with_what_the_client_could_do() -> None:
    moved = (
        Relocation("clock", "system[0]", 20),
        Relocation("lane-id", "system[0]", 70),
        Relocation("clock", "tools", 9),
    )
    record = dataclasses.replace(RECORD, relocations=moved)
    out = explain(record, strips_with(), None, {"clock": "Move it."}, observing=True)["moved"]
    assert out == [
        {"rule": "lane-id", "segments": ["system[0]"], "bytes": 70, "done": False, "advice": OTHER_RULE},
        {"rule": "clock", "segments": ["system[0]", "tools"], "bytes": 29, "done": False, "advice": "Move it."},
    ]


def test_every_reason_outcome_and_topic_has_one_sentence_of_advice() -> None:
    assert set(ADVICE) == set(MissReason)
    assert set(OUTCOME_ADVICE) == set(Outcome) - {Outcome.OK}
    rules = load_rules()
    assert {rule.topic for rule in rules.rules if rule.treatment == "move"} <= set(RULE_ADVICE)
    for sentence in (
        *ADVICE.values(),
        *OUTCOME_ADVICE.values(),
        *REFUSAL_ADVICE.values(),
        TOO_LONG,
        *rule_advice(rules).values(),
    ):
        assert sentence.endswith(".")
        assert ". " not in sentence
    assert rule_advice(rules)["claude-code-billing"] == STRIPPED


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_a_request_that_did_not_end_well_gets_advice_on_that(outcome: Outcome) -> None:
    assert explained(dataclasses.replace(RECORD, outcome=outcome))["advice"] == OUTCOME_ADVICE[outcome]


@pytest.mark.parametrize("status", sorted(REFUSAL_ADVICE))
def test_a_refused_request_is_told_what_it_was_refused_for(status: int) -> None:
    refused = dataclasses.replace(RECORD, outcome=Outcome.REJECTED, status=status)
    assert explained(refused)["advice"] == REFUSAL_ADVICE[status]
    assert explained(dataclasses.replace(refused, status=400, context_exceeded=True))["advice"] == TOO_LONG


def test_texts_of_which_one_leads_the_other_have_no_first_difference() -> None:
    parts = (MESSAGE + b"system" + PART + b"The same.", MESSAGE + b"user" + PART + b"All of it.")
    strip = Strip(("system[0]", "user[1]"), (len(parts[0]), len(b"".join(parts))), len(parts[0]), "before")
    strips = Strips(10, store_text=True)
    for name in ("before", "now"):
        strips.remember(name, strip, parts, b"{}")
    record = dataclasses.replace(RECORD, first_difference=FirstDifference("system[0]", 0, 1000))
    assert explained(record, strips)["first_difference"] is None


@pytest.mark.parametrize(("path", "told"), [("/v1/completions", False), ("/completion", False), ("/infill", True)])
def test_counts_of_the_last_of_several_prompts_are_not_spread_over_all(path: str, told: bool) -> None:
    strip = Strip(("prompt[0]", "prompt[1]"), (1000, 2000), 0)
    out = explained(dataclasses.replace(RECORD, path=path), strips_with(strip))
    assert [one["tokens"] for one in out["strip"]] == ([500, 500] if told else [None, None])
    assert (out["resident"] is not None) == told
    assert out["tokens_are"] == ("estimated from bytes" if told else "those of the last prompt")
