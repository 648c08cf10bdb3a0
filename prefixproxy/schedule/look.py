"""What a look at an upstream's slots tells, and when to ask for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prefixproxy.schedule.park import can_save
from prefixproxy.schedule.plan import Server
from prefixproxy.schedule.run import Running
from prefixproxy.schedule.slot import Slot
from prefixproxy.schedule.slots import Upstream
from prefixproxy.schedule.types import Policy, Poll, SlotSeen
from prefixproxy.types import SlotState, TicketId

ASSUMED_LOOK_S = 0.05
"""How old the answer to a look is taken to be, if nobody says when it was asked for."""
_UNCLAIMED = (SlotState.IDLE, SlotState.DRAINING, SlotState.FOREIGN)
"""No request or work of ours has it: one whose slot the server chose may run there."""
FIRST_LOOK_S = 0.01
"""How long after the first look the second one is, where something is likely over soon. Each wait after that is twice
as long, up to the usual one."""
UNSEEN_S, LOOK_WAIT_S = 0.05, 0.25
"""How old a look may be before a cold prompt starts where others may use the upstream, and how long the answer to
another one is waited for."""
SLOW_POLL_S = 1.0
"""How often to look while nothing of ours is unresolved but foreign traffic was seen."""


def look(
    server: Server,
    seen: Mapping[int, SlotSeen],
    asked: float,
    now: float,
    running: Mapping[TicketId, Running],
    policy: Policy,
) -> None:
    """Resolve draining slots, correct what idle ones were believed to hold, find strangers. Answers that overtook each
    other count only in the order in which they were asked for."""
    slots = server.slots
    if asked < slots.looked_at:
        return
    _note_answer(slots, asked, now)
    _find(server, seen, asked, now, running)
    fresh = [(slot, seen[slot.id.slot]) for slot in slots.slots if slot.id.slot in seen and asked > slot.since]
    _note_clearing(slots, seen, asked)
    strangers = [slot for slot, row in fresh if row.busy and (slot.idle or slot.ended)]
    # of slots that hold nothing the first one to come free is taken first: as the server clears the first ones for
    # several answers, begin with the last where nothing can be saved before
    for slot, row in fresh if can_save(server, policy, now) else reversed(fresh):
        if slot.state in (SlotState.IDLE, SlotState.FOREIGN) or (slot.started and slot.state is SlotState.DRAINING):
            slot.task = row.task
        match slot.state, row.busy:
            case ((SlotState.LEASED | SlotState.RESERVED | SlotState.DRAINING), True) if not slot.started:
                slot.started = True
                slots.touch()
            case ((SlotState.DRAINING | SlotState.FOREIGN), False) if asked >= slot.settled_at:
                slots.drained(slot, row.n_tokens, now)
            case SlotState.FOREIGN, True:
                slots.foreign(slot, now, policy.foreign_quiet_s)
            case SlotState.IDLE, False:
                counted = slot.counted
                slots.check(slot, row.n_tokens)
                server.rewarm |= counted and not slot.counted
    _note_decodes(server, seen, asked, running)
    for slot in _unexplained(server, strangers, asked, now, running):
        slots.foreign(slot, now, policy.foreign_quiet_s)
    if slots.pins_confirmed(now):
        slots.confirm = False


def _note_answer(slots: Upstream, asked: float, now: float) -> None:
    if slots.wanted and unseen(slots, now):
        slots.touch()  # a cold prompt may wait for this
    slots.looked_at, slots.seen_at = asked, now


def _note_clearing(slots: Upstream, seen: Mapping[int, SlotSeen], asked: float) -> None:
    before = slots.clearing.known
    for number, row in seen.items():
        if not row.busy:
            slots.clearing.see(number, row.task, row.n_tokens, asked)
    if slots.clearing.known is not before:
        slots.touch()


def _note_decodes(
    server: Server, seen: Mapping[int, SlotSeen], asked: float, running: Mapping[TicketId, Running]
) -> None:
    """A second token of any of several answers to one prompt took a decode, so their copies are made."""
    slots = server.slots
    for ticket in [one for one in slots.several if running[one].ticket.reuse]:
        theirs = [slot for slot in running[ticket].slots if asked > slot.since]
        if any(seen[slot.id.slot].sampled > 1 for slot in theirs if slot.id.slot in seen):
            slots.several.discard(ticket)
            slots.touch()


def _find(
    server: Server, seen: Mapping[int, SlotSeen], asked: float, now: float, running: Mapping[TicketId, Running]
) -> None:
    """Where an unpinned request of ours is. A slot that is not ours and has another task than when it was granted took
    it, even if the answer is over by now. Where tasks are not known a slot that has become busy tells as much. One that
    drains may be busy with what drains, or with whoever waited in the server for it, and one of another client with
    that client's next request: they are believed only if ours had started before the look."""
    settling = server.slots.settling
    if settling is None or settling.need > 1 or asked <= settling.since:
        return
    ours = running[settling.ticket]
    unclaimed = [(slot, seen[slot.id.slot]) for slot in server.slots.in_state(*_UNCLAIMED) if slot.id.slot in seen]
    rows = [(slot, row, settling.before.get(slot.id.slot)) for slot, row in unclaimed if _newer(slot, asked)]
    proven = [slot for slot, row, before in rows if None not in (row.task, before) and row.task != before]
    likely = [slot for slot, row, before in rows if row.busy and None in (row.task, before)]
    took = proven or likely
    if len(took) != 1:
        return
    drained = bool(proven) and not server.slots.facts.shared and took[0].state is SlotState.DRAINING
    if took[0].idle or drained or ours.started_before(asked):
        ours.settle_in(took, now)


