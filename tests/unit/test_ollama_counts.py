"""What Ollama's counts mean, in every version; what its prefill times tell, and when they tell nothing."""

from __future__ import annotations

from typing import Any

import pytest

from prefixproxy.backends import Answer
from prefixproxy.backends.ollama_counts import Counts, truncated, version_of
from prefixproxy.backends.ollama_local import slots_of_children
from prefixproxy.types import Api, CacheSource, Usage
from prefixproxy.usage import usage_from

OLD, NEW = (0, 33, 2), (0, 33, 3)


def counts(version: tuple[int, ...] | None) -> Counts:
    found = Counts()
    found.version = version
    return found


def answer(
    last: dict[str, Any],
    api: Api = Api.OLLAMA_CHAT,
    *,
    estimated: int | None = None,
    alone: bool = True,
    **body: Any,
) -> Answer:
    usage = usage_from(api, [last])
    guess = estimated if estimated is not None else usage.prompt_tokens or 0
    return Answer(api, {"model": "m", **body}, [last], usage, guess, alone)


def done(prompt: int, ms: float, load_ms: float = 20, **more: Any) -> dict[str, Any]:
    ns = {"prompt_eval_duration": int(ms * 1e6), "load_duration": int(load_ms * 1e6)}
    return {"done": True, "prompt_eval_count": prompt, "eval_count": 3, **ns, **more}


def read(found: Counts, one: Answer) -> tuple[int | None, int | None, CacheSource]:
    usage = found.read(one, None).usage
    return usage.cached_tokens, usage.evaluated_tokens, usage.source


@pytest.mark.parametrize("version", [OLD, NEW, None, (0, 30, 0)])
def test_a_reported_count_is_believed_whatever_the_version(version: tuple[int, ...] | None) -> None:
    told = answer(done(1000, 100, prompt_eval_cached_count=900))
    assert read(counts(version), told) == (900, 100, CacheSource.REPORTED)


def test_a_reported_zero_is_a_zero() -> None:
    assert read(counts(NEW), answer(done(29, 1, prompt_eval_cached_count=0))) == (0, 29, CacheSource.REPORTED)


def test_one_version_counted_evaluated_tokens_only() -> None:
    usage = counts((0, 30, 0)).read(answer(done(70, 100)), None).usage
    assert (usage.prompt_tokens, usage.evaluated_tokens, usage.source) == (None, 70, CacheSource.UNKNOWN)


@pytest.mark.parametrize(
    ("version", "expected"),
    [(OLD, (None, None, CacheSource.UNKNOWN)), (NEW, (0, 50, CacheSource.REPORTED))],
)
def test_the_constant_zero_of_old_responses_is_no_measurement(version: tuple[int, ...], expected: object) -> None:
    last = {"usage": {"input_tokens": 50, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 0}}}
    assert read(counts(version), answer(last, Api.RESPONSES)) == expected


def test_messages_without_a_cached_count_tell_the_whole_prompt() -> None:
    first = {"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 0}}}
    last = {"type": "message_delta", "usage": {"input_tokens": 80, "output_tokens": 3}}
    usage = usage_from(Api.MESSAGES, [first, last])
    reading = counts(OLD).read(Answer(Api.MESSAGES, {}, [first, last], usage, 80, True), None)
    assert (reading.usage.prompt_tokens, reading.usage.source) == (80, CacheSource.UNKNOWN)


def test_messages_with_a_cached_count_add_up() -> None:
    last = {"type": "message_delta", "usage": {"input_tokens": 20, "cache_read_input_tokens": 60, "output_tokens": 3}}
    usage = counts(NEW).read(answer(last, Api.MESSAGES), None).usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.source) == (80, 60, CacheSource.REPORTED)


def test_nothing_is_inferred_without_a_control() -> None:
    assert read(counts(OLD), answer(done(1000, 5))) == (None, None, CacheSource.UNKNOWN)


def test_the_prompt_a_model_was_loaded_for_was_evaluated_whole_and_is_the_control() -> None:
    found = counts(OLD)
    assert read(found, answer(done(1000, 1000, load_ms=2000))) == (0, 1000, CacheSource.INFERRED)
    assert read(found, answer(done(1200, 120))) == (1080, 120, CacheSource.INFERRED)
    assert read(found, answer(done(1200, 1200))) == (0, 1200, CacheSource.INFERRED)


def test_a_fully_cached_prompt_still_evaluates_its_last_token() -> None:
    found = counts(OLD)
    found.read(answer(done(1000, 1000, load_ms=2000)), None)
    assert read(found, answer(done(1000, 0.2))) == (999, 1, CacheSource.INFERRED)


