"""What Ollama's counts mean, version by version, and what can be told where it reports no cached tokens.

    version           prompt_eval_count      cached tokens
    0.4 .. 0.24       the whole prompt       not reported
    0.30.0            evaluated tokens only  not reported
    0.30.1 .. 0.33.2  the whole prompt       not reported; /v1/responses has a constant 0
    0.33.3 ..         the whole prompt       prompt_eval_cached_count, usage details

A count that is there is believed, whatever the version says. Where it is missing, the time of the prefill tells how
much was evaluated, measured against the same model's own prompts of which nothing can have been cached: the first one
after a load. `prompt_eval_duration` grows with everything that runs beside it, so only requests that ran alone count,
and only clear results are stated.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefixproxy.backends import Answer, Reading
from prefixproxy.types import Api, CacheSource, Usage

Version = tuple[int, ...]

EVALUATED_ONLY: Version = (0, 30, 0)
RELOAD_NS = 500_000_000
"""A loaded model answers `load_duration` of 20 ms, before 0.32.15 up to 300 ms; a load takes seconds."""
MIN_CONTROL_TOKENS = 256
SIMILAR_LENGTH = 2.0
"""A token costs more the deeper it stands: a control counts for prompts up to this many times longer or shorter."""
CLEAR_HIT, CLEAR_MISS = 0.5, 0.9
"""Shares of a prompt evaluated: up to the first it was surely reused in part, from the second on surely not."""
MAX_MODELS, MAX_CONTROLS = 64, 8

CLEARLY_MORE = 1.25
"""How many times the counted tokens our estimate must be before a prompt counts as cut."""
KEPT_TOKENS = (4, 5)
"""`num_keep`'s default, and that with a BOS token: what a cut prompt keeps of its front."""

_NATIVE = frozenset({Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE})


def version_of(text: str) -> Version | None:
    """The numbers of a release; None for anything else ("0.0.0" is what builds from source say)."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    numbers = tuple(int(part) for part in found.groups()) if found else (0, 0, 0)
    return numbers if any(numbers) else None


def n_ctx_of(body: Mapping[str, Any]) -> int | None:
    """The `num_ctx` a request asks for."""
    options = body.get("options")
    asked = options.get("num_ctx") if isinstance(options, dict) else None
    return asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else None


def truncated(estimated: int, counted: int | None, n_ctx: int | None) -> bool:
    """Whether a prompt of about `estimated` tokens, of which `counted` remained, was cut to fit into `n_ctx`.

    Ollama drops the oldest messages until the rest fits; a single prompt it cuts to half its context
    (llm/llama_server.go), and before 0.30 to all of it.
    """
    if counted is None or n_ctx is None or counted > n_ctx:
        return False
    halves = {n_ctx - (n_ctx - kept) // 2 for kept in KEPT_TOKENS}
    if any(abs(counted - half) <= 1 for half in halves):
        return estimated > CLEARLY_MORE * counted
    if counted >= n_ctx - 1:
        return estimated > n_ctx
    return estimated > n_ctx and estimated > CLEARLY_MORE * counted


class Controls:
    """What evaluating a token costs: for each model the newest prompts that were evaluated whole, as tokens and
    milliseconds."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, list[tuple[int, float]]] = OrderedDict()

    def add(self, model: str, tokens: int, ms: float) -> None:
        if tokens < MIN_CONTROL_TOKENS or ms <= 0:
            return
        known = [*self._models.pop(model, []), (tokens, ms)]
        self._models[model] = known[-MAX_CONTROLS:]
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)

    def evaluated(self, model: str, tokens: int, ms: float) -> float | None:
        """About how many of a prompt's tokens were evaluated in `ms`; None without a control of similar length."""
        known = [(abs(n - tokens), each / n) for n, each in self._models.get(model, ()) if _similar(n, tokens)]
        return ms / min(known)[1] if known else None


class Counts:
    """Reads answers of one Ollama. `version` is None until it was asked, or where it is no release."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self._controls = Controls()

    def read(self, answer: Answer, n_ctx: int | None) -> Reading:
        usage = self._meant(answer)
        cut = truncated(answer.estimated_tokens, usage.prompt_tokens, n_ctx)
        if answer.api in _NATIVE and usage.source is CacheSource.UNKNOWN and not cut:
            usage = self._inferred(answer, usage)
        return Reading(usage, cut)

    def _meant(self, answer: Answer) -> Usage:
        usage = answer.usage
        if answer.api is Api.RESPONSES and usage.cached_tokens == 0 and not self._reports():
            return replace(usage, cached_tokens=None, evaluated_tokens=None, source=CacheSource.UNKNOWN)
        if answer.api is Api.MESSAGES and usage.cached_tokens is None:
            return replace(usage, prompt_tokens=_input_tokens(answer))
        if answer.api in _NATIVE and self.version == EVALUATED_ONLY and usage.cached_tokens is None:
            return replace(usage, prompt_tokens=None, evaluated_tokens=usage.prompt_tokens)
        return usage

    def _reports(self) -> bool:
        return self.version is None or self.version >= (0, 33, 3)

    def _inferred(self, answer: Answer, usage: Usage) -> Usage:
        tokens, ms = usage.prompt_tokens, usage.prompt_ms
        if tokens is None or not ms or not answer.alone or not _one_pass(answer.body):
            return usage
        model = str(answer.body.get("model") or "")
        if _loaded_for(answer):
            self._controls.add(model, tokens, ms)
            return replace(usage, cached_tokens=0, evaluated_tokens=tokens, source=CacheSource.INFERRED)
        evaluated = self._controls.evaluated(model, tokens, ms)
        if evaluated is None or CLEAR_HIT * tokens < evaluated < CLEAR_MISS * tokens:
            return usage
        cached = 0 if evaluated >= CLEAR_MISS * tokens else tokens - max(1, round(evaluated))
        return replace(usage, cached_tokens=cached, evaluated_tokens=tokens - cached, source=CacheSource.INFERRED)


def _similar(a: int, b: int) -> bool:
    return max(a, b) <= SIMILAR_LENGTH * min(a, b)


def _loaded_for(answer: Answer) -> bool:
    """Whether its model was loaded for this request: nothing of it can have been cached."""
    took = answer.last[-1].get("load_duration") if answer.last else None
    return isinstance(took, int) and not isinstance(took, bool) and took > RELOAD_NS


def _one_pass(body: Mapping[str, Any]) -> bool:
    """Whether the counts speak of the whole request. With a format and thinking the model runs twice, and they are
    those of the second run (routes.go); images take time that no token count shows."""
    twice = bool(body.get("format")) and body.get("think") is not False
    messages = body.get("messages")
    images = [body.get("images")]
    images += [m.get("images") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    return not twice and not any(images)


def _input_tokens(answer: Answer) -> int | None:
    """Without a cached count, `input_tokens` is the whole prompt. The first event has only an estimate
    (anthropic.go EstimateInputTokens); the last one has the count."""
    for value in reversed(answer.last):
        usage = value.get("usage")
        found = usage.get("input_tokens") if isinstance(usage, dict) else None
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return None