def _newer(slot: Slot, asked: float) -> bool:
    """Whether a look tells of an idle slot as it is now."""
    return not slot.idle or asked > slot.since


def _unexplained(
    server: Server, strangers: Sequence[Slot], asked: float, now: float, running: Mapping[TicketId, Running]
) -> Sequence[Slot]:
    """The strangers that are not simply the slots an unpinned request of ours just took."""
    settling = server.slots.settling
    if settling is None or asked <= settling.since:
        return strangers
    ours = running[settling.ticket]
    started = ours.started_before(asked)
    if len(strangers) == settling.need and (started or settling.need > 1):
        ours.settle_in(strangers, now)
        return ()
    settling.seen_busy.update(slot.id for slot in strangers)
    draining = server.slots.in_state(SlotState.FOREIGN, SlotState.DRAINING)
    taken = [*strangers, *(slot for slot in draining if slot not in strangers)]
    if started and len(taken) >= settling.need:
        # it is in one of these: every slot that is idle now is safe, and none of these proves a foreign request
        server.slots.settling = None
        server.slots.touch()
        for slot in taken:
            slot.started = True
            server.slots.drain(slot, now)
        return ()
    return strangers if len(strangers) > settling.need else ()


def polls(servers: Iterable[Server], policy: Policy, now: float, waiting: int) -> Iterator[Poll]:
    """A look for each upstream where something is unresolved, not too often."""
    for server in servers:
        slots = server.slots
        slots.wanted = waiting > 0
        due = poll_at(slots, policy, now)
        if due is not None and (slots.poll_soon or due <= now):
            slots.polled_at, slots.poll_soon = now, False
            yield Poll(slots.name)


def unseen(slots: Upstream, now: float) -> bool:
    """Whether others may have used an upstream since the last look at it, and another one will tell."""
    silent = slots.polled_at > slots.seen_at and now >= slots.polled_at + LOOK_WAIT_S
    return slots.observed and slots.facts.shared and slots.seen_at < now - UNSEEN_S and not silent


def poll_at(slots: Upstream, policy: Policy, now: float) -> float | None:
    """When the next look at an upstream is due; None if nothing there needs one."""
    if not slots.up or not slots.observed:
        return None
    since = _hurried_since(slots)
    if since is not None:
        return slots.polled_at + min(policy.poll_s, max(FIRST_LOOK_S, slots.polled_at - since))
    if slots.poll_soon or slots.confirm or slots.doubted or slots.has(SlotState.DRAINING):
        return slots.polled_at + policy.poll_s
    if slots.wanted and slots.stale(now) and not slots.full:
        return now if slots.polled_at <= slots.seen_at else slots.polled_at + policy.poll_s
    if slots.facts.shared and slots.has(SlotState.LEASED):
        return slots.polled_at + SLOW_POLL_S
    if now < slots.foreign_until or slots.has(SlotState.FOREIGN):
        return slots.polled_at + SLOW_POLL_S
    return None


def _hurried_since(slots: Upstream) -> float | None:
    """When what others wait for began, if it is likely over soon: the server chooses a slot, a request that was cut off
    ends, several answers get their copies."""
    found = [slot.since for slot in slots.in_state(SlotState.DRAINING) if slot.held.tokens and not slot.ended]
    if slots.settling is not None:
        found.append(slots.settling.since)
    if slots.wanted and slots.several:
        found += [slot.since for slot in slots.in_state(SlotState.LEASED)]
    return max(found, default=None)
