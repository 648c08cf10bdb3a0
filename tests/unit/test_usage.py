"""What each API's answer states about its cost, and that nothing is made up."""

from __future__ import annotations

from typing import Any

import pytest

from prefixproxy.types import Api, CacheSource, Usage
from prefixproxy.usage import usage_from

TIMINGS = {"cache_n": 98, "prompt_n": 5, "prompt_ms": 12.5, "predicted_n": 7, "predicted_ms": 30.0}
REPORTED = CacheSource.REPORTED
FULL = Usage(103, 98, 5, 7, 12.5, 30.0, REPORTED)


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.COMPLETION, Api.INFILL, Api.RESPONSES])
def test_timings_say_everything(api: Api) -> None:
    assert usage_from(api, [{"timings": TIMINGS}]) == FULL


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
def test_openai_usage_without_timings(api: Api) -> None:
    usage = {"prompt_tokens": 103, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 98}}
    assert usage_from(api, [{"choices": [], "usage": usage}]) == Usage(103, 98, 5, 7, source=REPORTED)


def test_openai_usage_without_details_leaves_reuse_unknown() -> None:
    answer = usage_from(Api.CHAT, [{"usage": {"prompt_tokens": 103, "completion_tokens": 7}}])
    assert answer == Usage(prompt_tokens=103, predicted_tokens=7, source=CacheSource.UNKNOWN)


def test_zero_cached_tokens_are_known() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    assert usage_from(Api.CHAT, [{"usage": usage}]) == Usage(9, 0, 9, 1, source=REPORTED)


def test_responses_completed_event() -> None:
    usage = {"input_tokens": 103, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 98}}
    event: dict[str, Any] = {"type": "response.completed", "response": {"usage": usage}}
    assert usage_from(Api.RESPONSES, [event]) == Usage(103, 98, 5, 7, source=REPORTED)
    assert usage_from(Api.RESPONSES, [event | {"timings": TIMINGS}]) == FULL


def test_messages_stream_takes_the_prompt_from_its_start_and_the_answer_from_its_end() -> None:
    start = {"message": {"usage": {"cache_read_input_tokens": 24, "input_tokens": 7, "output_tokens": 0}}}
    end = {"type": "message_delta", "usage": {"output_tokens": 4}}
    expected = Usage(31, 24, 7, 4, source=REPORTED)
    assert usage_from(Api.MESSAGES, [{"type": "message_start"} | start, end, {"type": "message_stop"}]) == expected


def test_messages_answer_of_a_server_that_reports_no_reuse() -> None:
    answer = usage_from(Api.MESSAGES, [{"usage": {"input_tokens": 31, "output_tokens": 4}}])
    assert answer == Usage(predicted_tokens=4, source=CacheSource.UNKNOWN)


def test_native_answer_cut_by_response_fields() -> None:
    assert usage_from(Api.COMPLETION, [{"tokens_evaluated": 20, "tokens_predicted": 3}]) == Usage(
        20, predicted_tokens=3
    )


def test_native_tokens_cached_is_not_taken_for_reuse() -> None:
    assert usage_from(Api.COMPLETION, [{"tokens_evaluated": 20, "tokens_cached": 22}]).cached_tokens is None


@pytest.mark.parametrize("api", [Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE])
def test_ollama_counts_and_nanoseconds(api: Api) -> None:
    done = {
        "done": True,
        "prompt_eval_count": 29,
        "prompt_eval_cached_count": 20,
        "prompt_eval_duration": 12_500_000,
        "eval_count": 7,
        "eval_duration": 30_000_000,
    }
    assert usage_from(api, [{"done": False}, done]) == Usage(29, 20, 9, 7, 12.5, 30.0, REPORTED)


def test_ollama_without_a_cached_count_leaves_reuse_unknown() -> None:
    usage = usage_from(Api.OLLAMA_CHAT, [{"done": True, "prompt_eval_count": 29, "eval_count": 1}])
    assert usage == Usage(prompt_tokens=29, predicted_tokens=1, source=CacheSource.UNKNOWN)


def test_progress_of_a_whole_prefill_gives_the_prompt() -> None:
    progress = {"prompt_progress": {"total": 100, "cache": 60, "processed": 100}}
    assert usage_from(Api.CHAT, [progress]) == Usage(100, 60, 40, source=REPORTED)


def test_progress_of_a_broken_off_prefill_leaves_the_evaluated_tokens_unknown() -> None:
    progress = {"prompt_progress": {"total": 100, "cache": 10, "processed": 50}}
    assert usage_from(Api.CHAT, [progress]) == Usage(100, 10, None, source=REPORTED)


def test_the_last_timings_win() -> None:
    early = {"timings": TIMINGS | {"predicted_n": 1, "predicted_ms": 0.5}}
    assert usage_from(Api.CHAT, [early, {"timings": TIMINGS}]) == FULL


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"timings": None},
        {"timings": {"cache_n": "1", "prompt_n": True, "prompt_ms": "x"}},
        {"usage": []},
        {"usage": {"prompt_tokens": -1, "prompt_tokens_details": 3}},
        {"message": "hello", "response": 4},
    ],
)
@pytest.mark.parametrize("api", list(Api))
def test_what_is_malformed_counts_as_not_stated(api: Api, value: dict[str, Any]) -> None:
    assert usage_from(api, [value]) == Usage()


def test_no_objects_state_nothing() -> None:
    assert usage_from(Api.CHAT, []) == Usage()
