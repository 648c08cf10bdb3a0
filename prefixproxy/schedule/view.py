"""The scheduler seen from outside: its snapshot, its next wake-up, and how long a rejected client should wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prefixproxy.schedule.look import poll_at
from prefixproxy.schedule.plan import Server
from prefixproxy.schedule.queue import Queue
from prefixproxy.schedule.rates import ASSUMED_ANSWER_S
from prefixproxy.schedule.roots import Root
from prefixproxy.schedule.types import (
    Policy,
    RejectReason,
    RootView,
    SchedulerSnapshot,
    SlotView,
    UpstreamView,
    WaitingView,
)
from prefixproxy.types import SlotState

LONGEST_RETRY_S = 120.0


def state_line(servers: Iterable[Server], waiting: int, running: int) -> str:
    """All slots as letters: . idle, L leased, R reserved, d draining, f foreign."""
    letters = {SlotState.IDLE: ".", SlotState.LEASED: "L", SlotState.RESERVED: "R"}
    tables = (
        f"{server.slots.name}[{''.join(letters.get(slot.state, slot.state.value[0]) for slot in server.slots.slots)}]"
        for server in servers
    )
    return f"<Scheduler {' '.join(tables)} waiting={waiting} running={running}>"


def snapshot_of(
    servers: Iterable[Server],
    queue: Queue,
    running: int,
    rejected: Mapping[RejectReason, int],
    policy: Policy,
    now: float,
) -> SchedulerSnapshot:
    servers = list(servers)
    return SchedulerSnapshot(
        slots=tuple(
            SlotView(slot.id, slot.state, slot.held.tokens, slot.family, slot.ticket or slot.promised)
            for server in servers
            for slot in server.slots.slots
        ),
        waiting=tuple(WaitingView(w.ticket.id, w.ticket.priority, w.hold, w.until) for w in queue),
        queue_depth=queue.depth(),
        running=running,
        roots=tuple(_root(root, server) for server in servers for root in server.roots.roots.values()),
        upstreams=tuple(_upstream(server, policy, now) for server in servers),
        rejected=dict(rejected),
    )


def _root(root: Root, server: Server) -> RootView:
    saved = root.snapshot is not None
    return RootView(
        id=root.id,
        upstream=server.slots.name,
        family=root.family,
        state=root.state.value if saved or root.running else "cold",
        tokens=root.tokens,
        forks=root.forks,
        file=root.file or None,
        file_bytes=root.n_bytes if saved else None,
    )


def _upstream(server: Server, policy: Policy, now: float) -> UpstreamView:
    slots, rates = server.slots, server.slots.rates
    unpinned, off = slots.unpinned_because(now), server.snapshots_off_because(policy, now)
    return UpstreamView(
        name=slots.name,
        up=slots.up,
        pinning=slots.up and not unpinned,
        unpinned_because=unpinned,
        snapshots=slots.up and not off,
        snapshots_off_because=off,
        prefill_tokens_per_s=rates.prefill,
        kv_bytes_per_token=rates.bytes_per_token,
        restore_bytes_per_s=1 / rates.restore_s_per_byte if rates.restore_s_per_byte else None,
        answer_s=rates.answer_s,
        truncated_reuse=slots.kept_share(can_fork=False),
    )


def wakes(servers: Iterable[Server], queue: Queue, policy: Policy, now: float) -> Iterator[float]:
    """Every moment at which time alone changes something."""
    for time in (queue.first_deadline(), queue.next_until(now)):
        if time is not None:
            yield time
    for server in servers:
        if len(queue):
            yield server.lost_at + policy.reconnect_s
            yield server.slots.foreign_until
            yield server.slots.haunted_until
            yield server.slots.copies_until
        for slot in server.slots.in_state(SlotState.RESERVED):
            yield slot.until
        due = poll_at(server.slots, policy, now)
        if due is not None:
            yield due


def retry_after_s(servers: Iterable[Server], waiting: int) -> float:
    """About how long until one more ticket would get its turn."""
    up = [server.slots for server in servers if server.slots.up]
    slots = sum(len(table.slots) for table in up)
    measured = [table.rates.service_s for table in up if table.rates.service_s is not None]
    service_s = sum(measured) / len(measured) if measured else ASSUMED_ANSWER_S
    return min(LONGEST_RETRY_S, max(1.0, (waiting + 1) * service_s / max(1, slots)))
