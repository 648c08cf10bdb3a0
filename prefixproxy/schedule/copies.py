"""Copies between slots that llama-server still has to make behind a request with several answers.

It evaluates the prompt once and copies it for the other answers, but only at the next decode, in whatever slot
(llama_kv_cache::seq_cp between streams). If all answers ended with their first token, or their client left, that is
still to come, and would overwrite what a restore, or the server's RAM cache, puts there meanwhile. So nothing more is
sent to that upstream until one token was decoded: in a slot that is known to be idle, or, while others use it, in
whichever the server takes.

Who is unpinned may get their slots in the very moment they end, and what the RAM cache has for it. So while such a
request runs (`Upstream.several`) nothing unpinned is sent to its upstream, until one of its answers has a second token.
"""

from __future__ import annotations

from math import inf

from prefixproxy.schedule.slot import NOTHING, UNSTARTED_SETTLE_S, Slot, Work
from prefixproxy.schedule.slots import COPIES_S, Upstream
from prefixproxy.schedule.types import Decode, Effect, Finish, Policy, Ticket
from prefixproxy.types import SlotId, SlotState


def may_be_left(ticket: Ticket, finish: Finish) -> bool:
    """Whether a ticket that ended may have left such copies; the second token of any answer took a decode. With several
    prompts, which go without reuse, it may have come before the last of them was evaluated."""
    decoded = finish.ok and ticket.reuse and (finish.predicted_tokens or 0) > ticket.n_seqs
    return ticket.n_seqs > 1 and not decoded


def settle(slots: Upstream, policy: Policy, now: float) -> list[Effect]:
    """A decode where copies may be to come, once nothing of ours that has ended keeps a slot busy: in the idle slot
    that holds least. While others use the upstream nothing is pinned there, so the server chooses."""
    _give_up_late(slots, now)
    if now >= slots.copies_until:
        return []
    pinned = not slots.unpinned_because(now)
    if slots.settling is not None or now < slots.haunted_until or (pinned and slots.stale(now)):
        return []
    idle = slots.in_state(SlotState.IDLE)
    if pinned and any(slot.doubt is not None for slot in idle):
        return []  # one of them may hold the prompt: a look will tell
    if not idle or (slots.draining_first and slots.has(SlotState.DRAINING)) or _decoding(slots):
        return []
    if not pinned and not slots.pins_confirmed(now):
        slots.confirm = True
        return []
    slot = min(idle, key=lambda slot: (slot.promised is not None, slot.held.tokens))
    slots.reserve(slot, Work.DECODE, None, now + policy.max_copy_s, now)
    slots.suspect(slot, None if pinned else NOTHING)
    if not pinned:
        _doubt_all(slots)
    return [Decode(slot.id, pinned)]


def decoded(slots: Upstream, slot: SlotId, ok: bool, now: float) -> None:
    """The answer; one that comes too late is ignored. A failed decode is not tried again: either the server is about
    to be lost, or it was too busy with others, which is a decode as well."""
    row = slots.slot(slot)
    if row is None or row.work is not Work.DECODE:
        return
    if slots.copies_until <= row.since + COPIES_S:  # else more came to do while it ran
        slots.copies_until = -inf
    if row.doubt is not None:  # it may have been another slot
        row.started = True
        slots.drain(row, now)
        _doubt_all(slots)
        if not ok:
            slots.haunted_until = now + UNSTARTED_SETTLE_S
        return
    slots.forget(row)
    if ok:
        slots.free(row, now)
    else:
        slots.drain(row, now)


def _doubt_all(slots: Upstream) -> None:
    """Any slot that is not ours may have taken it: what a look showed before it did so counts no more."""
    for slot in slots.in_state(SlotState.IDLE, SlotState.FOREIGN, SlotState.DRAINING):
        slot.task = None
        if slot.idle:
            slots.suspect(slot, NOTHING)


def _decoding(slots: Upstream) -> list[Slot]:
    return [slot for slot in slots.in_state(SlotState.RESERVED) if slot.work is Work.DECODE]


def _give_up_late(slots: Upstream, now: float) -> None:
    for slot in _decoding(slots):
        if slot.until <= now:
            decoded(slots, slot.id, False, now)
