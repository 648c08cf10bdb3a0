"""How a request ended, in one word: from the error it was answered with, or from the upstream's own answer."""

from __future__ import annotations

from prefixproxy.errors import (
    ContextLengthExceeded,
    InvalidApiKey,
    ProxyError,
    Rejected,
    UpstreamTimedOut,
    UpstreamUnavailable,
)
from prefixproxy.types import Outcome

_NOT_NOW_NOT_YOU = frozenset({401, 403, 429})


def outcome_of_error(failure: ProxyError) -> Outcome:
    """What the proxy itself said."""
    if failure.code == "queue_timeout" or isinstance(failure, UpstreamTimedOut):
        return Outcome.TIMED_OUT
    if isinstance(failure, Rejected | InvalidApiKey | ContextLengthExceeded):
        return Outcome.REJECTED
    if isinstance(failure, UpstreamUnavailable):
        return Outcome.UPSTREAM_DOWN
    return Outcome.UPSTREAM_ERROR if failure.status >= 500 else Outcome.BAD_REQUEST


def outcome_of_answer(status: int, *, is_answer: bool = True) -> Outcome:
    """What the upstream said. `is_answer`: whether its body is one. The same status means the same whoever said it:
    a request that llama-server refuses (400) was wrong, and no reason to look for a fault there."""
    if 200 <= status < 300:
        return Outcome.OK if is_answer else Outcome.UPSTREAM_ERROR
    if status in _NOT_NOW_NOT_YOU:
        return Outcome.REJECTED
    return Outcome.BAD_REQUEST if 400 <= status < 500 else Outcome.UPSTREAM_ERROR
