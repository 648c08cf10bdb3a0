"""What a request and the dispatcher hold of each other: the request while it waits, the lease once it may run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, assert_never

from prefixproxy.backends import Backend
from prefixproxy.errors import ProxyError, Rejected, UpstreamUnavailable
from prefixproxy.schedule_types import Reason, Reject, RejectReason, Ticket
from prefixproxy.types import Usage
from prefixproxy.warming import Rendering


class Waiting(Protocol):
    """What the dispatcher asks of a request in the queue."""

    def ticket(self) -> Ticket:
        """Its ticket as its prompt stands now; the id never changes."""
        ...

    def rendering(self) -> Rendering:
        """Its body as it would be sent now, for finding a root."""
        ...


class Watch(Protocol):
    """Who counts warm-ups and forks."""

    def warmup(self, upstream: str, outcome: str, model: str, slot: int | None, usage: Usage | None) -> None: ...

    def fork(self, upstream: str, outcome: str, seconds: float) -> None: ...


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
