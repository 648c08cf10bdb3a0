"""Watches every request and changes none: the record, the counters, the journal, and one log line.

A request only notes what happened; the notes are worked through in their order, many at a time, before anybody looks
and a tenth of a second later at the latest. That keeps observing out of every request's way, and costs a third less
processor time than doing it one by one (`make bench-observe`). A mistake in here is logged and never reaches a client.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from prefixproxy.classify import History
from prefixproxy.errors import ContextLengthExceeded
from prefixproxy.exchange import Exchange
from prefixproxy.journal import Journal, record_json
from prefixproxy.metrics import REJECT_REASONS, Metrics
from prefixproxy.microscope import MAX_SEGMENTS, Strip, Strips, strip_of
from prefixproxy.misses import Evidence
from prefixproxy.plan import Plan
from prefixproxy.schedule.types import Reason
from prefixproxy.sightings import Sight
from prefixproxy.trend import Trend
from prefixproxy.types import FirstDifference, Kind, MissReason, Outcome, RequestRecord, Usage

MAX_FAMILIES = 200
MAX_WORD = 200
"""Characters kept of what a client calls its model or lane."""

MAX_NOTES = 48
"""Notes that wait, three for most requests: working them through holds up everything else for milliseconds."""
LATEST_S = 0.1
"""How long a note waits when nobody looks."""

log = logging.getLogger("prefixproxy.requests")


@dataclass(slots=True)
class _Family:
    requests: int = 0
    cached_tokens: int = 0
    evaluated_tokens: int = 0
    misses: Counter[str] = field(default_factory=Counter)


class Telemetry:
    """Owner of metrics, journal, history, strips and trend. `model_of` names the model that an upstream runs."""

    def __init__(
        self,
        metrics: Metrics,
        journal: Journal,
        history: History,
        model_of: Callable[[str], str],
        strips: Strips,
        trend: Trend,
        cannot_roll_back: Callable[[str], bool] = lambda upstream: False,
    ) -> None:
        """`cannot_roll_back`: whether an upstream's model was seen unable to cut its memory back to a prefix."""
        self._metrics = metrics
        self._journal = journal
        self._strips = strips
        self._trend = trend
        self._history = history
        self._model_of = model_of
        self._cannot_roll_back = cannot_roll_back
        self._families: OrderedDict[str, _Family] = OrderedDict()
        self._notes: deque[Callable[[], None]] = deque()
        self._open: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def began(self, exchange: Exchange) -> None:
        """A request came in; `ended` once it is over, recorded or not."""
        self._open.add(exchange.id)

    def ended(self, exchange: Exchange) -> None:
        self._open.discard(exchange.id)

    def is_open(self, request_id: str) -> bool:
        """Whether this request is still under way: its record is made at its end."""
        return request_id in self._open

    def sent(self, exchange: Exchange, now: float) -> None:
        """A request goes upstream: what is it to those before it?"""
        exchange.sent = now
        self._note(partial(self._classify, exchange, exchange.planned()))

    def answered(self, exchange: Exchange, text: str) -> None:
        """What was said to it, to recognise a reducer that quotes it."""
        self._note(partial(self._history.answered, exchange.id, text))

    def record(self, exchange: Exchange, status: int, now: float) -> None:
        """Exactly once for each request that came in on a generating path, when nothing in it will change any more."""
        self._note(partial(self._record, exchange, status, now))

    @property
    def metrics(self) -> Metrics:
        self.settle()
        return self._metrics

    @property
    def journal(self) -> Journal:
        self.settle()
        return self._journal

    @property
    def strips(self) -> Strips:
        self.settle()
        return self._strips

    @property
    def trend(self) -> Trend:
        self.settle()
        return self._trend

    def settle(self) -> None:
        """Work through all notes."""
        while self._notes:
            try:
                self._notes.popleft()()
            except Exception:
                log.exception("observing a request failed")

    def _note(self, note: Callable[[], None]) -> None:
        self._notes.append(note)
        if len(self._notes) >= MAX_NOTES:
            self.settle()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LATEST_S, self._in_time)

    def _in_time(self) -> None:
        self._timer = None
        self.settle()

    def _classify(self, exchange: Exchange, plan: Plan) -> None:
        lease = exchange.lease
        model = (self._model_of(lease.backend.name) if lease else "") or _asked_model(plan)
        exchange.verdict = self._history.classify(_sight_of(exchange, plan, model))

    def _record(self, exchange: Exchange, status: int, now: float) -> None:
        record = self._record_of(exchange, status, now)
        self._metrics.observe(record)
        self._remember_strip(exchange)
        self._journal.add(record)
        rate = self._metrics.seconds_per_token(record.model)
        self._trend.request(record, rate, record.time + record.total_ms / 1e3)
        self._count_family(record)
        self._count_refusal(exchange, record.model)
        if log.isEnabledFor(logging.INFO):
            log.info("%s", orjson.dumps(record_json(record)).decode())

    def _count_refusal(self, exchange: Exchange, model: str) -> None:
        if exchange.refused in REJECT_REASONS:
            self._metrics.rejected(exchange.refused)
        elif exchange.refused == ContextLengthExceeded.code and exchange.measured.exceeded == "tenant":
            self._metrics.rejected("tenant_limit")
        elif exchange.refused == ContextLengthExceeded.code:
            self._metrics.context_rejected(model)

    def families(self) -> list[dict[str, Any]]:
        """What each family has cost so far, the most lately seen last."""
        self.settle()
        return [
            {
                "family": name,
                "requests": family.requests,
                "cached_tokens": family.cached_tokens,
                "evaluated_tokens": family.evaluated_tokens,
                "top_miss_reason": family.misses.most_common(1)[0][0] if family.misses else MissReason.NONE.value,
            }
            for name, family in self._families.items()
        ]

    def _record_of(self, exchange: Exchange, status: int, now: float) -> RequestRecord:
        lease, usage, plan, times = exchange.lease, exchange.usage, exchange.plan, exchange.times
        upstream = lease.backend.name if lease else ""
        reason, difference = self._explained(exchange, now)
        reference = exchange.verdict.reference if exchange.verdict else None
        return RequestRecord(
            id=exchange.id,
            time=exchange.unix_time,
            tenant=exchange.tenant,
            path=exchange.path,
            model=_word(self._model_of(upstream) or exchange.measured.model or (_asked_model(plan) if plan else "")),
            upstream=upstream,
            stream=exchange.streaming,
            kind=exchange.verdict.kind if exchange.verdict else Kind.UNIQUE,
            family=plan.family if plan else "",
            lane=_word(exchange.hints.lane or (plan.conversation if plan else "")),
            slot=lease.slot if lease else None,
            outcome=exchange.outcome,
            status=status,
            prompt_tokens=exchange.measured.exact if usage.prompt_tokens is None else usage.prompt_tokens,
            cache_n=usage.cached_tokens,
            prompt_n=usage.evaluated_tokens,
            cache_source=usage.source,
            expected_cached=lease.expected_cached if lease else None,
            miss_reason=reason,
            queue_ms=times.queue_s * 1e3,
            overhead_ms=times.own_s * 1e3,
            ttft_ms=None if times.first_token is None else (times.first_token - times.arrived) * 1e3,
            total_ms=(now - times.arrived) * 1e3,
            predicted_n=usage.predicted_tokens,
            prompt_ms=usage.prompt_ms,
            fork=lease.fork if lease else False,
            relocations=plan.relocations if plan else (),
            first_difference=difference,
            context_exceeded=bool(exchange.measured.exceeded),
            truncated=exchange.truncated,
            arm=exchange.arm or "",
            reference=reference.request_id if reference else "",
        )

    def _explained(self, exchange: Exchange, now: float) -> tuple[MissReason, FirstDifference | None]:
        lease = exchange.lease
        evaluated = exchange.outcome is Outcome.OK or exchange.usage.evaluated_tokens is not None
        if exchange.verdict is None or lease is None or not evaluated:
            return MissReason.UNKNOWN if lease else MissReason.NONE, None
        evidence = Evidence(
            started=exchange.sent,
            prompt_tokens=exchange.usage.prompt_tokens,
            cached_tokens=exchange.usage.cached_tokens,
            expected_cached=lease.expected_cached,
            upstream_since=lease.upstream_since,
            reuse_off=exchange.reuse_off,
            fork_failed=lease.reason in (Reason.WARM_FAILED, Reason.HOLD_EXPIRED),
            no_rollback=lambda: _evaluated_much(exchange.usage) and self._cannot_roll_back(lease.backend.name),
        )
        return self._history.explain_miss(exchange.verdict, evidence, now)

    def _remember_strip(self, exchange: Exchange) -> None:
        plan, verdict = exchange.plan, exchange.verdict
        if plan is None:
            return
        form = plan.canonical
        reference = verdict.reference.request_id if verdict and verdict.reference else ""
        head_bytes = form.head_bytes if form else 0
        if verdict and len(verdict.entry.digests) in range(1, MAX_SEGMENTS + 1):
            strip = Strip(verdict.entry.labels, verdict.entry.ends, head_bytes, reference)
        else:
            strip = strip_of(form.segments if form else (), plan.chain.n_bytes, head_bytes, reference)
        self._strips.remember(exchange.id, strip, form.parts if form else (plan.body.raw,), plan.body.raw)

    def _count_family(self, record: RequestRecord) -> None:
        if not record.family:
            return
        family = self._families.get(record.family)
        if family is None:
            family = self._families[record.family] = _Family()
        self._families.move_to_end(record.family)
        family.requests += 1
        family.cached_tokens += record.cache_n or 0
        family.evaluated_tokens += record.prompt_n or 0
        answered = record.outcome is Outcome.OK or record.cache_n is not None
        if answered and record.miss_reason is not MissReason.NONE:
            family.misses[record.miss_reason.value] += 1
        if len(self._families) > MAX_FAMILIES:
            self._families.popitem(last=False)


def _sight_of(exchange: Exchange, plan: Plan, model: str) -> Sight:
    """`model`: the one that runs. A server with one model answers whatever name its clients have for it."""
    form = plan.canonical
    return Sight(
        request_id=exchange.id,
        model=model,
        family=plan.family,
        lane=exchange.hints.lane,
        parts=form.parts if form else (plan.body.raw,),
        labels=tuple([label for label, _, _ in form.segments]) if form else ("prompt[0]",),
        n_head=sum([end <= form.head_bytes for _, _, end in form.segments]) if form else 0,
        chain=plan.chain,
        side=exchange.side,
    )


def _evaluated_much(usage: Usage) -> bool:
    return 10 * (usage.evaluated_tokens or 0) > (usage.prompt_tokens or 0)


def _asked_model(plan: Plan) -> str:
    return str(plan.body.data.get("model") or "")


def _word(text: str) -> str:
    """A client's own word, in bounds and in what UTF-8 can say: JSON may hold half a surrogate pair, and with one in a
    label no scrape would ever succeed again."""
    return text if text.isascii() and len(text) <= MAX_WORD else text[:MAX_WORD].encode(errors="replace").decode()
