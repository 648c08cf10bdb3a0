"""What fits, and how lengths are guessed."""

from __future__ import annotations

from typing import Any

import pytest

from prefixproxy.context import (
    MAX_COUNTED_PARTS,
    MAX_MODELS,
    Calibration,
    ContextLimits,
    PartCounts,
    asked_tokens,
    counted_by_client,
    surely_fits,
)
from prefixproxy.types import Api, UpstreamFacts


@pytest.mark.parametrize(("asked", "needed"), [(None, 128), (4096, 128), (128, 128), (127, 127), (1, 1), (0, 1)])
def test_the_answer_that_must_have_room(asked: int | None, needed: int) -> None:
    assert ContextLimits(min_generation=128).generation(asked) == needed


def test_without_a_minimum_one_token_is_enough() -> None:
    assert ContextLimits(min_generation=0).generation(None) == 1


@pytest.mark.parametrize(
    ("api", "data", "asked"),
    [
        (Api.CHAT, {}, None),
        (Api.CHAT, {"max_tokens": 7}, 7),
        (Api.CHAT, {"max_tokens": 7, "max_completion_tokens": 5}, 5),
        (Api.CHAT, {"max_tokens": -1}, None),
        (Api.CHAT, {"max_tokens": True}, None),
        (Api.CHAT, {"max_tokens": "7"}, None),
        (Api.COMPLETION, {"n_predict": 0}, 0),
        (Api.RESPONSES, {"max_output_tokens": 9}, 9),
        (Api.OLLAMA_CHAT, {"options": {"num_predict": 3}, "max_tokens": 1}, 3),
        (Api.OLLAMA_CHAT, {"options": None}, None),
    ],
)
def test_what_a_client_asks_for(api: Api, data: dict[str, Any], asked: int | None) -> None:
    assert asked_tokens(api, data) == asked


@pytest.mark.parametrize(
    ("prompt", "counted"), [([1, 2, 3], 3), ([], None), ([1, "a"], None), ([True], None), ("abc", None), (None, None)]
)
def test_token_ids_are_counted_by_whoever_wrote_them(prompt: Any, counted: int | None) -> None:
    assert counted_by_client({"prompt": prompt}) == counted


def test_a_shortfall_is_told_with_its_numbers() -> None:
    facts = UpstreamFacts("u", "llama-server", 6, n_ctx_slot=1365)
    told = ContextLimits(min_n_ctx_slot=4096).shortfall(facts)
    assert all(number in told for number in ("6", "1365", "4096"))
    assert ContextLimits(min_n_ctx_slot=1365).shortfall(facts) == ""
    assert ContextLimits(min_n_ctx_slot=4096).shortfall(UpstreamFacts("u", "llama-server", 6)) == ""


def test_only_what_fits_with_one_token_for_each_byte_surely_fits() -> None:
    assert surely_fits(1000, 2, 1600)
    assert not surely_fits(1100, 2, 1600)


def test_an_estimate_is_taken_as_twice_as_much_until_it_was_compared() -> None:
    calibration = Calibration()
    assert calibration.at_most("m", 100) == 200
    calibration.learn("m", 100, 100)
    assert calibration.at_most("m", 100) == pytest.approx(110)
    calibration.learn("m", 100, 150)
    assert calibration.at_most("m", 100) == pytest.approx(165)
    assert calibration.at_most("other", 100) == 200


def test_old_and_absurd_comparisons_do_not_last() -> None:
    calibration = Calibration()
    calibration.learn("m", 1, 1000)
    assert calibration.at_most("m", 100) == pytest.approx(440)
    for _ in range(32):
        calibration.learn("m", 100, 90)
    assert calibration.at_most("m", 100) == pytest.approx(99)
    calibration.learn("m", 0, 10)
    assert calibration.at_most("m", 100) == pytest.approx(99)


def test_models_are_forgotten_beyond_a_bound() -> None:
    calibration = Calibration()
    for number in range(MAX_MODELS + 1):
        calibration.learn(str(number), 100, 100)
    assert calibration.at_most("0", 100) == 200
    assert calibration.at_most("1", 100) == pytest.approx(110)


def test_parts_are_counted_once() -> None:
    counts = PartCounts()
    assert counts.unknown([b"a", b"b"]) == [b"a", b"b"]
    assert counts.total([b"a", b"b"]) is None
    counts.learn([b"a", b"b"], [1, 2])
    assert (counts.unknown([b"a", b"c"]), counts.total([b"a", b"b", b"a"])) == ([b"c"], 4)


def test_counted_parts_are_bounded_and_the_oldest_goes() -> None:
    counts = PartCounts()
    for number in range(MAX_COUNTED_PARTS + 1):
        counts.learn([b"%d" % number], [1])
    assert counts.total([b"0"]) is None
    assert counts.total([b"1"]) == 1