@pytest.mark.parametrize("ms", [550, 700, 890])
def test_what_is_neither_a_clear_hit_nor_a_clear_miss_stays_unknown(ms: float) -> None:
    found = counts(OLD)
    found.read(answer(done(1000, 1000, load_ms=2000)), None)
    assert read(found, answer(done(1000, ms))) == (None, None, CacheSource.UNKNOWN)


@pytest.mark.parametrize(
    "different",
    [
        {"alone": False},
        {"model": "other"},
        {"format": "json"},
        {"format": "json", "think": True},
        {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]},
        {"images": ["AAAA"]},
    ],
)
def test_a_time_that_other_work_went_into_tells_nothing(different: dict[str, Any]) -> None:
    found = counts(OLD)
    found.read(answer(done(1000, 1000, load_ms=2000)), None)
    assert read(found, answer(done(1000, 100), **different)) == (None, None, CacheSource.UNKNOWN)


def test_a_format_without_thinking_is_one_pass() -> None:
    found = counts(OLD)
    found.read(answer(done(1000, 1000, load_ms=2000)), None)
    assert read(found, answer(done(1000, 100), format="json", think=False)) == (900, 100, CacheSource.INFERRED)


@pytest.mark.parametrize("tokens", [400, 2100])
def test_a_control_counts_for_similar_lengths_only(tokens: int) -> None:
    found = counts(OLD)
    found.read(answer(done(1000, 1000, load_ms=2000)), None)
    assert read(found, answer(done(tokens, 1))) == (None, None, CacheSource.UNKNOWN)


def test_a_short_prompt_is_no_control() -> None:
    found = counts(OLD)
    found.read(answer(done(100, 100, load_ms=2000)), None)
    assert read(found, answer(done(100, 1))) == (None, None, CacheSource.UNKNOWN)


@pytest.mark.parametrize(
    ("estimated", "counted", "n_ctx", "expected"),
    [
        (9000, 2050, 4096, True),  # one long prompt, cut to half
        (9000, 2051, 4096, True),  # the same with a BOS token
        (2050, 2050, 4096, False),  # a prompt that happens to be as long
        (9000, 4096, 4096, True),  # an old engine, cut to the whole context
        (4095, 4095, 4096, False),
        (6000, 3900, 4096, True),  # old messages dropped
        (4200, 3900, 4096, False),  # our estimate may be that far off
        (3000, 2000, 4096, False),  # it would have fitted
        (9000, 9100, 4096, False),  # what is known of the context is out of date
        (9000, 2050, None, False),
        (9000, None, 4096, False),
    ],
)
def test_a_cut_prompt_is_told_from_one_that_fits(
    estimated: int, counted: int | None, n_ctx: int | None, expected: bool
) -> None:
    assert truncated(estimated, counted, n_ctx) is expected


def test_nothing_is_inferred_of_a_cut_prompt() -> None:
    found = counts(OLD)
    reading = found.read(answer(done(2050, 2050, load_ms=2000), estimated=9000), 4096)
    assert (reading.truncated, reading.usage.source) == (True, CacheSource.UNKNOWN)
    assert read(found, answer(done(2050, 100))) == (None, None, CacheSource.UNKNOWN)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.33.3", (0, 33, 3)), ("v0.30.0-rc2", (0, 30, 0)), ("0.0.0", None), ("dev", None), ("", None)],
)
def test_versions(text: str, expected: tuple[int, ...] | None) -> None:
    assert version_of(text) == expected


def test_the_slots_are_read_from_the_command_line_of_the_model_that_has_most(tmp_path: Any) -> None:
    def process(pid: int, *argv: str) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(b"\0".join(arg.encode() for arg in argv) + b"\0")

    assert slots_of_children(tmp_path) is None
    ollama = ("/usr/lib/ollama/llama-server", "--model", "m", "--no-webui", "--offline", "-c", "8192", "-np")
    process(1, "/usr/bin/ollama", "serve")
    process(2, *ollama, "1")
    process(3, *ollama, "4")
    process(4, "llama-server", "-np", "16")  # somebody's own
    process(5, *ollama, "many")
    process(6)
    (tmp_path / "7").mkdir()
    assert slots_of_children(tmp_path) == 4


def test_an_unmeasured_usage_passes_through() -> None:
    reading = counts(NEW).read(Answer(Api.CHAT, {}, [], Usage(), 10, True), None)
    assert (reading.usage, reading.truncated) == (Usage(), False)
