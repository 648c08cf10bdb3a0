"""What the scheduler is told and what it asks for: tickets, policy, reports, effects and its snapshot, all frozen.

Times are monotonic seconds, lengths are tokens unless a name says blocks or bytes. None means unknown, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from prefixproxy.prefix import PrefixChain
from prefixproxy.types import Form, Priority, RootId, SlotId, SlotState, TicketId


class Reason(StrEnum):
    """Why a ticket was granted where it was; journal and metric value."""

    RESIDENT = "resident"  # this slot holds the longest prefix of it
    HOST_CACHE = "host_cache"  # it lost its slot, and the server's own cache (--cache-ram) should have it still
    FORKED = "forked"  # its root was restored into this slot for it
    WARMED = "warmed"  # its root was warmed alone in this slot just before
    EMPTY_SLOT = "empty_slot"  # its prefix is nowhere; nothing was in this slot
    LEAST_VALUABLE = "least_valuable"  # its prefix is nowhere; this slot held what was worth least
    SIDE = "side"  # side traffic, kept away from what is worth keeping
    CLIENT_SLOT = "client_slot"  # the client named the slot
    UNPINNED = "unpinned"  # the server chooses the slot: this API or this upstream takes no id_slot
    FOREIGN = "foreign"  # the server chooses the slot: somebody else uses this upstream too
    SEVERAL_SEQUENCES = "several_sequences"  # the server spreads its n answers over idle slots
    WARM_FAILED = "warm_failed"  # its root could not be warmed; it evaluates the whole prompt itself
    HOLD_EXPIRED = "hold_expired"  # what it was held for took too long


class HoldReason(StrEnum):
    """What a waiting ticket waits for."""

    NO_SLOT = "no_slot"  # no slot it may use is idle
    CONCURRENCY = "concurrency"  # as many requests run as the policy allows
    TENANT_SLOTS = "tenant_slots"  # its tenant has as many slots as it may have
    NO_UPSTREAM = "no_upstream"  # no upstream that serves its model is up
    CLIENT_SLOT = "client_slot"  # the slot its client named is busy
    GATHERING = "gathering"  # its cold root is seen for the first time; more lanes may follow within milliseconds
    WARMING = "warming"  # its root is being warmed or saved
    RESTORING = "restoring"  # its root is being restored into the slot it will get
    LEADER = "leader"  # another ticket is prefilling the same root, or was when its client left
    SLOT_WAIT = "slot_wait"  # the busy slot that holds its prefix is cheaper than evaluating it elsewhere
    OVERTAKEN = "overtaken"  # the only idle slot holds the prefix of a later ticket, which goes first
    SETTLING = "settling"  # the server is choosing a slot for an unpinned request, or has copies between slots to make
    LOOKING = "looking"  # others use this upstream too: its slots are looked at before one is pinned to
    UNCONFIRMED_PINS = "unconfirmed_pins"  # unpinned itself: pins under way have not been seen to start yet
    SEVERAL = "several"  # idle slots are kept for an earlier ticket that needs more of them at once


class RejectReason(StrEnum):
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    UPSTREAM_UNAVAILABLE = "upstream_unavailable"


@dataclass(frozen=True, slots=True)
class Ticket:
    """One request that waits for a slot.

    `model` as the client named it, "" if it did not; `path` as it was asked for: both say which upstreams may serve it.
    `head_blocks`: whole blocks of `chain` that lie in the head (system text and tools). `starts`: of its first and its
    last user message, as digests in `chain.ends`. `solid`: from which byte to which it cannot be cut (a tool call is
    rendered whole). `n_tokens` is an estimate. `wanted_slot` is the client's own `id_slot` (negative: none; too large:
    modulo, as the server does). `pinnable`: this API's `id_slot` is read by the server. `warmable`: the edge can render
    its head as text. `n_seqs`: answers asked for at once. `tenant` and `family` are only compared. `needs_ctx`: tokens
    its slot must have room for, 0 if that is no question. `streams`: its client gets tokens as they come; the others'
    first token shows only on llama-server, which always streams to us. `reuse`: False for one that is evaluated whole
    (`cache_prompt: false`). `form`: what it shares with prompts in another form, its `chain` does not tell.
    """

    id: TicketId
    chain: PrefixChain
    head_blocks: int
    family: str
    n_tokens: int
    arrived: float
    deadline: float
    model: str = ""
    path: str = ""
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    side: bool = False
    wanted_slot: int | None = None
    pinnable: bool = True
    warmable: bool = True
    n_seqs: int = 1
    needs_ctx: int = 0
    streams: bool = True
    reuse: bool = True
    starts: tuple[int, ...] = ()
    solid: tuple[tuple[int, int], ...] = ()
    form: Form = Form.CHAT

    @property
    def alone(self) -> bool:
        """Whether no root is shared with it."""
        return self.side or not self.reuse


MAX_WARM_S, MAX_COPY_S = 900.0, 30.0
_MARGIN_S = 5.0
WARM_WORK_S, COPY_WORK_S = MAX_WARM_S - _MARGIN_S, MAX_COPY_S - _MARGIN_S
"""What the work itself may take: it is given up, and its slot asked for, before the scheduler stops waiting for it."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant may have: its part of the prefill when tenants compete, and the most slots at once (0: all)."""

    weight: float = 1.0
    max_slots: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator may tune while requests run; `Scheduler.set_policy` makes it effective at once.

    `max_concurrency` counts running requests and warm-ups over all upstreams, 0 = as many as there are slots.
    `side_slots`: the highest-numbered slots of each upstream, kept for side traffic. `fork`: warm roots and copy them
    by save and restore; off, only leader and followers remain. `root_threshold_s`: prefill worth a warm-up.
    """

    queue_limit: int = 256
    max_concurrency: int = 0
    side_slots: int = 0
    policy: Literal["cost", "fifo"] = "cost"
    fork: bool = True
    park: bool = True
    """Save what a slot holds before it is overwritten, where that costs less than evaluating it again; needs `fork`."""
    root_threshold_s: float = 0.5
    gather_s: float = 0.02
    assumed_prefill_rate: float = 200.0
    """Tokens per second, until an upstream has been measured."""
    max_warm_s: float = MAX_WARM_S
    """A warm-up that takes longer counts as failed, and whoever was held for it is released."""
    max_copy_s: float = MAX_COPY_S
    """The same for one save or restore."""
    foreign_quiet_s: float = 10.0
    """An upstream is pinned to again when no foreign request was seen on it for this long."""
    poll_s: float = 0.1
    """How often to look at an upstream's slots while something there is unresolved."""
    reconnect_s: float = 30.0
    """How long tickets wait for a lost upstream before they are told so."""
    shares: Mapping[str, Share] = field(default_factory=dict)
    """By tenant; who is not in it has an ordinary one."""
    family_quantum: int = 16_384
    """Tokens a family may make the servers evaluate before the others of its tenant have their turn."""
    max_passed: int = 64
    """How often other families of its tenant may go before a ticket that came earlier."""
    max_overtaken: int = 8
    """How often later tickets may go first because a slot holds their prefix, or because one needs several."""
    max_kept_s: float = 30.0
    """How long idle slots are kept for a ticket that needs several; then as many may go first again."""
    max_snapshots: int = 64
    """Snapshot files per upstream."""
    max_snapshot_bytes: int = 4 << 30
    """Bytes of snapshot files per upstream."""
    max_roots: int = 256
    """Roots remembered per upstream."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a granted ticket ended. `confirmed_idle`: the answer ended by itself, so its slot is idle (the server
    releases it with the last result); False, for instance after a disconnect, leaves the slot draining."""

    ok: bool
    cached_tokens: int | None = None
    evaluated_tokens: int | None = None
    predicted_tokens: int | None = None
    prompt_s: float | None = None
    confirmed_idle: bool = True

    @property
    def prompt_tokens(self) -> int | None:
        """All of the prompt, None if the server did not count them."""
        if self.cached_tokens is None or self.evaluated_tokens is None:
            return None
        return self.cached_tokens + self.evaluated_tokens


