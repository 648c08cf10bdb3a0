"""Keeping what a conversation left in a slot over the turns of others: saved before it is overwritten, restored when it
comes back.

Memory that can be cut back anywhere (plain attention) is saved as the last answer left it. Memory that cannot
(recurrent, hybrid) is of use only to a prompt that extends it, and the next prompt seldom repeats an answer token by
token: there the prompt is evaluated alone first and saved without its answer.
"""

from __future__ import annotations

from prefixproxy.schedule.plan import Place, SaveFirst, Server, WarmFirst
from prefixproxy.schedule.slot import Slot, continues
from prefixproxy.schedule.types import Policy, Ticket

COPIES = 2.0
"""Saving now and restoring later, in copies."""
VALUED_RATE = 1000.0
"""Tokens per second at which what a slot holds is valued at the most: a fast prefill is no reason to throw a
conversation away, as evaluating it again also holds up whatever decodes beside it."""
MIN_PARKED_TOKENS = 16
MIN_ROOT_TOKENS = 64


def worthwhile_tokens(server: Server, policy: Policy) -> float:
    """From how many tokens on a root is warmed alone. Where slots cannot be cut back only that makes it of use to a
    second prompt, so there it has to cost no more than the copies it needs."""
    rate = server.rate(policy)
    most = policy.root_threshold_s * rate
    if server.slots.rolls_back:
        return most
    return min(most, max(MIN_ROOT_TOKENS, COPIES * server.slots.rates.copy_s(MIN_ROOT_TOKENS) * rate))


def can_save(server: Server, policy: Policy, now: float) -> bool:
    """Whether what a slot holds can be saved as it is."""
    return server.slots.rolls_back and not server.snapshots_off_because(policy, now)


def park_first(ticket: Ticket, place: Place, policy: Policy, busy: int, now: float) -> SaveFirst | None:
    """Save what `place` would overwrite, if evaluating it again costs more than two copies. A copy holds up the `busy`
    requests that run beside it, too."""
    server, slot = place.server, place.slot
    if not _can_park(ticket, server, slot, policy, now):
        return None
    direct = place.root is None and ticket.reuse
    kept = ticket.chain.common_blocks(slot.held.chain) if direct else 0
    if direct and continues(ticket, slot.held, kept):
        return None
    return _if_worth_it(ticket, server, slot, kept, policy, busy, now)


def cleared_first(
    ticket: Ticket, server: Server, slot: Slot, policy: Policy, busy: int, now: float
) -> SaveFirst | None:
    """The same of a slot that is taken for a further answer, and cleared."""
    if not _can_park(ticket, server, slot, policy, now):
        return None
    return _if_worth_it(ticket, server, slot, 0, policy, busy, now)


def lent_first(ticket: Ticket, server: Server, slot: Slot, more: int, policy: Policy, now: float) -> SaveFirst | None:
    """Save an idle slot that has so many `more` tokens of a ticket than the one its client named."""
    if not _can_park(ticket, server, slot, policy, now):
        return None
    if more <= COPIES * server.slots.rates.copy_s(slot.held.tokens) * server.rate(policy):
        return None
    return _unless_busy(ticket, server, slot, now)


def _can_park(ticket: Ticket, server: Server, slot: Slot, policy: Policy, now: float) -> bool:
    if slot.held.tokens < MIN_PARKED_TOKENS or slot.promised == ticket.id or is_parked(server, slot):
        return False
    return policy.park and can_save(server, policy, now)


def _if_worth_it(
    ticket: Ticket, server: Server, slot: Slot, kept: int, policy: Policy, busy: int, now: float
) -> SaveFirst | None:
    lost_s = server.slots.lost_s(slot, kept, min(server.rate(policy), VALUED_RATE), now)
    if lost_s <= COPIES * server.slots.rates.copy_s(slot.held.tokens) * (1 + busy):
        return None
    return _unless_busy(ticket, server, slot, now)


def _unless_busy(ticket: Ticket, server: Server, slot: Slot, now: float) -> SaveFirst | None:
    known = server.roots.find(slot.held.chain)
    if known is not None and (known.running or now < known.retry_at):
        return None
    return SaveFirst(server, slot, slot.held.chain, ticket, parked=True)


def is_parked(server: Server, slot: Slot) -> bool:
    """Whether a file holds all that this slot does."""
    known = server.roots.find(slot.held.chain)
    return known is not None and known.snapshot is not None and known.snapshot.tokens >= slot.held.tokens


def turn_first(ticket: Ticket, place: Place, policy: Policy, waiting: int, now: float) -> WarmFirst | None:
    """Evaluate the whole prompt alone and save it, where only that can be of use to its next turn, and where there are
    more conversations than slots: something was overwritten, or will be by the `waiting` tickets or the next one. With
    several answers its slot is one of those that the next such request may have cleared."""
    server, slot = place.server, place.slot
    if not policy.park or server.slots.rolls_back or not ticket.warmable or ticket.side:
        return None
    if not server.slots.evicted and ticket.n_seqs == 1 and not _is_last(ticket, server, slot, waiting):
        return None
    if server.snapshots_off_because(policy, now) or ticket.chain.digest == slot.held.chain.digest:
        return None
    known = server.roots.find(ticket.chain)
    if known is not None and (known.running or known.snapshot is not None or now < known.retry_at):
        return None
    return WarmFirst(server, slot, ticket.chain, ticket, (), whole=True, loads=place.loads)


def _is_last(ticket: Ticket, server: Server, slot: Slot, waiting: int) -> bool:
    """Whether a ticket takes the last slot that holds nothing, or there are too few of them for all that wait."""
    blank = sum(not other.held.tokens for other in server.slots.slots if other is not slot)
    if blank:
        return waiting - 1 > blank
    return not (slot.held.answered and continues(ticket, slot.held, ticket.chain.common_blocks(slot.held.chain)))
