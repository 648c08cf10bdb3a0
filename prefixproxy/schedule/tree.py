"""Slots and snapshots by what they hold: a tree of prefixes in which a prompt finds all that share something with it.

Each node stands for the first `end` blocks of a prompt, and knows everything that begins with them. Runs of blocks
without a branch are one node, so a prompt's path is as long as the places where others left it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, log2

from prefixproxy.schedule.roots import Root
from prefixproxy.schedule.slot import Slot
from prefixproxy.schedule.slots import MOST_SLOTS, REUSE_HALF_LIFE_S, Upstream
from prefixproxy.types import RootId

Blocks = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Row:
    """A slot in the tree. `deep`: blocks of it that another slot or snapshot of its upstream has too; `parked`: a file
    holds all of it; `idle`: anybody may have it."""

    slot: Slot
    node: Node
    blocks: Blocks
    deep: int = 0
    parked: bool = False
    idle: bool = False

    def key(self, end: int) -> float:
        """Grows with the value of what is lost where a prompt that shares `end` blocks overwrites it, at any time: the
        logarithm of the tokens, as if it had been used at 0. -inf: nothing is lost, or perhaps nothing."""
        held = self.slot.held
        if self.parked or end >= len(self.blocks):
            return -inf
        tokens = held.tokens - held.tokens_at(max(self.deep, end))
        return log2(tokens) + self.slot.last_used / REUSE_HALF_LIFE_S if tokens > 0 else -inf


class Node:
    """`blocks`: of anything below it, of which it stands for `[start, end)`. Of all that is below it: `rows` by the
    slot's number, `idle` with their keys here, `saved` by the upstream's number, and the fewest bytes of any that was
    ever saved here."""

    __slots__ = ("blocks", "children", "end", "idle", "least_bytes", "parent", "rows", "saved", "start")

    def __init__(self, parent: Node | None, blocks: Blocks, start: int, end: int) -> None:
        self.parent, self.blocks, self.start, self.end = parent, blocks, start, end
        self.children: dict[int, Node] = {}
        self.rows: dict[int, Row] = {}
        self.idle: dict[int, float] = {}
        self.saved: dict[int, dict[RootId, Root]] = {}
        self.least_bytes = inf

    def shares(self, blocks: Blocks) -> int:
        """How many blocks it has in common with a prompt that reaches it."""
        limit = min(self.end, len(blocks))
        mine = self.blocks
        if mine[limit - 1] == blocks[limit - 1]:
            return limit
        return bisect_left(range(self.start + 1, limit), True, key=lambda i: mine[i] != blocks[i]) + self.start + 1

    def slots(self) -> list[Slot]:
        """All below it, in order."""
        return [row.slot for _, row in sorted(self.rows.items())]

    def slots_of(self, upstream: Upstream) -> Iterator[Slot]:
        """Those of one upstream, in any order."""
        number = upstream.number
        if len(upstream.slots) < len(self.rows):
            first = number * MOST_SLOTS
            return (self.rows[first + i].slot for i in range(len(upstream.slots)) if first + i in self.rows)
        return (row.slot for each, row in self.rows.items() if each // MOST_SLOTS == number)

    def up(self) -> Iterator[Node]:
        """It and all above it."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


Path = list[tuple[int, Node]]


class PrefixTree:
    def __init__(self) -> None:
        self.root = Node(None, (), 0, 0)

    def path(self, blocks: Blocks) -> Path:
        """From the root to where `blocks` leaves the tree: how many blocks all below each node share with it."""
        node, found = self.root, [(0, self.root)]
        while node.end < len(blocks):
            child = node.children.get(blocks[node.end])
            if child is None:
                break
            shared = child.shares(blocks)
            found.append((shared, child))
            if shared < child.end:
                break
            node = child
        return found

    def obtain(self, blocks: Blocks) -> Node:
        """The node that ends where `blocks` does. Something must be put there at once."""
        node = self.root
        while node.end < len(blocks):
            child = node.children.get(blocks[node.end])
            if child is None:
                leaf = Node(node, blocks, node.end, len(blocks))
                node.children[blocks[node.end]] = leaf
                return leaf
            shared = child.shares(blocks)
            node = child if shared == child.end else self._split(child, shared)
        return node

    def find(self, blocks: Blocks) -> Node | None:
        """The node that ends where `blocks` does, if there is one."""
        shared, node = self.path(blocks)[-1]
        return node if shared == node.end == len(blocks) else None

    def _split(self, lower: Node, at: int) -> Node:
        above, first = lower.parent, lower.blocks[lower.start]
        upper = Node(above, lower.blocks, lower.start, at)
        upper.children[lower.blocks[at]] = lower
        upper.rows = dict(lower.rows)
        upper.idle = {number: upper.rows[number].key(at) for number in lower.idle}
        upper.saved = {number: dict(roots) for number, roots in lower.saved.items()}
        upper.least_bytes = lower.least_bytes
        if above is not None:
            above.children[first] = upper
        lower.parent, lower.start = upper, at
        return upper

    def put(self, row: Row) -> None:
        for node in row.node.up():
            node.rows[row.slot.number] = row

    def price(self, row: Row) -> None:
        """What it costs to overwrite it has changed, or whether it may be."""
        number = row.slot.number
        for node in row.node.up():
            if row.idle:
                node.idle[number] = row.key(node.end)
            else:
                node.idle.pop(number, None)

    def take(self, row: Row) -> None:
        number = row.slot.number
        for node in row.node.up():
            del node.rows[number]
            node.idle.pop(number, None)
        self._tidy(row.node)

    def save(self, number: int, root: Root, node: Node) -> None:
        for each in node.up():
            each.saved.setdefault(number, {})[root.id] = root
            each.least_bytes = min(each.least_bytes, root.n_bytes)

    def drop(self, number: int, root: RootId, node: Node) -> None:
        for each in node.up():
            roots = each.saved[number]
            del roots[root]
            if not roots:
                del each.saved[number]
        self._tidy(node)

    def _tidy(self, node: Node) -> None:
        """Remove what nothing is below any more."""
        while node.parent is not None and not node.rows and not node.saved:
            del node.parent.children[node.blocks[node.start]]
            node = node.parent
