"""A journal export as arrivals: no text is in it, but what each prompt shared with which other one is.

`reference` names the request a prompt was compared with, `first_difference` where it left it, and `cache_n` what the
server itself found to be equal, which is exact where there was something to find. From these each prompt is a
beginning of another one (and of its answer), and a rest of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prefixproxy.errors import UsageError
from prefixproxy.journal import read_jsonl
from prefixproxy.simulate.play import Arrival
from prefixproxy.simulate.text import Text, span
from prefixproxy.types import Kind, Outcome, RequestRecord

NEAR = 0.1
"""How far, relatively, an estimate from bytes may be from the server's count of the same prefix."""
MIN_RATE_TOKENS = 256
"""Prompts that evaluate fewer tokens say more about overhead than about the prefill rate."""
MOST_TOKENS = 10_000_000
MOST_S, MOST_MS = 1e10, 1e9
"""Times are Unix seconds. Beyond this they are milliseconds, or no times at all, and virtual ones lose their
fractions."""


@dataclass(frozen=True, slots=True)
class Trace:
    """`skipped`: records without token counts, such as rejected requests. Rates in tokens per second, None where the
    trace does not show them."""

    arrivals: tuple[Arrival, ...]
    skipped: int
    prefill_rate: float | None
    decode_rate: float | None
    evaluated: int
    """Tokens the recorded requests evaluated themselves, warm-ups not included."""
    models: tuple[str, ...] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    """Records by who counted their cached tokens."""


def read_trace(lines: Iterable[bytes]) -> Trace:
    """Raises UsageError with the line's number and what is wrong with it."""
    records, skipped = [], 0
    for number, record in read_jsonl(lines):
        _check(number, record)
        if (
            record.prompt_tokens and record.outcome is not Outcome.REJECTED
        ):  # what was too long has a count all the same
            records.append(record)
        else:
            skipped += 1
    if not records:
        told = f"all {skipped} records in it are of requests that were never evaluated" if skipped else "it is empty"
        raise UsageError(f"no request to replay: {told}")
    records.sort(key=lambda record: record.time)
    return Trace(
        arrivals=tuple(_Builder(records).arrivals()),
        skipped=skipped,
        prefill_rate=_prefill_rate(records),
        decode_rate=_decode_rate(records),
        evaluated=sum(record.prompt_n or 0 for record in records),
        models=tuple(dict.fromkeys(record.model for record in records if record.model)),
        counted=Counter(str(record.cache_source) for record in records),
    )


def _check(number: int, record: RequestRecord) -> None:
    """The values that are computed with are numbers."""
    for name in ("prompt_tokens", "cache_n", "prompt_n", "predicted_n"):
        value = getattr(record, name)
        if value is not None and (type(value) is not int or not 0 <= value <= MOST_TOKENS):
            told = f"a whole number from 0 to {MOST_TOKENS:,} is expected"
            raise UsageError(f"line {number}: {name}: {told}, got {value!r}")
    for name, most in (("time", MOST_S), ("total_ms", MOST_MS), ("ttft_ms", MOST_MS), ("prompt_ms", MOST_MS)):
        value = getattr(record, name)
        if value is None and name in ("ttft_ms", "prompt_ms"):
            continue
        if type(value) not in (int, float) or not 0 <= value <= most:
            raise UsageError(f"line {number}: {name}: a number from 0 to {most:g} is expected, got {value!r}")


def _prefill_rate(records: Iterable[RequestRecord]) -> float | None:
    timed = [r for r in records if (r.prompt_n or 0) >= MIN_RATE_TOKENS and r.prompt_ms]
    seconds = sum(record.prompt_ms or 0.0 for record in timed) / 1e3
    return sum(record.prompt_n or 0 for record in timed) / seconds if seconds else None


def _decode_rate(records: Iterable[RequestRecord]) -> float | None:
    timed = [r for r in records if (r.predicted_n or 0) > 1 and r.ttft_ms is not None and r.total_ms > r.ttft_ms]
    seconds = sum(record.total_ms - (record.ttft_ms or 0.0) for record in timed) / 1e3
    return sum((record.predicted_n or 0) - 1 for record in timed) / seconds if seconds else None


