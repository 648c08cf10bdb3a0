"""One request under the microscope: its prompt as a strip, how far the resident prefix reached, and what to change.

Only labels and sizes are kept, in bytes; tokens are each segment's share of the prompt tokens that the server reported.
Text is kept where the settings say so, and then the first difference is exact and shown.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from sys import intern
from typing import Any

from prefixproxy.advice import OTHER_RULE, advice
from prefixproxy.chat import MESSAGE
from prefixproxy.chat_parts import PART
from prefixproxy.misses import TOLERANCE_RATIO, TOLERANCE_TOKENS
from prefixproxy.prefix import shared_bytes
from prefixproxy.types import RequestRecord

MAX_SEGMENTS = 128
"""Segments kept of one prompt: the root, the newest messages, and what is between them as one."""
MAX_TEXT_BYTES = 64 << 20
"""Prompt text kept over all requests, where text is kept at all."""
EXCERPT_CHARS = 600
BEFORE_CHARS, BEHIND_CHARS = 80, 160
"""Text shown on both sides of the first difference."""
RATE_MIN_TOKENS = 64
"""A prefill of fewer tokens says nothing about seconds per token."""

_BORDERS = bytes.maketrans(b"\xfc\xfd\xfe\xff", b"    ")


@dataclass(frozen=True, slots=True)
class Strip:
    """A prompt's segments in reading order: `ends` in bytes, one for each label; the first `head_bytes` are the root.
    `reference`: id of the earlier request that the first difference refers to, "" for none."""

    labels: tuple[str, ...]
    ends: tuple[int, ...]
    head_bytes: int
    reference: str = ""

    @property
    def n_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def segments(self) -> list[tuple[str, int, int]]:
        return [(label, *span) for label, span in zip(self.labels, pairwise((0, *self.ends)), strict=True)]


def strip_of(segments: Sequence[tuple[str, int, int]], n_bytes: int, head_bytes: int, reference: str = "") -> Strip:
    """The strip of a plan's segments (label, start, end); a prompt without any is one segment."""
    if not segments:
        return Strip(("prompt",), (n_bytes,), 0, reference)
    labels, ends = [label for label, _, _ in segments], [end for _, _, end in segments]
    surplus = len(labels) - MAX_SEGMENTS
    if surplus > 0:
        # The root and the newest messages say most, so the oldest messages behind the root become one.
        first = min(sum(end <= head_bytes for end in ends), MAX_SEGMENTS // 2)
        labels[first : first + surplus + 1] = [f"{labels[first]} ... {labels[first + surplus]}"]
        del ends[first : first + surplus]
    return Strip(tuple(map(intern, labels)), tuple(ends), head_bytes, reference)


class Strips:
    """The strips of the newest `keep` requests, and with `store_text` their text, as far as it fits."""

    def __init__(self, keep: int, *, store_text: bool = False, max_text_bytes: int = MAX_TEXT_BYTES) -> None:
        self._keep = keep
        self._store_text = store_text
        self._max_text_bytes = max_text_bytes
        self._strips: OrderedDict[str, Strip] = OrderedDict()
        self._texts: OrderedDict[str, tuple[tuple[bytes, ...], bytes]] = OrderedDict()
        self.text_bytes = 0

    def __len__(self) -> int:
        return len(self._strips)

    def remember(self, request_id: str, strip: Strip, parts: Sequence[bytes], body: bytes = b"") -> None:
        """`parts`: the canonical bytes of each segment as sent upstream; `body`: the client's own. Both are kept only
        with `store_text`."""
        self._strips[request_id] = strip
        if self._store_text:
            self._drop_text(request_id)
            self._texts[request_id] = tuple(parts), body
            self.text_bytes += _size(tuple(parts), body)
        while len(self._strips) > self._keep:
            oldest, _ = self._strips.popitem(last=False)
            self._drop_text(oldest)
        while self.text_bytes > self._max_text_bytes:
            self._drop_text(next(iter(self._texts)))

    def recall(self, request_id: str, strip: Strip) -> None:
        """A request of an earlier process, whose text is gone."""
        self._strips[request_id] = strip

    def strip(self, request_id: str) -> Strip | None:
        return self._strips.get(request_id)

    def text(self, request_id: str) -> tuple[bytes, ...] | None:
        """The prompt's canonical parts, None where they are not kept."""
        found = self._texts.get(request_id)
        return found[0] if found else None

    def body(self, request_id: str) -> bytes | None:
        """The body as the client sent it, None where it is not kept."""
        found = self._texts.get(request_id)
        return found[1] if found else None

    def _drop_text(self, request_id: str) -> None:
        found = self._texts.pop(request_id, None)
        if found:
            self.text_bytes -= _size(*found)


def _size(parts: tuple[bytes, ...], body: bytes) -> int:
    return sum(map(len, parts)) + len(body)


def explain(
    record: RequestRecord,
    strips: Strips,
    seconds_per_token: float | None,
    treatments: Mapping[str, str],
    *,
    observing: bool = False,
) -> dict[str, Any]:
    """Why a request cost what it cost, as JSON values; unknown is None.

    `seconds_per_token`: the measured prefill rate of its model. `treatments`: see `rule_advice`. `observing`: the rules
    only told what they would move.
    """
    strip = strips.strip(record.id)
    difference = _difference(record, strip, strips)
    rate = _own_rate(record) or seconds_per_token
    return {
        "prompt_tokens": record.prompt_tokens,
        "prompt_bytes": strip.n_bytes if strip else None,
        "tokens_are": _tokens_are(record, strip),
        "strip": _strip(record, strip, strips.text(record.id)) if strip else [],
        "resident": _resident(record, strip),
        "reusable_tokens": _reusable(record, difference, strip, strips),
        "first_difference": difference,
        "moved": _moved(record, treatments, observing=observing),
        "cost": _cost(record, rate),
        "advice": advice(record),
    }


def tokens_before(offset: int, n_bytes: int, prompt_tokens: int) -> int:
    """The tokens in front of a byte, by its share of the prompt."""
    return round(prompt_tokens * offset / n_bytes) if n_bytes else 0


def _several(record: RequestRecord, strip: Strip) -> bool:
    """Whether the body holds several prompts: the server's counts are those of the last one then. /infill has one, of
    a prefix and a suffix."""
    return len(strip.labels) > 1 and strip.labels[-1].startswith("prompt[") and record.path != "/infill"


def _tokens_are(record: RequestRecord, strip: Strip | None) -> str:
    if record.prompt_tokens is None:
        return "unknown"
    return "those of the last prompt" if strip and _several(record, strip) else "estimated from bytes"


def _strip(record: RequestRecord, strip: Strip, text: tuple[bytes, ...] | None) -> list[dict[str, Any]]:
    prompt, cached = record.prompt_tokens, record.cache_n
    answers = [i for i, label in enumerate(strip.labels) if label.startswith("assistant")]
    newest = max(answers, default=-1) + 1
    out = []
    for i, (label, start, end) in enumerate(strip.segments):
        part = "root" if end <= strip.head_bytes else "tail" if i >= newest else "history"
        one: dict[str, Any] = {"segment": label, "part": part, "bytes": end - start, "tokens": None, "cached": None}
        if prompt is not None and not _several(record, strip):
            first, last = (tokens_before(at, strip.n_bytes, prompt) for at in (start, end))
            one["tokens"] = last - first
            one["cached"] = None if cached is None else max(0, min(last, cached) - first)
        if text is not None and len(text) == len(strip.labels):
            one["text"] = _excerpt(text[i])
        out.append(one)
    return out


def _resident(record: RequestRecord, strip: Strip | None) -> dict[str, Any] | None:
    """Where the resident prefix ended: the segment, and about how many bytes into it."""
    prompt, cached = record.prompt_tokens, record.cache_n
    if prompt is None or cached is None or strip is None or _several(record, strip):
        return None
    at = round(strip.n_bytes * min(1.0, cached / max(1, prompt)))
    label, offset = _locate(strip, at)
    return {"tokens": cached, "segment": label, "offset": offset}


def _locate(strip: Strip, at: int) -> tuple[str, int]:
    for label, start, end in strip.segments:
        if start <= at < end:
            return label, at - start
    return "tail", at - strip.n_bytes


def _difference(record: RequestRecord, strip: Strip | None, strips: Strips) -> dict[str, Any] | None:
    first, prompt = record.first_difference, record.prompt_tokens
    if first is None or prompt is None:
        return None
    out: dict[str, Any] = {
        "segment": first.segment,
        "offset": first.offset,
        "token": prompt - first.tokens_after,
        "tokens_after": first.tokens_after,
        "exact": False,
        "compared_with": strip.reference if strip and strip.reference else None,
    }
    here, there = strips.text(record.id), strips.text(strip.reference) if strip else None
    if strip and here and there:
        exact = _exact(strip, b"".join(here), b"".join(there), prompt)
        return out | exact if exact else None
    return out


def _exact(strip: Strip, here: bytes, there: bytes, prompt_tokens: int) -> dict[str, Any] | None:
    """Both texts are kept: the very byte, and what stands there in each. None if one leads the other whole: then what
    differs is no text (another model, on a server of several)."""
    at = shared_bytes(here, there)
    if at >= min(len(here), len(there)):
        return None
    segment, offset = _locate(strip, at)
    token = tokens_before(at, strip.n_bytes, prompt_tokens)
    start = max(at - offset + len(_border(here[at - offset : at])), at - BEFORE_CHARS)
    return {
        "segment": segment,
        "offset": offset,
        "token": token,
        "tokens_after": prompt_tokens - token,
        "exact": True,
        "common": _readable(here[start:at]),
        "before": _readable(there[at : at + BEHIND_CHARS].partition(MESSAGE)[0]),
        "now": _readable(here[at : at + BEHIND_CHARS].partition(MESSAGE)[0]),
    }


def _reusable(
    record: RequestRecord, difference: Mapping[str, Any] | None, strip: Strip | None, strips: Strips
) -> int | None:
    """Tokens that a slot could have held: as many as the scheduler expected, or all that this prompt has in common with
    the one it is compared with. Never less than what was cached."""
    prompt, cached = record.prompt_tokens, record.cache_n
    if prompt is None or cached is None:
        return None
    common = difference["token"] if difference else 0
    reference = strips.strip(strip.reference) if strip else None
    if strip and reference and not difference:
        # One leads the other whole.
        common = tokens_before(min(strip.n_bytes, reference.n_bytes), strip.n_bytes, prompt)
    known = min(prompt, max(record.expected_cached or 0, common))
    return known if known - cached > max(TOLERANCE_TOKENS, TOLERANCE_RATIO * known) else cached


def _moved(record: RequestRecord, treatments: Mapping[str, str], *, observing: bool) -> list[dict[str, Any]]:
    """What each rule moved, or would have, largest first."""
    sizes: Counter[str] = Counter()
    where: dict[str, list[str]] = {}
    for relocation in record.relocations:
        sizes[relocation.rule] += relocation.bytes
        segments = where.setdefault(relocation.rule, [])
        if relocation.segment not in segments:
            segments.append(relocation.segment)
    return [
        {
            "rule": rule,
            "segments": where[rule],
            "bytes": n_bytes,
            "done": not observing,
            "advice": treatments.get(rule, OTHER_RULE),
        }
        for rule, n_bytes in sizes.most_common()
    ]


def _own_rate(record: RequestRecord) -> float | None:
    if record.prompt_ms is None or record.prompt_n is None or record.prompt_n < RATE_MIN_TOKENS:
        return None
    return record.prompt_ms / 1e3 / record.prompt_n


def _cost(record: RequestRecord, rate: float | None) -> dict[str, Any]:
    """Seconds of prefill: as the server reported them, else evaluated tokens at the measured rate."""
    evaluated, cached = record.prompt_n, record.cache_n
    estimated = evaluated * rate if evaluated is not None and rate is not None else None
    reported = record.prompt_ms / 1e3 if record.prompt_ms is not None else None
    return {
        "evaluated_tokens": evaluated,
        "seconds": estimated if reported is None else reported,
        "seconds_are": "reported" if reported is not None else "estimated" if estimated is not None else "unknown",
        "saved_tokens": cached,
        "saved_seconds": cached * rate if cached is not None and rate is not None else None,
        "seconds_per_token": rate,
    }


def _excerpt(part: bytes) -> str:
    """The beginning and the end of a segment's text, its border and role left out."""
    text = _readable(part[len(_border(part)) :])
    if len(text) <= EXCERPT_CHARS:
        return text
    return f"{text[: EXCERPT_CHARS * 2 // 3]} [...] {text[-EXCERPT_CHARS // 3 :]}"


def _border(part: bytes) -> bytes:
    """What stands before a segment's text: its mark and its role."""
    role, part_mark, _ = part.partition(PART)
    return role + part_mark if part.startswith(MESSAGE) and part_mark else b""


def _readable(text: bytes) -> str:
    return text.translate(_BORDERS).decode("utf-8", "replace")