@dataclass(frozen=True, slots=True)
class SlotSeen:
    """One slot as `GET /slots` shows it. `n_tokens`: what it holds, valid while it is idle. `task`: the number of the
    newest request in it, which stays when that has ended; None where the server does not say. `sampled`: tokens of the
    answer that runs there, 0 if that is not known."""

    busy: bool
    n_tokens: int | None = None
    task: int | None = None
    sampled: int = 0


@dataclass(frozen=True, slots=True)
class WarmResult:
    """`n_tokens` now in the slot, of which `evaluated` took `seconds` (None: unknown; the server may have had more of
    them than the slot did); `n_blocks` of the first ticket's chain that they cover (None: the root's own)."""

    ok: bool
    n_tokens: int = 0
    seconds: float = 0.0
    n_blocks: int | None = None
    evaluated: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """Send this ticket now: pinned to `slot`, or, if that is None, with no `id_slot` at all (not even the client's).
    Answer with exactly one `finished`."""

    ticket_id: TicketId
    slot: SlotId | None
    upstream: str
    expected_cached: int
    fork: bool
    reason: Reason


@dataclass(frozen=True, slots=True)
class Warm:
    """Evaluate this root alone in this slot. Several tickets: the root is the longest common token prefix of the
    first three; one: that of its head rendered twice, or, with `n_bytes`, of its prompt and the same with another text
    from that byte of its chain on. Always one token short of a whole prompt. `whole`: all of the one ticket's prompt,
    less its last token. Answer: `warmed`."""

    root: RootId
    slot: SlotId
    tickets: tuple[TicketId, ...]
    whole: bool = False
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Save:
    """Write what this slot holds to `file` (a name the server accepts, no path). Answer: `saved`."""

    root: RootId
    slot: SlotId
    file: str


