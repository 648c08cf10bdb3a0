"""Warm-ups, saves and restores from their start to their answer, their failure or their time limit.

Each takes one idle slot, which stays RESERVED meanwhile. Whatever fails leaves its slot draining: the server may still
be at it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.plan import SaveFirst, Server, WarmFirst, tokens_of
from prefixproxy.schedule.rates import mixed
from prefixproxy.schedule.roots import RETRY_S, Gathering, Root, RootState
from prefixproxy.schedule.slot import Held, Slot, Work, cuts_of
from prefixproxy.schedule.types import Drop, Effect, Policy, Restore, Save, Ticket, Warm, WarmResult
from prefixproxy.types import RootId, SlotId, SlotState

MAX_RENDERED = 8
"""Tickets named in a Warm; the edge renders the first few."""


def _enter(server: Server, root: Root, state: RootState) -> None:
    server.roots.enter(root, state)
    server.slots.census.note_root(server.slots.number, root.chain)


def promise(server: Server, slot: Slot, ticket: Ticket | None) -> None:
    """The slot is prepared for this ticket, and counts as its tenant's."""
    server.slots.census.promise(slot, None if ticket is None else ticket.id)
    slot.tenant = "" if ticket is None else ticket.tenant


def gather(server: Server, chain: PrefixChain, until: float) -> None:
    """Lanes that share this are waited for."""
    server.roots.gatherings.append(Gathering(chain, until))
    server.slots.stir()
    server.slots.census.note_root(server.slots.number, chain)


def start_warm(server: Server, plan: WarmFirst, policy: Policy, now: float) -> list[Effect]:
    """Reserve the slot, promise it to the leader, and warm."""
    leader, slot = plan.leader, plan.slot
    root = server.roots.obtain(plan.chain, leader.family, tokens_of(leader, len(plan.chain.hashes)), now)
    _enter(server, root, RootState.WARMING)
    root.until, root.leader = now + policy.max_warm_s, leader.chain
    server.roots.end_gathering(root.chain)
    if plan.loads is not None:
        server.slots.ram.count_on(plan.loads, root.id)
    server.slots.start(slot, root.chain)
    server.slots.reserve(slot, Work.WARM, root.id, root.until, now)
    promise(server, slot, leader)
    root.parked = plan.whole
    tickets = (leader.id, *(other.id for other in plan.others))[:MAX_RENDERED]
    apart = not plan.whole and len(plan.chain.hashes) != leader.head_blocks
    return [Warm(root.id, slot.id, tickets, plan.whole, plan.chain.n_bytes if apart else 0)]


def warmed(server: Server, root: Root, slot: Slot, result: WarmResult, policy: Policy, now: float) -> list[Effect]:
    """The root is in its slot: save it, if there is room. `result.ok` is True."""
    chain = root.chain
    if result.n_blocks is not None and root.leader is not None:
        chain = root.leader.head(result.n_blocks)
        if result.n_blocks < len(root.chain.hashes):
            root.retry_at = now + RETRY_S  # it cannot be cut where it ends, and will not be the next time
    held = Held(chain, result.n_tokens, result.n_tokens, cuts_of(chain, result.n_tokens, (), slot.held))
    if result.evaluated is not None:
        server.slots.rates.learn_prefill(result.evaluated, result.seconds)
    server.slots.ram.learn(root.id, _reused(result))
    root.tokens = result.n_tokens
    server.slots.overwrite(slot, held)
    slot.warmed = True
    return _save(server, root, slot, policy, now)


def _reused(result: WarmResult) -> int | None:
    return None if result.evaluated is None else result.n_tokens - result.evaluated


def start_save(server: Server, plan: SaveFirst, policy: Policy, now: float) -> list[Effect]:
    """Save an idle slot as it stands; the leader gets it afterwards."""
    leader, slot = plan.leader, plan.slot
    # what is parked is no part of the leader's prompt, which may even be empty
    family = slot.family if plan.parked and slot.family else leader.family
    tokens = slot.held.tokens if plan.parked else tokens_of(leader, len(plan.chain.hashes))
    root = server.roots.obtain(plan.chain, family, tokens, now)
    root.leader, root.parked = leader.chain, plan.parked
    if plan.parked:
        root.tokens = tokens
    promise(server, slot, leader)
    return _save(server, root, slot, policy, now)


def _save(server: Server, root: Root, slot: Slot, policy: Policy, now: float) -> list[Effect]:
    if server.slots.choosing(now):
        # an unpinned request may be taking this very slot now that it is idle; who needs the root can save it later
        _enter(server, root, RootState.COLD)
        server.slots.free(slot, now)
        return []
    n_bytes = int(slot.held.tokens * (server.slots.rates.bytes_per_token or 0.0))
    dropped = drop(server, root) if root.file else []
    room = server.roots.room_for(root, n_bytes, policy, now)
    if room is None or server.snapshots_off_because(policy, now):
        _enter(server, root, RootState.READY)
        root.retry_at = now + RETRY_S
        server.slots.free(slot, now)
        return dropped
    root.file, victims = room
    for victim in victims:
        drop(server, victim)  # its file is overwritten or left: no Drop, the pool's names come back
    _enter(server, root, RootState.SAVING)
    root.until, root.n_bytes = now + policy.max_copy_s, n_bytes
    server.slots.reserve(slot, Work.SAVE, root.id, root.until, now)
    return [*dropped, Save(root.id, slot.id, root.file)]


