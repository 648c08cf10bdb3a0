"""What a request and the dispatcher hold of each other: the request while it waits, the lease once it may run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, assert_never

from prefixproxy.backends import NOT_YET, Backend, SlotReading
from prefixproxy.errors import BadRequest, ProxyError, Rejected, UpstreamUnavailable
from prefixproxy.schedule.rates import MIN_RATE_TOKENS
from prefixproxy.schedule.roots import DELIVERED_SHARE
from prefixproxy.schedule.types import Reason, Reject, RejectReason, Ticket
from prefixproxy.types import PINNABLE, Api, Usage
from prefixproxy.warming import Rendering


class Waiting(Protocol):
    """What the dispatcher asks of a request in the queue."""

    def ticket(self) -> Ticket:
        """Its ticket as its prompt stands now; the id never changes."""
        ...

    def deadline(self) -> float:
        """Until when it may wait, as the settings are now."""
        ...

    def rendering(self) -> Rendering:
        """Its body as it would be sent now, for finding a root."""
        ...


class Watch(Protocol):
    """Who counts warm-ups, forks, what probes and what broken-off requests had cost."""

    def warmup(self, upstream: str, outcome: str, model: str, slot: int | None, usage: Usage | None) -> None: ...

    def fork(self, upstream: str, outcome: str, seconds: float, slot: int, source: int | None) -> None: ...

    def no_effect(self, upstream: str, *, forked: bool) -> None: ...

    def tried(self, upstream: str, model: str, slot: int | None, usage: Usage) -> None: ...

    def cut_short(self, upstream: str, model: str, slot: int, family: str, cached: int, evaluated: int) -> None: ...


@dataclass(slots=True, eq=False)
class Lease:
    """The right to run one request: on `slot`, or (None) on whichever idle slot the server takes.

    The relay fills in how it went; what it leaves alone counts as broken off: nothing learned, slot not yet idle.
    """

    ticket: Ticket
    backend: Backend
    slot: int | None
    expected_cached: int
    fork: bool
    reason: Reason
    queued_s: float
    upstream_since: float | None = None
    """When its upstream came back last, None if it was never lost."""
    usage: Usage = field(default_factory=Usage)
    ok: bool = False
    idle: bool = False
    """The server said its last word, or never got the request: the slot is free without looking."""
    reused: int | None = None
    """Cached tokens of a request that was broken off within its prefill, None for any other."""
    seen_reused: int | None = None
    """Cached tokens as its slot showed them while it ran; looked for only where its answer may not tell."""
    model: str = ""
    """The model its upstream says it runs."""
    native: bool = False
    """Its upstream is llama-server (`Capabilities.native`)."""
    reuse_off: str = ""
    """Why its upstream must not reuse anything; "" if it may."""
    reuses_unasked: bool = True
    """Its upstream reuses what it can unless it is told otherwise, as far as that is known."""
    alone: bool = True
    """No other request of ours ran beside it on its upstream."""
    truncated: bool = False
    """Its upstream evaluated only a part of the prompt."""
    limit: asyncio.Timeout | None = None
    """Ends it when its upstream is lost and its connection does not say so."""

    def require_obedience(self, api: Api) -> None:
        """Raises BadRequest where nothing may be reused and the path has no way to say so: llama-server drops
        `cache_prompt` from /v1/messages (server-chat.cpp)."""
        if self.reuse_off and self.native and self.reuses_unasked and api not in PINNABLE:
            self.idle = True
            raise BadRequest(
                f"nothing may be reused on upstream {self.backend.name} ({self.reuse_off}), and this path has no way "
                "to ask llama-server for that: start it with --no-cache-prompt, or use /v1/chat/completions",
                code="reuse_off",
            )

    def look(self, reading: Mapping[int, SlotReading]) -> bool:
        """Take `seen_reused` from a slot list, if it is there; False if a later one may have it."""
        if self.slot is None:
            return False
        seen = reading.get(self.slot)
        if self.ticket.pinnable or seen is None or seen.reused is None:
            return True
        if seen.reused == NOT_YET:
            return False
        self.seen_reused = seen.reused
        return True

    def end_by(self, when: float | None) -> None:
        """On the event loop's clock; None: whenever it likes."""
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(when)

    @property
    def had_no_effect(self) -> bool:
        """Whether its root was warmed or copied for it, and its whole answer shows that hardly any of it was reused."""
        cached, whole = self.usage.cached_tokens, self.ok and not self.truncated
        prepared = self.reason in (Reason.FORKED, Reason.WARMED) and self.expected_cached >= MIN_RATE_TOKENS
        return prepared and whole and cached is not None and cached < DELIVERED_SHARE * self.expected_cached

    def run_beside(self, others: Iterable[Lease]) -> None:
        """Note for it and for those of `others` on its upstream that they run at the same time."""
        for other in others:
            if other.backend is self.backend:
                other.alone = self.alone = False


class CutShort:
    """Requests that were broken off within their prefill. The server goes on for a batch or two until it notices and
    counts all of it; how much that was shows in the length of the slot, once that is seen idle."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], tuple[Lease, float]] = {}

    def released(self, lease: Lease, now: float) -> None:
        """A request is over; what was open on its slot can no longer be told."""
        if lease.slot is not None:
            place = (lease.backend.name, lease.slot)
            self._open.pop(place, None)
            if lease.reused is not None and not lease.idle:
                self._open[place] = (lease, now)

    def read(
        self, upstream: str, reading: Mapping[int, SlotReading], asked_at: float
    ) -> Iterator[tuple[Lease, int, int, int]]:
        """Those whose slot this reading shows idle: the lease, its slot, tokens reused, tokens evaluated."""
        for slot, seen in reading.items():
            lease, since = self._open.get((upstream, slot), (None, 0.0))
            if lease is None or lease.reused is None or seen.busy or asked_at < since:
                continue
            del self._open[(upstream, slot)]
            if seen.n_tokens is not None and seen.n_tokens >= lease.reused:
                yield lease, slot, lease.reused, seen.n_tokens - lease.reused

    def lost(self, upstream: str) -> None:
        """The server is gone, and its counts with it."""
        self._open = {place: entry for place, entry in self._open.items() if place[0] != upstream}


def rejection(reject: Reject) -> ProxyError:
    """The error a rejected request is answered with."""
    wait_s = reject.retry_after_s
    match reject.reason:
        case RejectReason.QUEUE_FULL:
            return Rejected("the queue is full", code="queue_full", status=429, retry_after_s=wait_s)
        case RejectReason.QUEUE_TIMEOUT:
            return Rejected("no slot came free in time", code="queue_timeout", status=503, retry_after_s=wait_s)
        case RejectReason.UPSTREAM_UNAVAILABLE:
            return UpstreamUnavailable("the upstream went away", retry_after_s=wait_s)
        case _:
            assert_never(reject.reason)
