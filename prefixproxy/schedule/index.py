"""All slots of a large fleet, ordered so that a decision looks at the few that can be the cheapest.

It follows the slots by what the census notes, when it is asked. Everything in it is a bound: prices are those of
`price`, for the slots that remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.census import Census
from prefixproxy.schedule.changes import Changes
from prefixproxy.schedule.park import is_parked, worthwhile_tokens
from prefixproxy.schedule.plan import Server
from prefixproxy.schedule.rates import ASSUMED_COPY_S, COPY_CALL_S, NOTHING_KEPT, Kept
from prefixproxy.schedule.roots import Root
from prefixproxy.schedule.slot import Slot
from prefixproxy.schedule.slots import MOST_SLOTS
from prefixproxy.schedule.tree import Node, Path, PrefixTree, Row
from prefixproxy.schedule.types import Policy
from prefixproxy.types import RootId

ALIKE = 1e-6
"""Rates that differ by less, relatively, are the same: the mean of equal samples moves by its last bit."""


@dataclass(slots=True, eq=False)
class Shelf:
    """The idle, unpromised slots of one upstream by number: `keys` of those that hold something (see `Row.key`, for a
    prompt that shares nothing); `blank` ones hold nothing, with their turn. `least`: the smallest key, -inf if one is
    blank, None if none is idle. `rate`: of its upstream, when last measured."""

    server: Server
    keys: dict[int, float] = field(default_factory=dict)
    blank: dict[int, int] = field(default_factory=dict)
    least: float | None = None
    rate: float = 0.0

    def put(self, row: Row) -> None:
        slot = row.slot
        self.take(slot.number)
        if row.idle:
            if slot.held.tokens or row.blocks:
                self.keys[slot.number] = row.key(0)
            else:
                self.blank[slot.number] = slot.turn

    def take(self, number: int) -> None:
        self.keys.pop(number, None)
        self.blank.pop(number, None)

    def count(self) -> None:
        self.least = -inf if self.blank else min(self.keys.values(), default=None)


class Index:
    """`numbers`: of the upstreams that are up; `odd` ones of them have one cache for all slots, or reuse
    nothing, and are not indexed."""

    def __init__(self, census: Census, servers: Sequence[Server], policy: Policy) -> None:
        self.tree = PrefixTree()
        self.policy = policy
        self.generation = 0
        self.shelves = {server.slots.number: Shelf(server) for server in servers}
        self.numbers = frozenset(self.shelves)
        shared = (s for s in servers if s.slots.facts.capabilities.shared_cache or s.slots.facts.reuse_off)
        self.odd = frozenset(server.slots.number for server in shared)
        self._census = census
        self._rows: dict[int, Row] = {}
        self._saved: dict[tuple[int, RootId], tuple[PrefixChain, Root, Node]] = {}
        self._measures: dict[int, tuple[float, float, float]] = {}
        self._basis: dict[int, tuple[Kept, tuple[float, float, float, float]]] = {}
        self._bounds: tuple[float, float, float] | None = None
        self.changes = Changes()
        self.measured = 0
        self.copied = 0
        """These grow when an upstream proves to be another than it was measured to be; `copied` if that is only how
        long a copy takes."""
        self.open: set[int] = set()
        """Upstreams with an idle, unpromised slot."""
        self.blank: dict[float, dict[int, tuple[int, int]]] = {}
        """Upstreams with slots that hold nothing, by their rate: turn and number of the one whose turn it is."""
        self._census.watch()
        for server in servers:
            self._census.touched.add(server.slots.number)
            for slot in server.slots.slots:
                self._census.note(slot)
            for root in server.roots.saved():
                self._census.saved[server.slots.number, root.id] = root.chain

    def refresh(self) -> None:
        """Catch up with what was noted."""
        census = self._census
        if not (census.touched or census.slots or census.saved or census.roots):
            return
        for first, number in sorted(census.roots):
            self.changes.note((first,), number)
        for slot in census.slots.values():
            self._leave(slot)
        for (number, root), chain in census.saved.items():
            self.changes.note(chain.hashes, None)
            if number in self.numbers:
                self._follow_saved(number, root, chain)
        for slot in census.slots.values():
            self._follow(slot)
        for number in census.touched:
            if number in self.numbers:
                self._measure(number)
        census.forget()
        self.generation += 1

    def _measure(self, number: int) -> None:
        shelf = self.shelves[number]
        self._shelve(number, shelf)
        rates = shelf.server.slots.rates
        known = rates.restore_s_per_byte
        found = shelf.rate, worthwhile_tokens(shelf.server, self.policy), 0.0 if known is None else known
        if self._measures.get(number) != found:
            self._measures[number] = found
            self._bounds = None
        kept, before = self._basis.get(number, (NOTHING_KEPT, None))
        basis = *found, rates.bytes_per_token or 0.0
        if before is None or kept != rates.kept or not _alike(basis, before):
            self._basis[number] = rates.kept, basis
            copies_alone = before is not None and kept == rates.kept and _alike(basis[:2], before[:2])
            self.measured += not copies_alone
            self.copied += copies_alone

    def _shelve(self, number: int, shelf: Shelf) -> None:
        """What of its idle slots is kept for all upstreams together."""
        shelf.count()
        self.open.discard(number)
        if shelf.rate in self.blank:
            self.blank[shelf.rate].pop(number, None)
            if not self.blank[shelf.rate]:
                del self.blank[shelf.rate]
        shelf.rate = shelf.server.rate(self.policy)
        if shelf.least is not None:
            self.open.add(number)
        if shelf.blank:
            turns = ((turn, slot) for slot, turn in shelf.blank.items())
            self.blank.setdefault(shelf.rate, {})[number] = min(turns)

    def bounds(self) -> tuple[float, float, float]:
        """Of all upstreams: the highest prefill rate, the fewest tokens that are worth a warm-up, and the fewest
        seconds of a restore for each byte."""
        if self._bounds is None:
            rates, worths, restores = zip(*self._measures.values(), strict=True)
            self._bounds = max(rates), min(worths), min(restores)
        return self._bounds

    def deepest(self, chain: PrefixChain) -> int:
        """How many leading blocks of a prompt any slot or snapshot has."""
        return self.tree.path(chain.hashes)[-1][0]

    def saved_roots(self, path: Path, server: Server) -> list[Root]:
        """The roots of an upstream with a snapshot that may be the best for the prompt of that path, in order."""
        number, found = server.slots.number, {}
        of_files = server.slots.rates.file_share(True, server.slots.facts.capabilities.rolls_back)
        whole = server.slots.kept_share(can_fork=False) == of_files == 1.0
        for blocks, node in reversed(path):
            roots = node.saved.get(number, {}) if blocks else {}
            found.update(roots)
            if whole and any(not root.running for root in roots.values()):
                break  # whatever else there is shares less
        return sorted(found.values(), key=lambda root: root.number)

    def _follow_saved(self, number: int, root: RootId, chain: PrefixChain) -> None:
        known = self.shelves[number].server.roots.roots.get(root)
        snapshot = None if known is None else known.snapshot
        before = self._saved.get((number, root))
        if before is not None and (snapshot is None or before[0] is not snapshot.chain or before[1] is not known):
            self.tree.drop(number, root, before[2])
            del self._saved[number, root]
            before = None
        if before is None and known is not None and snapshot is not None:
            node = self.tree.obtain(snapshot.chain.hashes)
            self.tree.save(number, known, node)
            self._saved[number, root] = snapshot.chain, known, node
        alike = self.tree.find(chain.hashes)
        for row in () if alike is None else alike.rows.values():
            if row.slot.number // MOST_SLOTS == number and row.slot.held.chain.digest == chain.digest:
                self._census.note(row.slot)  # whether a file holds all of it

    def _leave(self, slot: Slot) -> None:
        """Slots that hold something else leave the tree before anything is put there: nodes that are split price all
        rows below them, by what their slots hold now."""
        row, blocks = self._rows.get(slot.number), slot.held.chain.hashes
        if row is None:
            return
        if row.blocks[:1] != blocks[:1]:
            self.changes.note(row.blocks, slot)
        if row.slot is not slot or row.blocks is not blocks or self._shelf_of(slot) is None:
            self.tree.take(row)
            del self._rows[slot.number]

    def _shelf_of(self, slot: Slot) -> Shelf | None:
        """None if its upstream has gone, or has other slots now."""
        shelf = self.shelves.get(slot.number // MOST_SLOTS)
        return shelf if shelf is not None and shelf.server.slots.slot(slot.id) is slot else None

    def _follow(self, slot: Slot) -> None:
        shelf, row, blocks = self._shelf_of(slot), self._rows.get(slot.number), slot.held.chain.hashes
        self.changes.note(blocks, slot)
        self._census.touched.add(slot.number // MOST_SLOTS)
        if shelf is None or slot.number // MOST_SLOTS in self.odd:
            return
        if row is None:
            row = self._rows[slot.number] = Row(slot, self.tree.obtain(blocks), blocks)
            self.tree.put(row)
        row.idle = slot.idle and slot.promised is None
        if row.idle:
            row.deep = shelf.server.slots.counts.deepest(slot.held.chain, holders=2)
            row.parked = is_parked(shelf.server, slot)
        if slot.held.tokens or blocks:
            self.tree.price(row)
        else:
            self.tree.root.idle.pop(slot.number, None)
        shelf.put(row)


def fork_floor_s(n_bytes: float, seconds_per_byte: float) -> float:
    """A restore takes no less, measured or not."""
    return min(ASSUMED_COPY_S, COPY_CALL_S + n_bytes * seconds_per_byte)


def _alike(found: Sequence[float], before: Sequence[float]) -> bool:
    return all(abs(new - old) <= ALIKE * old for new, old in zip(found, before, strict=True))