def saved(server: Server, root: Root, slot: Slot, n_bytes: int, seconds: float, now: float) -> list[Effect]:
    """The snapshot is written."""
    server.slots.rates.learn_save(n_bytes, seconds)
    _enter(server, root, RootState.READY)
    root.snapshot, root.n_bytes, root.saved_from = replace(slot.held, cuts=()), n_bytes, slot.id
    server.slots.add_saved(slot.held.chain, root.id, root.chain)
    effects: list[Effect] = []
    for old in server.roots.supersede(root, server.slots.rolls_back) if root.parked else ():
        effects += drop(server, old)
    if not slot.warmed and root.parked:
        server.slots.census.promise(slot, None)  # it was saved to be overwritten, by whatever is the cheapest now
    if slot.held.tokens:
        rates = server.slots.rates
        rates.bytes_per_token = mixed(rates.bytes_per_token, n_bytes / slot.held.tokens)
    server.slots.free(slot, now)
    return effects


def start_restore(
    server: Server, root: Root, slot: Slot, ticket: Ticket | None, policy: Policy, now: float
) -> list[Effect]:
    """Reserve the slot for the ticket and read the root's snapshot into it."""
    root.restoring += 1
    root.forks += ticket is not None
    root.last_used = now
    if not server.slots.rolls_back:
        server.slots.ram.displace(slot)
    server.slots.reserve(slot, Work.RESTORE, root.id, now + policy.max_copy_s, now)
    server.slots.clearing.left.pop(slot.id.slot, None)  # the file shows from now on, under the task that was there last
    promise(server, slot, ticket)
    return [Restore(root.id, slot.id, root.file, _source(server, root, slot), root.n_bytes)]


def _source(server: Server, root: Root, target: Slot) -> SlotId | None:
    """The slot that the root was saved from, if it is another one than the target and holds all of the root still."""
    slot = None if root.saved_from is None else server.slots.slot(root.saved_from)
    there = slot is not None and slot is not target and slot.held.chain.extends(root.chain)
    return root.saved_from if there else None


def restored(server: Server, root: Root, slot: Slot, seconds: float, now: float) -> list[Effect]:
    """The slot holds what the snapshot held; unless that was dropped meanwhile."""
    root.restoring -= 1
    if root.snapshot is None:
        server.slots.forget(slot)
        server.slots.drain(slot, now)
        return _release_file(server, root)
    if root.n_bytes and seconds > 0:
        rates = server.slots.rates
        rates.restore_s_per_byte = mixed(rates.restore_s_per_byte, seconds / root.n_bytes)
    server.slots.overwrite(slot, root.snapshot)
    slot.source = root.id
    server.slots.free(slot, now)
    return []


def failed(server: Server, root: Root, slot: Slot, now: float) -> list[Effect]:
    """What the slot was reserved for failed or took too long."""
    work = slot.work
    server.slots.ram.learn(root.id, None)
    if work is not Work.SAVE:
        server.slots.forget(slot)
    server.slots.drain(slot, now)
    match work:
        case Work.WARM:
            _enter(server, root, RootState.COLD)
            root.retry_at = now + RETRY_S
            return []
        case Work.SAVE:
            _enter(server, root, RootState.COLD)
            root.file, root.n_bytes, root.retry_at = "", 0, now + RETRY_S
            server.roots.judge(root, delivered=False)
            return []
        case _:
            root.restoring -= 1
            server.roots.judge(root, delivered=False)
            return drop(server, root)


def overdue(server: Server, now: float) -> Iterable[tuple[Root, Slot]]:
    """What should have been answered by now."""
    late = [slot for slot in server.slots.in_state(SlotState.RESERVED) if slot.until <= now]
    return [(server.roots.roots[slot.root], slot) for slot in late if slot.root in server.roots.roots]


def drop(server: Server, root: Root) -> list[Effect]:
    """Use the root's snapshot no more; its file is given up when no restore reads it any longer."""
    if root.snapshot is not None:
        held, root.snapshot = root.snapshot, None
        server.slots.remove_saved(held.chain, root.id, root.chain)
    return _release_file(server, root)


def _release_file(server: Server, root: Root) -> list[Effect]:
    if not root.file or root.restoring or root.running or root.snapshot is not None:
        return []  # while it runs, the file is the one it will be saved to
    file, root.file, root.n_bytes = root.file, "", 0
    return [Drop(server.slots.name, file)]


def at_work(server: Server, root: RootId, work: Work, slot: SlotId | None = None) -> tuple[Root, Slot] | None:
    """The root and the slot an answer belongs to; None if it comes too late."""
    for row in server.slots.in_state(SlotState.RESERVED):
        if row.root == root and row.work is work and slot in (None, row.id):
            return server.roots.roots[root], row
    return None


def reset(server: Server) -> None:
    """The upstream is gone: nothing is under way there any more; finished snapshots stay files."""
    server.roots.gatherings.clear()
    for root in server.roots.roots.values():
        root.restoring = 0
        if root.running or root.snapshot is None:
            _enter(server, root, RootState.COLD)
            root.file, root.n_bytes = "", 0
    recount(server)


def recount(server: Server) -> None:
    """Snapshots hold their blocks whether or not the upstream is up."""
    for root in server.roots.saved():
        if root.snapshot is not None:
            server.slots.add_saved(root.snapshot.chain, root.id, root.chain)


def rewarm(server: Server, policy: Policy, now: float) -> list[Effect]:
    """An upstream that came back has its most valuable roots restored into its empty slots."""
    slots = server.slots
    if not server.rewarm or slots.choosing(now) or any(slots.in_state(SlotState.DRAINING)):
        return []
    server.rewarm = False
    if server.snapshots_off_because(policy, now):
        return []
    roots = sorted(server.roots.saved(), key=lambda root: -server.roots.worth(root, now))
    empty = [slot for slot in slots.slots if slot.idle and not slot.dirty]
    effects: list[Effect] = []
    for slot, root in zip(empty, roots, strict=False):
        effects += start_restore(server, root, slot, None, policy, now)
    return effects
