"""Why an answered request evaluated what it did: the reason for a miss, from evidence, and where its prompt parted.

Two losses are compared. The *cache's loss*: tokens of a prefix that a server had evaluated before, or that the
scheduler expected to find, and that were evaluated again. The *client's loss*: tokens behind the place where this
prompt left the one it belongs to. The larger one names the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prefixproxy.sightings import Entry
from prefixproxy.types import FirstDifference, Kind, MissReason

TOLERANCE_TOKENS = 32
TOLERANCE_RATIO = 0.05
"""A loss within these is none: byte offsets become tokens by the prompt's average, and a server always evaluates the
last token again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a request was found to be when it was sent. `reference` is the earlier request to compare it with: the one
    it continues, replaces or forks from, or whose root it changed."""

    kind: Kind
    entry: Entry
    reference: Entry | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known once a request was answered.

    `started`: when it was sent, on the clock that `History` is given. `upstream_since`: when its upstream last came
    up, None if it was there from the start. `no_rollback`: whether the model's memory cannot be cut back to a prefix;
    asked only where something was lost, as the answer takes a look at everything.
    """

    started: float
    prompt_tokens: int | None
    cached_tokens: int | None
    expected_cached: int | None = None
    upstream_since: float | None = None
    reuse_off: bool = False
    fork_failed: bool = False
    no_rollback: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The longest prefix of a prompt that some server had evaluated before it was sent, in bytes: at any time, and
    since its upstream last came up."""

    ever_bytes: int
    alive_bytes: int


def miss_reason(verdict: Verdict, evidence: Evidence, before: Evaluated) -> MissReason:
    """The reason, `none` where nothing was lost, `unknown` where the server's count is not known or the evidence
    explains nothing."""
    prompt, cached = evidence.prompt_tokens, evidence.cached_tokens
    if prompt is None or cached is None:
        return MissReason.UNKNOWN
    if prompt - cached <= TOLERANCE_TOKENS:
        return MissReason.NONE
    entry = verdict.entry
    per_byte = prompt / max(1, entry.n_bytes)
    reachable = min(prompt, max(before.ever_bytes * per_byte, evidence.expected_cached or 0))
    cache_loss, client_loss = reachable - cached, _client_loss(verdict, per_byte, prompt - cached)
    slack = max(TOLERANCE_TOKENS, TOLERANCE_RATIO * reachable)
    if cache_loss > slack and cache_loss >= client_loss:
        return _cache_reason(evidence, cached, slack, entry.head_bytes * per_byte, before.alive_bytes * per_byte)
    if client_loss > slack:
        return _client_reason(verdict)
    root = entry.head_bytes * per_byte if entry.n_head else prompt
    if root - cached > max(TOLERANCE_TOKENS, TOLERANCE_RATIO * root) and (entry.n_head or not before.ever_bytes):
        return MissReason.FORK_FAILED if evidence.fork_failed else MissReason.COLD_ROOT
    return MissReason.NONE


def first_difference(verdict: Verdict, prompt_tokens: int | None) -> FirstDifference | None:
    """Where the prompt left its reference; None if one leads the other whole, or there is nothing to compare with.

    The segment is exact, the offset a lower bound: only digests of blocks are kept (see `prefix`).
    """
    entry, reference = verdict.entry, verdict.reference
    if reference is None or prompt_tokens is None or not entry.n_bytes:
        return None
    part = entry.common_parts(reference)
    if part in (len(entry.marks), len(reference.marks)):
        return None
    start = entry.bytes_before(part)
    offset = min(max(0, entry.chain.common_bytes(reference.chain) - start), entry.part_bytes(part))
    before = (start + offset) / entry.n_bytes
    return FirstDifference(entry.labels[part], offset, round(prompt_tokens * (1 - before)))


def _client_loss(verdict: Verdict, per_byte: float, evaluated: int) -> float:
    """Tokens behind the first difference, where the prompt should have matched its reference."""
    entry, reference = verdict.entry, verdict.reference
    if reference is None or verdict.kind not in (Kind.ROOT, Kind.REWRITE, Kind.COMPACTION):
        return 0.0
    shared = entry.bytes_before(entry.common_parts(reference))
    return min(evaluated, (entry.n_bytes - shared) * per_byte)


def _cache_reason(evidence: Evidence, cached: int, slack: float, root: float, alive: float) -> MissReason:
    if evidence.reuse_off:
        return MissReason.REUSE_OFF
    if evidence.upstream_since is not None and alive - cached <= slack:
        return MissReason.UPSTREAM_RESTARTED
    if evidence.fork_failed:
        return MissReason.FORK_FAILED
    if evidence.no_rollback():
        return MissReason.NO_ROLLBACK
    # A slot that lost the prompt leaves nothing, or the root that another slot still holds. Reuse that stops anywhere
    # else stopped at a difference this proxy does not see (a template that drops reasoning from earlier turns).
    if cached <= slack or abs(cached - root) <= slack:
        return MissReason.SLOT_EVICTED
    return MissReason.UNKNOWN


def _client_reason(verdict: Verdict) -> MissReason:
    entry, reference = verdict.entry, verdict.reference
    if reference is None or verdict.kind is not Kind.ROOT:
        return MissReason.HISTORY_CHANGED
    part = entry.common_parts(reference)
    labels = {each.labels[part] for each in (entry, reference) if part < len(each.labels)}
    return MissReason.TOOLS_CHANGED if any(label.startswith("tool") for label in labels) else MissReason.ROOT_CHANGED
