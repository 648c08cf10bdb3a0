"""Roots that nobody has evaluated yet: whether one is worth evaluating alone, or is in an idle slot to be saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from prefixproxy.schedule.fleet import in_state
from prefixproxy.schedule.plan import (
    WAIT_SLACK,
    Decision,
    Gather,
    Hold,
    Place,
    SaveFirst,
    Server,
    WarmFirst,
    cuttable,
    tokens_of,
)
from prefixproxy.schedule.queue import Waiting
from prefixproxy.schedule.slot import Slot, Work
from prefixproxy.schedule.types import HoldReason, Ticket
from prefixproxy.schedule.waits import Waits
from prefixproxy.types import SlotState

WORTHWHILE_REUSE = 0.9
"""Where slots that forget a tail keep less than this share of the rest, copying a slot with a tail is pointless."""
MOST_OF_HEAD = 0.5
"""So much of a head was seen before: what is behind it may well be the user's own."""
SHORT_SHARE = 0.25
"""A root this much shorter than what is left of another one is warmed beside it."""


@dataclass(slots=True)
class ColdRoots(Waits):
    """Decides what a ticket's root needs first."""

    def root_first(self, waiting: Waiting, best: Place) -> Decision | None:
        """What comes before `best`: gather, warm its root alone, or save an idle slot that has it; None if nothing."""
        ticket, server = waiting.ticket, best.server
        if waiting.plain or ticket.alone or not self.can_fork(server):
            return None
        with_others = self.counts.deepest(ticket.chain, holders=2)
        peers = self._peers(waiting, server, with_others)
        wanted = self._wanted_idle(ticket, peers, server) if peers else None
        if wanted is not None:
            return wanted
        alone = self._alone(ticket, server, best.cached)
        if not ticket.warmable or not self._cold(ticket, server, best.cached, max(with_others, *alone)):
            return None
        before = self._in_the_way(server, max(with_others, *alone), ticket)
        if before is not None:
            return before
        together = [ticket.chain.common_blocks(peer.chain) for peer in peers]
        together = [blocks for blocks in together if self._cold(ticket, server, best.cached, blocks)]
        blocks = min(together, default=0) or max(
            b for b in (*alone, 0) if self._cold(ticket, server, best.cached, b) or not b
        )
        chain = ticket.chain.head(blocks)
        known = server.roots.find(chain)
        if not blocks or (known is not None and (known.running or self.now < known.retry_at)):
            return None  # a second warm-up of it could not be told from the first
        if not waiting.gathered:
            return Gather(server, chain)
        if best.root is not None:
            return best
        others = [peer for peer in peers if peer.warmable and peer.chain.common_blocks(ticket.chain) >= blocks]
        others.sort(key=lambda other: other.chain.common_blocks(ticket.chain))
        return WarmFirst(server, best.slot, chain, ticket, tuple(others))

    def _in_the_way(self, server: Server, blocks: int, ticket: Ticket) -> Hold | None:
        """Two cold roots at once only slow each other down. But a short one need not wait for a long one, nor anybody
        for one that takes longer than it should."""
        rate = server.rate(self.policy)
        for slot in server.slots.in_state(SlotState.RESERVED):
            root = None if slot.root is None else server.roots.roots.get(slot.root)
            if root is None or root.parked or slot.work is Work.RESTORE:
                continue
            if slot.work is Work.SAVE:
                return Hold(HoldReason.WARMING, slot.until)
            expected_s = root.tokens / rate
            left_s = expected_s - (self.now - slot.since)
            until = min(root.until, slot.since + WAIT_SLACK * expected_s)
            short = tokens_of(ticket, blocks) / rate < left_s * SHORT_SHARE
            if not short and self.now < until:
                return Hold(HoldReason.WARMING, until)
        return None

    def _cold(self, ticket: Ticket, server: Server, cached: int, blocks: int) -> bool:
        """Whether so much of it is worth a warm-up beyond what is cached."""
        return self.worth(server, tokens_of(ticket, blocks) - cached)

    def _peers(self, waiting: Waiting, server: Server, with_others: int) -> list[Ticket]:
        """Who else waits, if anybody shares something worth a warm-up with it beyond all snapshots."""
        saved = self.best_saved(waiting.ticket, server)
        if not self._cold(waiting.ticket, server, saved[1] if saved else 0, with_others):
            return []
        return [w.ticket for w in self.line if w is not waiting and w.plain is None and not w.ticket.alone]

    def _alone(self, ticket: Ticket, server: Server, cached: int) -> list[int]:
        """Blocks it may share with later tickets: its head, what a running one shares, or one before it whose slot
        cannot be cut back to that, the roots known of it."""
        running = self._shared_blocks(ticket, server, _is_leased)
        alone = [ticket.head_blocks, server.roots.deepest_shared(ticket.chain), cuttable(ticket, running)]
        if server.slots.kept_share(can_fork=False) < WORTHWHILE_REUSE:
            seen = cuttable(ticket, self._shared_blocks(ticket, server, _is_idle))
            if seen >= ticket.head_blocks * MOST_OF_HEAD and self._cold(ticket, server, cached, seen):
                alone[0] = seen  # what nobody else had of the head is the next part
            alone.append(seen)
        return alone

    def _shared_blocks(self, ticket: Ticket, server: Server, which: Callable[[Slot], bool]) -> int:
        """The most that it shares with one of these slots."""
        if self.index is None or server.slots.number in self.index.odd:
            found = (ticket.chain.common_blocks(slot.held.chain) for slot in server.slots.slots if which(slot))
            return max(found, default=0)
        for blocks, node in reversed(self.path(ticket)):
            if any(which(slot) for slot in node.slots_of(server.slots)):
                return blocks
        return 0

    def _wanted_idle(self, ticket: Ticket, peers: Sequence[Ticket], server: Server) -> SaveFirst | None:
        """An idle slot that holds, beyond any snapshot, what this and another waiting ticket share."""
        if server.slots.kept_share(can_fork=False) < WORTHWHILE_REUSE:
            return None
        saved = self.best_saved(ticket, server)
        cached = saved[1] if saved else 0
        for slot in self.candidates(ticket, server, cached + self.least_worth()):
            blocks = ticket.chain.common_blocks(slot.held.chain)
            if not self.worth(server, tokens_of(ticket, blocks) - cached):
                continue
            together = [min(blocks, peer.chain.common_blocks(slot.held.chain)) for peer in peers]
            together = [b for b in together if self.worth(server, tokens_of(ticket, b) - cached)]
            if together and len(list(islice(self.usable(ticket, server), 2))) > 1:
                chain = ticket.chain.head(min(together))
                known = server.roots.find(chain)
                if known is None or (known.snapshot is None and self.now >= known.retry_at and not known.running):
                    return SaveFirst(server, slot, chain, ticket)
        return None

    def candidates(self, ticket: Ticket, server: Server, tokens: float) -> Iterable[Slot]:
        """The slots it may use on one upstream that share more than so many tokens with it, and perhaps others."""
        deep = self.sharing(ticket, tokens)
        if deep is None:
            return self.usable(ticket, server)
        return [slot for slot in in_state(server, SlotState.IDLE, deep) if self.may_use(ticket, server, slot)]


def _is_leased(slot: Slot) -> bool:
    return slot.state is SlotState.LEASED


def _is_idle(slot: Slot) -> bool:
    return slot.idle
