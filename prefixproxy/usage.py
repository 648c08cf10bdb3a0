"""What one request cost, read from the last objects of its answer, whichever API it was in.

`timings` (llama-server, every API but Anthropic's) is the best source: it is there per request and has the times.
`usage` and Ollama's counters follow; a prefill progress event tells at least the prompt. What nobody stated is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prefixproxy.types import Api, CacheSource, Usage

_NS_PER_MS = 1e6


def usage_from(api: Api, last_objects: Sequence[dict[str, Any]]) -> Usage:
    """Merge what the objects state, the later ones winning: events of a stream in their order, or one whole answer.

    Malformed values count as not stated.
    """
    usage = Usage()
    for value in last_objects:
        usage = _merged(usage, _stated(api, value))
    return replace(usage, source=CacheSource.REPORTED) if usage.cached_tokens is not None else usage


def _stated(api: Api, value: dict[str, Any]) -> Usage:
    if api in (Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE):
        return _of_ollama(value)
    usage = Usage()
    if isinstance(progress := value.get("prompt_progress"), dict):
        usage = _of_progress(progress)
    if api in (Api.COMPLETION, Api.INFILL):
        usage = _merged(usage, _of_native(value))
    for holder in (value, value.get("message"), value.get("response")):
        if isinstance(holder, dict) and isinstance(stated := holder.get("usage"), dict):
            usage = _merged(usage, _of_anthropic(stated) if api is Api.MESSAGES else _of_openai(stated))
    if isinstance(timings := value.get("timings"), dict):
        usage = _merged(usage, _of_timings(timings))
    return usage


def _of_timings(timings: dict[str, Any]) -> Usage:
    """server-common.cpp, server_slot_stats::to_json: cache_n + prompt_n is the whole prompt."""
    cached, evaluated = _count(timings, "cache_n"), _count(timings, "prompt_n")
    return Usage(
        prompt_tokens=_sum(cached, evaluated),
        cached_tokens=cached,
        evaluated_tokens=evaluated,
        predicted_tokens=_count(timings, "predicted_n"),
        prompt_ms=_amount(timings, "prompt_ms"),
        predicted_ms=_amount(timings, "predicted_ms"),
    )


def _of_progress(progress: dict[str, Any]) -> Usage:
    """A prefill that was broken off evaluated fewer tokens than it had to: then their number stays unknown."""
    total, cached, processed = (_count(progress, key) for key in ("total", "cache", "processed"))
    done = total is not None and processed is not None and processed >= total
    return Usage(
        prompt_tokens=total,
        cached_tokens=cached,
        evaluated_tokens=_difference(total, cached) if done else None,
    )


def _of_native(value: dict[str, Any]) -> Usage:
    """/completion: `tokens_evaluated` is the whole prompt, and `tokens_cached` what the slot holds, no reuse."""
    return Usage(
        prompt_tokens=_count(value, "tokens_evaluated"),
        predicted_tokens=_count(value, "tokens_predicted"),
    )


def _of_openai(usage: dict[str, Any]) -> Usage:
    """`usage` of chat and completions, or of Responses; cached tokens are part of the prompt tokens in both."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    prompt = _first(_count(usage, "prompt_tokens"), _count(usage, "input_tokens"))
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        evaluated_tokens=_difference(prompt, cached),
        predicted_tokens=_first(_count(usage, "completion_tokens"), _count(usage, "output_tokens")),
    )


def _of_anthropic(usage: dict[str, Any]) -> Usage:
    """`input_tokens` are the evaluated ones only; message_delta repeats none of the prompt's (server-task.cpp)."""
    cached, evaluated = _count(usage, "cache_read_input_tokens"), _count(usage, "input_tokens")
    return Usage(
        prompt_tokens=_sum(cached, evaluated),
        cached_tokens=cached,
        evaluated_tokens=evaluated if cached is not None else None,
        predicted_tokens=_count(usage, "output_tokens"),
    )


def _of_ollama(value: dict[str, Any]) -> Usage:
    """The counters of the `done` object. An absent cached count means unknown, not zero (Ollama PR 17943)."""
    prompt, cached = _count(value, "prompt_eval_count"), _count(value, "prompt_eval_cached_count")
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        evaluated_tokens=_difference(prompt, cached),
        predicted_tokens=_count(value, "eval_count"),
        prompt_ms=_ms(_amount(value, "prompt_eval_duration")),
        predicted_ms=_ms(_amount(value, "eval_duration")),
    )


def _merged(old: Usage, new: Usage) -> Usage:
    """`new` where it states something, else `old`."""
    return Usage(
        prompt_tokens=_first(new.prompt_tokens, old.prompt_tokens),
        cached_tokens=_first(new.cached_tokens, old.cached_tokens),
        evaluated_tokens=_first(new.evaluated_tokens, old.evaluated_tokens),
        predicted_tokens=_first(new.predicted_tokens, old.predicted_tokens),
        prompt_ms=new.prompt_ms if new.prompt_ms is not None else old.prompt_ms,
        predicted_ms=new.predicted_ms if new.predicted_ms is not None else old.predicted_ms,
    )


def _count(value: dict[str, Any], key: str) -> int | None:
    found = value.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


def _amount(value: dict[str, Any], key: str) -> float | None:
    found = value.get(key)
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) and found >= 0 else None


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / _NS_PER_MS


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _difference(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(0, a - b)


def _first(a: int | None, b: int | None) -> int | None:
    return b if a is None else a
