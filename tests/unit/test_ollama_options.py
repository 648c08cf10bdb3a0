"""Options that would reload a model, made the same for all: the largest wins, and nothing else is touched."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixproxy.backends.ollama_options import KEEP_ALIVE, NUM_CTX, LargestOptions, seconds_of
from prefixproxy.prompt import Edit, SetKey
from prefixproxy.types import Api

BOTH = (NUM_CTX, KEEP_ALIVE)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def edits(found: LargestOptions, running: int | None = None, model: str = "m", **body: Any) -> list[Edit]:
    return found.edits(Api.OLLAMA_CHAT, {**CHAT, **body}, model, running)


def context(n: int) -> list[Edit]:
    return [SetKey(("options",), NUM_CTX, n)]


def test_a_smaller_context_becomes_the_largest_one_asked_for() -> None:
    found = LargestOptions(BOTH)
    assert edits(found, options={"num_ctx": 8192}) == []
    assert edits(found, options={"num_ctx": 4096, "seed": 1}) == context(8192)
    assert edits(found, options={"num_ctx": 16384}) == []
    assert edits(found, options={"num_ctx": 8192}) == context(16384)
    assert found.report() == {NUM_CTX: {"m": 16384}}


def test_no_context_at_all_is_the_default_and_another_one_too() -> None:
    found = LargestOptions(BOTH)
    assert edits(found) == []
    edits(found, options={"num_ctx": 8192})
    assert edits(found, options={"seed": 1}) == context(8192)
    assert edits(found) == edits(found, options=None) == [SetKey((), "options", {NUM_CTX: 8192})]


def test_a_model_that_runs_with_more_keeps_it() -> None:
    found = LargestOptions(BOTH)
    assert edits(found, running=32768) == []
    assert edits(found, running=32768, options={"num_ctx": 4096}) == context(32768)
    assert edits(found, running=32768, options={"num_ctx": 32768}) == []


def test_each_model_has_a_context_of_its_own() -> None:
    found = LargestOptions(BOTH)
    edits(found, options={"num_ctx": 8192})
    assert edits(found, model="other", options={"num_ctx": 4096}) == []


def test_a_shorter_life_becomes_the_longest_one_as_it_was_spelled() -> None:
    found = LargestOptions(BOTH)
    assert edits(found, keep_alive="30m") == edits(found, keep_alive=1800) == edits(found) == []
    assert edits(found, keep_alive="5m") == edits(found, keep_alive=0) == [SetKey((), KEEP_ALIVE, "30m")]
    assert edits(found, keep_alive=-1) == []
    assert edits(found, keep_alive="1h") == [SetKey((), KEEP_ALIVE, -1)]


@pytest.mark.parametrize("body", [{"messages": []}, {"messages": None}])
def test_a_command_to_load_or_unload_is_left_alone(body: dict[str, Any]) -> None:
    found = LargestOptions(BOTH)
    edits(found, keep_alive="30m", options={"num_ctx": 8192})
    assert edits(found, keep_alive=0, options={"num_ctx": 1}, **body) == []
    assert found.edits(Api.OLLAMA_GENERATE, {"model": "m", "keep_alive": 0}, "m", None) == []


@pytest.mark.parametrize(
    "body",
    [
        {"options": {"num_ctx": "8192"}},
        {"options": {"num_ctx": True}},
        {"options": {"num_ctx": -1}},
        {"options": {"num_ctx": None}},
        {"options": []},
        {"keep_alive": "-1"},
        {"keep_alive": "5"},
        {"keep_alive": "soon"},
        {"keep_alive": True},
        {"keep_alive": None},
    ],
)
def test_what_ollama_has_to_judge_is_left_to_it(body: dict[str, Any]) -> None:
    found = LargestOptions(BOTH)
    edits(found, keep_alive="30m", options={"num_ctx": 8192})
    more: dict[str, Any] = {} if "options" in body else {"options": {"num_ctx": 8192}}
    assert edits(found, **{**body, **more}) == []


@given(
    keys=st.sets(st.sampled_from(BOTH)),
    api=st.sampled_from([Api.CHAT, Api.RESPONSES, Api.MESSAGES, Api.COMPLETIONS]),
    bodies=st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 9)), max_size=5),
)
def test_nothing_is_touched_that_was_not_named_or_cannot_carry_it(
    keys: set[str], api: Api, bodies: list[tuple[int, int]]
) -> None:
    named, elsewhere = LargestOptions(keys), LargestOptions(BOTH)
    for num_ctx, keep_alive in bodies:
        body = {**CHAT, "options": {"num_ctx": num_ctx}, "keep_alive": keep_alive}
        changed = {edit.key for edit in named.edits(Api.OLLAMA_CHAT, body, "m", None) if isinstance(edit, SetKey)}
        assert changed <= keys
        assert elsewhere.edits(api, body, "m", None) == []


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_every_request_goes_out_with_the_largest_context_so_far(asked: list[int]) -> None:
    found, largest = LargestOptions([NUM_CTX]), 0
    for n in asked:
        largest = max(largest, n)
        done = edits(found, options={"num_ctx": n})
        assert done == ([] if n == largest else context(largest))


def test_only_so_many_models_are_remembered() -> None:
    found = LargestOptions(BOTH)
    for i in range(100):
        edits(found, model=f"m{i}", options={"num_ctx": 8192})
    assert len(found.report()[NUM_CTX]) == 64


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (300, 300.0),
        (0, 0.0),
        (-1, math.inf),
        ("-1m", math.inf),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("500ms", 0.5),
        ("10", None),
        ("", None),
        (None, None),
        (True, None),
        ([], None),
    ],
)
def test_durations_as_ollama_reads_them(given: Any, seconds: float | None) -> None:
    assert seconds_of(given) == seconds


def test_a_context_that_the_machine_cannot_hold_is_nobody_elses() -> None:
    found = LargestOptions(BOTH)
    edits(found, options={"num_ctx": 8192})
    found.served("m", 8192)
    assert edits(found, options={"num_ctx": 1_000_000}) == []
    assert edits(found, options={"num_ctx": 8192}) == context(1_000_000)
    found.refused("m", 1_000_000)
    assert edits(found, options={"num_ctx": 4096}) == context(8192)
    assert edits(found, options={"num_ctx": 1_000_000}) == []
    assert edits(found, options={"num_ctx": 4096}) == context(8192)
    assert found.context("m", 0) == 8192


def test_a_context_that_was_served_before_is_not_to_blame() -> None:
    found = LargestOptions(BOTH)
    edits(found, options={"num_ctx": 8192})
    found.served("m", 8192)
    found.refused("m", 8192)
    assert edits(found, options={"num_ctx": 4096}) == context(8192)


def test_a_refused_context_that_is_served_later_counts_again() -> None:
    found = LargestOptions(BOTH)
    edits(found, options={"num_ctx": 8192})
    found.refused("m", 8192)
    assert found.context("m", 0) is None
    assert edits(found, options={"num_ctx": 4096}) == []
    found.served("m", 8192)
    assert edits(found, options={"num_ctx": 8192}) == []
    assert edits(found, options={"num_ctx": 4096}) == context(8192)
