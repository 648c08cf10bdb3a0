"""The checks of an Ollama. Facts behind them are in docs/explanation/ollama.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prefixproxy.doctor.evidence import Evidence
from prefixproxy.doctor.findings import Finding, error, note, warning

DEFAULT_N_CTX = 4096
SHORT_KEEP_ALIVE_S = 15 * 60
NEW_ENGINE: tuple[int, ...] = (0, 30, 0)
COUNTS_ONLY_EVALUATED = (0, 30, 0)
_UNQUANTISED = frozenset({"f16", "bf16", "f32"})


def ollama_findings(seen: Evidence, version: tuple[int, ...] | None, unloads_in_s: float | None) -> list[Finding]:
    """All that is wrong with one Ollama. `unloads_in_s`: when the first of its models will be unloaded, None if that is
    never or not known."""
    checks = (_parallel, _context, _precision)
    found = [finding for check in checks for finding in check(seen)]
    return [*found, *_keep_alive(unloads_in_s), *_version(seen, version)]


def _running(seen: Evidence) -> list[dict[str, Any]]:
    return list(seen.reported.get("running") or ())


def _parallel(seen: Evidence) -> Iterator[Finding]:
    for model in _running(seen):
        if model["one_slot"]:
            yield warning(
                "one-slot-model",
                f"{model['name']} is of the family {model['family']}",
                "Ollama runs this family one request at a time, whatever OLLAMA_NUM_PARALLEL says: lanes wait for each "
                "other, and one slot holds one prefix.",
                "llama-server -np N with the same GGUF",
            )
    if seen.facts.n_slots == 1 and not any(model["one_slot"] for model in _running(seen)):
        yield warning(
            "one-slot",
            f"one request at a time (from {seen.facts.told_by.get('n_slots', 'the settings')})",
            "Agents that start together wait for each other, and one slot keeps one prefix.",
            "OLLAMA_NUM_PARALLEL=4, and upstreams.slots = 4 where Ollama runs on another machine",
        )


def _context(seen: Evidence) -> Iterator[Finding]:
    wanted = seen.demand.min_n_ctx_slot
    if not _running(seen):
        yield note(
            "nothing-loaded",
            "no model is loaded",
            "The context of a request and when the model is unloaded show only then.",
            "ask it something first",
        )
    for model in _running(seen):
        n_ctx = model["n_ctx"]
        if n_ctx is None:
            continue
        why = (
            "Ollama drops the oldest messages of a prompt that does not fit, or cuts it to half the context, without "
            "an error; on /v1 nothing can stop it."
        )
        fix = f"OLLAMA_CONTEXT_LENGTH={max(wanted, 4 * DEFAULT_N_CTX)}"
        if wanted and n_ctx < wanted:
            below = f"{model['name']}: context {n_ctx:,}, context.min_n_ctx_slot is {wanted:,}"
            yield error("context-small", below, why, fix)
        elif not wanted and n_ctx <= DEFAULT_N_CTX:
            yield warning("context-small", f"{model['name']}: context {n_ctx:,}, the default", why, fix)
    cut = seen.behind.get("reported", {}).get("truncated_prompts")
    if cut:
        yield error(
            "prompts-cut",
            f"{cut} prompts were cut since the proxy started",
            "Their front, usually the system prompt, was gone without an error.",
            "OLLAMA_CONTEXT_LENGTH, or num_ctx for /api/chat and /api/generate",
        )


def _precision(seen: Evidence) -> Iterator[Finding]:
    types = seen.facts.kv_types
    if types is not None and not set(types) <= _UNQUANTISED and not seen.verified:
        yield warning(
            "kv-quantised",
            f"the KV cache is K {types[0]}, V {types[1]}",
            "On some models a quantised cache garbles answers: it is to be shown for this one.",
            f"prefixproxy verify {seen.facts.url}, or OLLAMA_KV_CACHE_TYPE=f16",
        )


def _keep_alive(unloads_in_s: float | None) -> Iterator[Finding]:
    if unloads_in_s is not None and unloads_in_s <= SHORT_KEEP_ALIVE_S:
        yield warning(
            "keep-alive",
            f"the model is unloaded after {unloads_in_s / 60:.0f} more idle minutes",
            "With it goes its whole KV cache: the next request loads it and evaluates everything.",
            "OLLAMA_KEEP_ALIVE=30m, or -1 for ever",
        )


def _version(seen: Evidence, version: tuple[int, ...] | None) -> Iterator[Finding]:
    if version is None:
        yield note("version-unknown", f"version {seen.facts.build!r}", "What its counts mean is not known.")
        return
    if version < NEW_ENGINE:
        yield warning(
            "old-engine",
            f"version {seen.facts.build}",
            "Before 0.30 one request reuses only what an idle slot holds, and a second conversation takes the first "
            "one's slot.",
            "Ollama 0.33.3 or newer",
        )
    if version == COUNTS_ONLY_EVALUATED:
        why = "Its prompt_eval_count leaves out reused tokens."
        yield warning("counts-differ", "version 0.30.0", why, "Ollama 0.33.3 or newer")
    if not seen.capabilities.reports_cached:
        yield note(
            "cached-inferred",
            f"version {seen.facts.build} does not report cached tokens",
            "Reuse is inferred from prompt_eval_duration, on Ollama's own paths, or unknown.",
            "Ollama 0.33.3 or newer",
        )