@dataclass(slots=True)
class _Builder:
    """Builds each prompt on top of the one it refers to."""

    records: list[RequestRecord]
    _numbers: dict[str, int] = field(default_factory=dict)
    _texts: dict[int, Text] = field(default_factory=dict)
    _references: dict[int, int] = field(default_factory=dict)
    _shared: dict[int, int] = field(default_factory=dict)
    _roots: dict[str, int] = field(default_factory=dict)

    def arrivals(self) -> list[Arrival]:
        self._numbers = {record.id: i for i, record in enumerate(self.records)}
        self._references = self._find_references()
        self._roots = self._found_roots()
        for i in range(len(self.records)):
            self._build(i)
        heads = self._heads()
        after = {i: r for i, r in self._references.items() if self._answers(i, r)}
        start, awaited = self.records[0].time, set(after.values())
        return [self._arrival(i, start, heads, after.get(i), i in awaited) for i in range(len(self.records))]

    def _arrival(self, i: int, start: float, heads: dict[str, int], after: int | None, awaited: bool) -> Arrival:
        record = self.records[i]
        return Arrival(
            time=record.time - start,
            key=i,
            prompt=self._texts[i],
            answer=self._answer(i),
            head=min(heads.get(record.family, 0), len(self._texts[i])),
            family=record.family,
            tenant=record.tenant,
            side=record.kind is Kind.SIDE,
            after=after,
            think_s=0.0 if after is None else record.time - self._end_of(after),
            awaited=awaited,
        )

    def _answers(self, i: int, reference: int) -> bool:
        """Whether it could only be sent once the other one was answered."""
        return self.records[i].kind is Kind.CONTINUATION and self.records[i].time >= self._end_of(reference)

    def _end_of(self, i: int) -> float:
        return self.records[i].time + self.records[i].total_ms / 1e3

    def _answer(self, i: int) -> Text:
        return span(-(i + 1), max(1, self.records[i].predicted_n or 0))

    def _find_references(self) -> dict[int, int]:
        """The request each is built on: the one it names, else the last one before it of its lane or family."""
        found: dict[int, int] = {}
        lanes: dict[str, int] = {}
        families: dict[str, int] = {}
        for i, record in enumerate(self.records):
            named = self._numbers.get(record.reference) if record.reference else None
            if named is None and record.kind in (Kind.CONTINUATION, Kind.REWRITE, Kind.COMPACTION):
                named = lanes.get(record.lane)
            if named is None and record.family and (record.kind is not Kind.UNIQUE or record.cache_n):
                named = families.get(record.family)
            if named is not None and named != i:
                found[i] = named
            lanes[record.lane] = families[record.family] = i
        return found

    def _found_roots(self) -> dict[str, int]:
        """The exact length of a family's root, where the server found it for one of its lanes."""
        counts: dict[str, Counter[int]] = {}
        for i, reference in self._references.items():
            record = self.records[i]
            if record.kind is Kind.FORK and record.cache_n and _near(record.cache_n, self._estimate(i, reference)):
                counts.setdefault(record.family, Counter())[record.cache_n] += 1
        return {family: each.most_common(1)[0][0] for family, each in counts.items()}

    def _build(self, i: int) -> None:
        """Texts of this one and of all it stands on, without recursion: conversations are long."""
        path = [i]
        while path[-1] in self._references and self._references[path[-1]] not in self._texts:
            if self._references[path[-1]] in path:
                del self._references[path[-1]]  # they name each other: a trace that was edited
                break
            path.append(self._references[path[-1]])
        for each in reversed(path):
            if each not in self._texts:
                self._texts[each] = self._text(each)

    def _text(self, i: int) -> Text:
        n_tokens, reference = self.records[i].prompt_tokens or 0, self._references.get(i)
        if reference is None:
            return span(i + 1, n_tokens)
        base = self._texts[reference] + self._answer(reference)
        shared = max(0, min(self._shares(i, reference), n_tokens - 1, len(base)))
        self._shared[i] = shared
        head, rest = base.head(shared), span(i + 1, n_tokens - shared)
        return head + rest

    def _shares(self, i: int, reference: int) -> int:
        """Tokens it has in common with the request it refers to, and that one's answer."""
        record, before = self.records[i], self.records[reference]
        n_before, cached = before.prompt_tokens or 0, record.cache_n or 0
        if record.kind is Kind.CONTINUATION:
            return cached if cached > n_before else n_before + (before.predicted_n or 0)
        if record.kind in (Kind.SIDE, Kind.UNIQUE):
            return cached
        estimate = self._estimate(i, reference)
        return next((n for n in (cached, self._roots.get(record.family, 0)) if _near(n, estimate)), estimate)

    def _estimate(self, i: int, reference: int) -> int:
        """The same from bytes: where the prompt left the other one, if it did."""
        record, n_before = self.records[i], self.records[reference].prompt_tokens or 0
        n_tokens = record.prompt_tokens or 0
        if record.first_difference is None:
            return min(n_tokens, n_before)
        return n_tokens - record.first_difference.tokens_after

    def _heads(self) -> dict[str, int]:
        """The least that lanes of a family share, taken for its system text and tools."""
        heads: dict[str, int] = {}
        for i, shared in self._shared.items():
            record = self.records[i]
            if record.kind in (Kind.FORK, Kind.REDUCER):
                heads[record.family] = min(shared, heads.get(record.family, shared))
        return heads


def _near(exact: int, estimate: int) -> bool:
    return abs(exact - estimate) <= NEAR * estimate