@dataclass(frozen=True, slots=True)
class Restore:
    """Read `file` into this slot. `source`: the slot that it was saved from, if that holds the root still. `n_bytes`:
    what was written; with another number the file is another. Answer: `restored`."""

    root: RootId
    slot: SlotId
    file: str
    source: SlotId | None = None
    n_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """Have one token evaluated in this slot, whatever it holds; or, if not `pinned`, in any. Answer: `decoded`."""

    slot: SlotId
    pinned: bool = True


@dataclass(frozen=True, slots=True)
class Reject:
    ticket_id: TicketId
    reason: RejectReason
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Poll:
    """Look at this upstream's slots soon. Answer: `slots_seen`; asked again if none comes."""

    upstream: str


@dataclass(frozen=True, slots=True)
class Drop:
    """This snapshot file will not be used again; deleting it is the edge's choice. No answer."""

    upstream: str
    file: str


Effect = Grant | Warm | Save | Restore | Decode | Reject | Poll | Drop


@dataclass(frozen=True, slots=True)
class SlotView:
    """`tokens` believed resident; `family` and `ticket` of the request that runs or ran last."""

    id: SlotId
    state: SlotState
    tokens: int
    family: str
    ticket: TicketId | None


@dataclass(frozen=True, slots=True)
class WaitingView:
    """`until` is when the hold ends at the latest; None: only an event ends it (or the ticket's deadline)."""

    id: TicketId
    priority: Priority
    hold: HoldReason
    until: float | None


@dataclass(frozen=True, slots=True)
class RootView:
    """`state`: gathering, warming, saving, ready or cold. `file`: its snapshot, if there is one."""

    id: RootId
    upstream: str
    family: str
    state: str
    tokens: int
    forks: int
    file: str | None
    file_bytes: int | None


@dataclass(frozen=True, slots=True)
class UpstreamView:
    """`unpinned_because` and `snapshots_off_because` are "" while the upstream is pinned to and snapshots are on.
    Rates are None until measured."""

    name: str
    up: bool
    pinning: bool
    unpinned_because: str
    snapshots: bool
    snapshots_off_because: str
    prefill_tokens_per_s: float | None
    kv_bytes_per_token: float | None
    restore_bytes_per_s: float | None
    answer_s: float | None
    truncated_reuse: float = 1.0
    """Share of a prefix that was reused where a slot had to forget the tail behind it first."""


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    slots: tuple[SlotView, ...]
    waiting: tuple[WaitingView, ...]
    queue_depth: Mapping[Priority, int]
    running: int
    roots: tuple[RootView, ...]
    upstreams: tuple[UpstreamView, ...]
    rejected: Mapping[RejectReason, int] = field(default_factory=dict)
