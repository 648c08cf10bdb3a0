"""What is under way in all upstreams of one scheduler, kept as it changes: no look at every slot to find it.

An upstream is restless while time alone may change something there, or something of it is unresolved. It becomes so
when it is touched, and is calm again when a look finds nothing (`fleet.is_calm`). What changed in a slot is noted for
the index of slots (`index`), which catches up when it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.slot import Slot
from prefixproxy.types import RootId, TicketId


@dataclass(slots=True)
class Census:
    """Upstreams by number, in the order in which they came. `version` grows with the version of any. `open_slots`: idle
    or foreign ones. `promised`: the slots that were prepared for a ticket, by their number. `noting`: somebody reads
    `slots` (those that changed), `saved` (of snapshots that came or went), `roots` (the first blocks of
    those that began or ended, with their upstreams) and `touched` (upstreams)."""

    version: int = 0
    open_slots: int = 0
    restless: set[int] = field(default_factory=set)
    promised: dict[TicketId, dict[int, Slot]] = field(default_factory=dict)
    noting: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)
    saved: dict[tuple[int, RootId], PrefixChain] = field(default_factory=dict)
    roots: set[tuple[int, int]] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)

    def touch(self, number: int) -> None:
        self.version += 1
        self.restless.add(number)
        if self.noting:
            self.touched.add(number)

    def watch(self) -> None:
        """From now on changes are noted, until somebody catches up (`forget`)."""
        self.noting = True
        self.forget()

    def forget(self) -> None:
        self.slots.clear()
        self.saved.clear()
        self.roots.clear()
        self.touched.clear()

    def note(self, slot: Slot) -> None:
        if self.noting:
            self.slots[slot.number] = slot

    def note_root(self, number: int, chain: PrefixChain) -> None:
        """A root of this chain, or a wait for those who share it, has begun or ended on an upstream."""
        if self.noting and chain.hashes:
            self.roots.add((chain.hashes[0], number))

    def promise(self, slot: Slot, ticket: TicketId | None) -> None:
        """The slot is prepared for this ticket, or no longer for any."""
        if slot.promised == ticket:
            return
        if slot.promised is not None:
            mine = self.promised.get(slot.promised, {})
            mine.pop(slot.number, None)
            if not mine:
                self.promised.pop(slot.promised, None)
        if ticket is not None:
            self.promised.setdefault(ticket, {})[slot.number] = slot
        slot.promised = ticket
        self.note(slot)

    def promised_to(self, ticket: TicketId) -> list[Slot]:
        """In the order of upstreams and slots."""
        mine = self.promised.get(ticket)
        return [slot for _, slot in sorted(mine.items())] if mine else []
