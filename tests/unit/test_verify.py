"""The pure parts of `verify`: when two answers differ, what a suite of them means, what is asked at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from prefixproxy.errors import UpstreamFailed
from prefixproxy.facts.report import RunFacts
from prefixproxy.types import UpstreamFacts
from prefixproxy.verdicts import Verdicts, needs_verdict, row_name
from prefixproxy.verify.command import _cut_short, _walked
from prefixproxy.verify.compare import Answer, Difference, Token, answer_of, continued, difference, limit_of, noise_of
from prefixproxy.verify.judge import Exchange, Outcome, as_row, judged
from prefixproxy.verify.report import as_json, report_lines
from prefixproxy.verify.scenarios import Ask, Place, Restore, Save, Scenario, Warm, scenarios

FACTS = UpstreamFacts("local", "llama-server", 4, 4096, "tiny", ("tiny",), "b1")
TOLD = RunFacts("http://127.0.0.1:8080", "llama-server")


def answer(*tops: dict[int, float], cached: int = 0, evaluated: int = 100) -> Answer:
    """Each token is the likeliest of its list."""
    tokens = tuple(
        Token(max(top, key=lambda one: top[one]), f"t{max(top, key=lambda one: top[one])}", top) for top in tops
    )
    return Answer("".join(token.text for token in tokens), tokens, cached, evaluated)


def exchange(reuse: Answer, control: Answer, again: Answer | None = None, scenario: str = "forked") -> Exchange:
    messages = ({"role": "user", "content": "Which?"},)
    return Exchange(scenario, 0, 0, messages, replace(reuse, cached=90, evaluated=10), control, again or control)


SURE = {1: -0.1, 2: -3.0, 3: -5.0}


def test_equal_answers_do_not_differ() -> None:
    assert difference(answer(SURE, SURE), answer(SURE, SURE)).nats == 0.0


def test_the_likely_tokens_count_and_the_tail_does_not() -> None:
    found = difference(answer(SURE, {1: -0.1, 2: -3.0, 3: -5.0}), answer(SURE, {1: -0.3, 2: -3.0, 3: -9.0}))
    assert (round(found.nats, 6), found.at, found.split) == (0.2, 1, None)


def test_a_token_that_is_not_listed_is_at_most_as_likely_as_the_last_that_is() -> None:
    found = difference(answer({1: -0.5, 2: -1.0}), answer({1: -0.5, 3: -4.0}))
    assert found.nats == 3.0


def test_nothing_is_compared_behind_the_token_where_the_texts_part() -> None:
    near, other = {1: -0.70, 2: -0.71}, {1: -0.71, 2: -0.70}
    found = difference(answer(SURE, near, {7: -0.1}), answer(SURE, other, {8: -9.0}))
    assert (round(found.nats, 6), found.split) == (0.01, 1)


def test_an_early_end_is_as_far_away_as_the_token_that_came_instead_was_ahead() -> None:
    assert difference(answer(SURE), answer(SURE, {4: -0.5, 5: -2.5})).nats == 2.0
    assert difference(answer(SURE, {4: -0.50, 5: -0.51}), answer(SURE)).nats == pytest.approx(0.01)


def test_the_limit_is_a_multiple_of_the_measured_noise_and_never_nothing() -> None:
    assert limit_of(0.0) == 0.02
    assert limit_of(noise_of([(answer(SURE), answer({1: -0.2, 2: -3.0}))])) == pytest.approx(0.3)


def entry(token: int) -> dict[str, Any]:
    return {"id": token, "token": f"t{token}", "logprob": -0.1, "top_logprobs": [{"id": token, "logprob": -0.1}]}


def chat_value(entries: list[dict[str, Any]], predicted: int) -> dict[str, Any]:
    choice = {"message": {"content": "text"}, "logprobs": {"content": entries}}
    return {"choices": [choice], "timings": {"cache_n": 5, "prompt_n": 7, "predicted_n": predicted}}


def test_answers_are_read_from_chat_and_from_raw_completions() -> None:
    chat = answer_of(chat_value([entry(1), entry(2)], 2))
    assert (chat.text, [token.id for token in chat.tokens], chat.cached, chat.evaluated) == ("t1t2", [1, 2], 5, 7)
    timings = {"cache_n": 5, "prompt_n": 7, "predicted_n": 1}
    raw = continued(chat, 1, {"completion_probabilities": [entry(3)], "content": "t3", "timings": timings})
    assert (raw.text, [token.id for token in raw.tokens], raw.complete) == ("t1t3", [1, 3], True)


def test_tokens_whose_log_probabilities_were_held_back_leave_an_answer_that_is_compared_up_to_its_first_gap() -> None:
    held = answer_of(
        {**chat_value([entry(1)], 3), "choices": [{"message": {"content": "t1 and \ufffd"}, "logprobs": None}]}
    )
    assert (held.text, held.tokens, held.complete) == ("t1 and \ufffd", (), False)
    gap = answer_of(chat_value([entry(1), entry(9)], 3))
    found = difference(gap, answer(*({token: -0.1} for token in (1, 2, 9))))
    assert (found.nats, found.split) == (0.0, 1)


@pytest.mark.parametrize(
    "value", [{}, {"choices": []}, {"choices": [{"logprobs": None}], "timings": {}}, {"choices": 3}]
)
def test_what_is_no_answer_is_told_in_words(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no chat completion with timings"):
        answer_of(value)
    with pytest.raises(ValueError, match="no completion with timings"):
        continued(answer(SURE), 1, value)


OFF = {1: -1.1, 2: -0.4}


def held_back(text: str, *tops: dict[int, float]) -> Answer:
    """An answer of which some tokens are missing: its text ended inside a character when they came."""
    return replace(answer(*tops), text=text, complete=False)


def test_answers_that_lack_tokens_further_on_are_compared_up_to_there() -> None:
    """The first tokens of both are in their places, and they are others."""
    reuse, control = held_back("t2\u2603t2", OFF, OFF), held_back("t1t1\u2603", SURE, SURE)
    assert (reuse.placed, control.placed) == (1, 2)
    assert difference(reuse, control) == difference(control, reuse)
    assert difference(reuse, control).nats == pytest.approx(2.6)
    behind = held_back("t1\u2603t2", SURE, OFF)
    assert difference(behind, control) == Difference(0.0, 0, 1)


def test_where_the_first_token_is_missing_nothing_is_compared() -> None:
    assert difference(held_back("\u2603t2", OFF), answer(SURE)) == Difference(0.0, 0, 0)


@pytest.mark.parametrize(
    ("exchanges", "outcome", "because"),
    [
        ([exchange(answer(SURE), answer(SURE))], Outcome.PASSED, "1 answers are the same"),
        ([exchange(answer(OFF), answer(SURE))], Outcome.FAILED, "1 of 1 answers are others with reuse than without"),
        ([exchange(answer(SURE), answer(SURE), answer(OFF))], Outcome.INCONCLUSIVE, "too much to judge by"),
        (
            [exchange(answer(SURE), answer(SURE, cached=50))],
            Outcome.INCONCLUSIVE,
            "the server reuses prefixes even when told not to",
        ),
        (
            [replace(exchange(answer(SURE), answer(SURE)), reuse=answer(SURE))],
            Outcome.INCONCLUSIVE,
            "nothing was reused, so nothing was tested",
        ),
    ],
)
def test_a_suite_is_judged_as_a_whole(exchanges: Sequence[Exchange], outcome: Outcome, because: str) -> None:
    result = judged(FACTS, TOLD, exchanges, {})
    assert result.outcome is outcome
    assert because in result.because


def test_the_report_shows_both_texts_and_what_was_not_tested() -> None:
    wrong = exchange(answer(OFF), answer(SURE))
    result = judged(
        FACTS, TOLD, [wrong, replace(wrong, scenario="fan-out", reuse=answer(SURE))], {"evicted": "one slot"}
    )
    text = "\n".join(report_lines(result))
    assert "FAILED: 1 of 2 answers" in text
    assert "with reuse           't2'" in text
    assert "without reuse        't1'" in text
    assert "evicted was not run: one slot" in text
    assert "fan-out: no prompt was reused by more than half" in text
    told = as_json(result, 12.0)
    assert (told["ok"], told["outcome"], told["time"]) == (False, "failed", 12.0)
    [different] = told["scenarios"][0]["different"]
    assert (different["with_reuse"], different["without_reuse"], different["cache_n"]) == ("t2", "t1", 90)


def test_more_differences_than_anybody_reads_are_counted() -> None:
    wrong = exchange(answer(OFF), answer(SURE))
    assert "... and 2 more." in report_lines(judged(FACTS, TOLD, [wrong] * 5, {}))


class Stopping:
    """A suite that ends early."""

    def __init__(self, why: BaseException) -> None:
        self._why = why

    async def run(self, found: Sequence[Scenario]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stop())

    async def _stop(self) -> None:
        raise self._why


def test_a_difference_that_was_found_before_the_server_died_counts() -> None:
    why = asyncio.run(_walked(Stopping(UpstreamFailed("it broke off")), ()))  # type: ignore[arg-type]
    assert isinstance(why, UpstreamFailed)
    broken = judged(FACTS, TOLD, [exchange(answer(OFF), answer(SURE))], {})
    result = _cut_short(broken, why)
    assert (result.outcome, result.doubts[-1]) == (Outcome.FAILED, "it stopped before its end: it broke off")
    for sound in ([exchange(answer(SURE), answer(SURE))], []):
        with pytest.raises(UpstreamFailed, match="it broke off"):
            _cut_short(judged(FACTS, TOLD, sound, {}), why)
    interrupted = _cut_short(broken, asyncio.CancelledError())
    assert interrupted.doubts[-1] == "it stopped before its end: it was interrupted"


def brief(nonce: str, tokens: int) -> str:
    return f"{nonce}\n" + "word\n" * tokens


@pytest.mark.parametrize("n_slots", [1, 2, 4, 16])
@pytest.mark.parametrize("copies", [True, False])
def test_every_scenario_walks_all_its_turns_within_the_slots(n_slots: int, copies: bool) -> None:
    found = scenarios(Place(n_slots, 4096, copies), "n", 100, 400, brief)
    assert [one.name for one in found] == ["multi-turn", "fan-out", "forked", "evicted", "interleaved", "recall"]
    assert len({talk.system for one in found for talk in one.talks}) == len(
        {talk.system.split("\n")[0] for one in found for talk in one.talks}
    )
    for one in found:
        assert one.steps or one.skipped
        asked = [talk for step in one.steps if isinstance(step, Ask) for talk in step.talks]
        assert all(asked.count(i) <= len(talk.turns) for i, talk in enumerate(one.talks))
        for step in one.steps:
            match step:
                case Ask():
                    assert all(slot < n_slots for slot in step.slots or ())
                    assert step.slots is None or copies
                case Save() | Restore() | Warm():
                    assert copies
                    assert step.slot < n_slots


def test_more_slots_than_conversations_push_nothing_out() -> None:
    evicted = scenarios(Place(16, 4096, copies=False), "n", 100, 400, brief)[3]
    assert evicted.skipped == "16 slots: too many conversations would be needed"
    assert scenarios(Place(1, 4096, copies=True), "n", 100, 400, brief)[2].skipped


def test_a_root_that_a_proxy_would_not_copy_is_made_longer() -> None:
    place = Place(4, 4096, copies=False, worth_tokens=900)
    found = {one.name: one.talks[0].system.count("word") for one in scenarios(place, "n", 100, 400, brief)}
    assert (found["multi-turn"], found["forked"]) == (100, 900)


def test_a_failed_verdict_ends_reuse_on_this_server_alone() -> None:
    failed = judged(FACTS, TOLD, [exchange(answer(OFF), answer(SURE))], {})
    verdicts = Verdicts({row_name(FACTS): as_row(failed, 1.0)})
    assert "`prefixproxy verify` failed on this model, build and context: 1 of 1" in verdicts.against_reuse(FACTS)
    for other in (replace(FACTS, build="b2"), replace(FACTS, n_ctx_slot=8192), replace(FACTS, model="big")):
        assert verdicts.against_reuse(other) == ""


Q8 = ("q8_0", "q8_0")


def rows(*verdicts: tuple[tuple[str, str] | None, bool]) -> Verdicts:
    """Of runs one after the other, each on KV types of its own, and whether it passed."""
    kept = {}
    for when, (types, ok) in enumerate(verdicts):
        facts = replace(FACTS, kv_types=types)
        found = judged(facts, TOLD, [exchange(answer(SURE if ok else OFF), answer(SURE))], {})
        kept[row_name(facts)] = as_row(found, float(when))
    return Verdicts(kept)


def test_a_verdict_holds_for_the_kv_types_it_was_found_on() -> None:
    f16, q8 = replace(FACTS, kv_types=("f16", "f16")), replace(FACTS, kv_types=Q8)
    verdicts = rows((("f16", "f16"), True), (Q8, False))
    assert (verdicts.passed(f16), verdicts.passed(q8)) == (True, False)
    assert verdicts.against_reuse(f16) == "" != verdicts.against_reuse(q8)
    assert rows((("f16", "f16"), True)).passed(q8) is None


def test_a_server_that_tells_no_kv_types_has_the_newest_verdict() -> None:
    assert rows((("f16", "f16"), True), (Q8, False)).against_reuse(FACTS) != ""
    assert rows((Q8, False), (("f16", "f16"), True)).against_reuse(FACTS) == ""


def test_a_run_that_could_not_tell_its_kv_types_shows_nothing_of_quantised_ones() -> None:
    f16, q8 = replace(FACTS, kv_types=("f16", "f16")), replace(FACTS, kv_types=Q8)
    passed, failed = rows((None, True)), rows((None, False))
    assert (passed.passed(f16), passed.passed(q8)) == (True, None)
    assert (failed.passed(f16), failed.passed(q8)) == (False, False)
    assert failed.against_reuse(q8) != ""


KIMI = replace(FACTS, model="Kimi-Linear-48B-A3B-Instruct-Q4_K_M")


@pytest.mark.parametrize(
    "name", ["Kimi-Linear-48B-A3B-Instruct-Q4_K_M", "kimi_k3", "moonshotai/Kimi-K3-GGUF", "x-KDA-y"]
)
def test_an_architecture_with_a_recorded_corruption_waits_for_a_passed_verdict(name: str) -> None:
    kimi = replace(FACTS, model=name)
    assert "run `prefixproxy verify` on this build first" in Verdicts({}).against_reuse(kimi)
    passed = {row_name(kimi): as_row(judged(kimi, TOLD, [exchange(answer(SURE), answer(SURE))], {}), 1.0)}
    assert Verdicts(passed).against_reuse(kimi) == ""
    assert Verdicts(passed).against_reuse(replace(kimi, build="b2")) != ""


def test_other_architectures_do_not_wait() -> None:
    assert not needs_verdict(replace(FACTS, model="Kimi-K2-Instruct", models=("akdaniz",)))
    assert needs_verdict(FACTS, "kimi-linear")
    assert Verdicts({}).against_reuse(replace(FACTS, architecture="kimi-linear")) != ""
    assert Verdicts({row_name(FACTS): "nonsense"}).against_reuse(FACTS) == ""
