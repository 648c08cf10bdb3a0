"""The cheapest places for a ticket in a large fleet: exactly those that a look at every idle slot would find.

Whatever shares the same prefix with the ticket saves it the same, and what is lost in a slot hardly depends on who
overwrites it. So of all slots below a node of the tree only those with the smallest keys can be the cheapest: they are
priced, as `price` does it, the others are known to cost more.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp2, inf, log2

from prefixproxy.schedule.index import Index, Shelf, fork_floor_s
from prefixproxy.schedule.plan import Group, Place, Server, tokens_of
from prefixproxy.schedule.price import Prices
from prefixproxy.schedule.queue import Waiting
from prefixproxy.schedule.slot import Slot
from prefixproxy.schedule.slots import MOST_SLOTS, REUSE_CHANCE, REUSE_HALF_LIFE_S
from prefixproxy.schedule.types import Reason

SLACK_S = 0.002
"""Prices are rounded to be compared: what costs this much more than the cheapest is no rival of it."""


def cheapest_places(prices: Prices, index: Index, waiting: Waiting, group: Group) -> list[Place]:
    """Every place within SLACK_S of the cheapest, and perhaps others, in the order of upstreams and slots."""
    return _Search(prices, index, waiting, group).run()


class _Search:
    def __init__(self, prices: Prices, index: Index, waiting: Waiting, group: Group) -> None:
        self.prices, self.index, self.waiting, self.ticket = prices, index, waiting, waiting.ticket
        self.path = prices.path(self.ticket)
        self.rate, _, self.restore = index.bounds()
        self.value = REUSE_CHANCE / self.rate
        self.age = prices.now / REUSE_HALF_LIFE_S
        self.best = inf
        self.found: list[Place] = []
        self.seen: set[int] = set()
        promised = {slot.number // MOST_SLOTS for slot in prices.fleet.census.promised_to(self.ticket.id) if slot.idle}
        self.apart = (index.odd | promised) & group.numbers
        self.numbers = group.numbers - self.apart if self.apart else group.numbers
        self.sides = prices.policy.side_slots > 0
        self.all = self.numbers == index.numbers and not self.sides

    def run(self) -> list[Place]:
        for number in sorted(self.apart):
            for place in self.prices.places(self.waiting, self.server(number)):
                self.keep(place)
        self.directs()
        self.forks()
        self.blanks()
        return sorted(
            self.found, key=lambda place: (place.slot.number // MOST_SLOTS, place.root is not None, place.slot.number)
        )

    def server(self, number: int) -> Server:
        return self.index.shelves[number].server

    def keep(self, place: Place) -> None:
        self.best = min(self.best, place.cost_s)
        self.found.append(place)

    # bounds

    def evaluate_s(self, blocks: int) -> float:
        """No less is needed to evaluate what is not in the first `blocks` blocks."""
        return (self.ticket.n_tokens - tokens_of(self.ticket, blocks)) / self.rate

    def lost_s(self, key: float) -> float:
        return exp2(key - self.age) * self.value

    def limit(self, cost_s: float) -> float:
        """The largest key with which something that costs `cost_s` otherwise may still be as cheap as the best."""
        left_s = self.best + SLACK_S - cost_s
        if left_s < 0:
            return -inf
        return inf if left_s == inf else log2(left_s / self.value) + self.age if left_s > 0 else -inf

    def affordable(self, cost_s: float) -> bool:
        return cost_s <= self.best + SLACK_S

    # which slots it may use

    def usable(self, number: int) -> bool:
        upstream, slot = divmod(number, MOST_SLOTS)
        if upstream not in self.numbers:
            return False
        slots = self.index.shelves[upstream].server.slots.slots
        kept = len(slots) - min(self.prices.policy.side_slots, len(slots) - 1)
        return kept == len(slots) or self.ticket.side == (slot >= kept)

    def open(self, keys: Mapping[int, float]) -> Mapping[int, float]:
        if self.all:
            return keys
        if self.sides:
            return {number: key for number, key in keys.items() if self.usable(number)}
        mine = self.numbers
        return {number: key for number, key in keys.items() if number // MOST_SLOTS in mine}

    # 1. as they are

    def directs(self) -> None:
        """In the slots that share something, the deepest first."""
        levels = [(self.evaluate_s(blocks), self.open(node.idle)) for blocks, node in reversed(self.path)]
        for cost_s, keys in levels:
            if keys and self.affordable(cost_s):
                self.look_at_best(keys, cost_s)
        for cost_s, keys in levels:
            if keys and self.affordable(cost_s):
                self.look_at_all(keys, cost_s)

    def look_at_best(self, keys: Mapping[int, float], cost_s: float) -> None:
        least = min(keys.values())
        if cost_s + self.lost_s(least) < self.best:
            self.look_at(next(number for number, key in keys.items() if key == least))

    def look_at_all(self, keys: Mapping[int, float], cost_s: float) -> None:
        limit = self.limit(cost_s)
        for number in [number for number, key in keys.items() if key <= limit]:
            self.look_at(number)

    def look_at(self, number: int) -> None:
        if number in self.seen:
            return
        self.seen.add(number)
        server = self.server(number // MOST_SLOTS)
        self.price(server, server.slots.slots[number % MOST_SLOTS])

    def price(self, server: Server, slot: Slot) -> None:
        rate = server.rate(self.prices.policy)
        self.keep(self.prices.direct(self.ticket, server, slot, rate))
        saved = self.prices.best_saved(self.ticket, server)
        if saved is not None:
            cost_s = self.prices.fork_s(self.ticket, server, *saved)
            place = self.prices.fork(self.ticket, server, slot, *saved, cost_s)
            if place is not None:
                self.keep(place)

    # 2. with a copy

    def forks(self) -> None:
        """On the upstreams that have a snapshot of some of it, the deepest first."""
        for blocks, node in reversed(self.path):
            floor_s = self.evaluate_s(blocks) + fork_floor_s(node.least_bytes, self.restore)
            if not blocks or not node.saved or not self.affordable(floor_s):
                continue
            least = {number: self.index.shelves[number].least for number in node.saved if number in self.numbers}
            keys = {number: key for number, key in least.items() if key is not None}
            if keys:
                self.fork_on(min(keys, key=keys.__getitem__))
                limit = self.limit(floor_s)
                for number in [number for number, key in keys.items() if key <= limit]:
                    self.fork_on(number)

    def fork_on(self, number: int) -> None:
        server, shelf = self.server(number), self.index.shelves[number]
        saved = self.prices.best_saved(self.ticket, server)
        if saved is None:
            return
        cost_s = self.prices.fork_s(self.ticket, server, *saved)
        if not self.affordable(cost_s):
            return
        keys = self.open(shelf.keys)
        if keys:
            self.look_at_best(keys, cost_s)
            self.look_at_all(keys, cost_s)
        for each in self.blank_alike(shelf):
            self.look_at(each)

    # 3. in slots that hold nothing

    def blanks(self) -> None:
        """One is as good as another, but for its number and its turn."""
        if not self.affordable(self.evaluate_s(0)):
            return
        if self.sides:
            for number in sorted(self.numbers & self.index.open):
                self.blanks_of(number)
            return
        for rate, every in self.index.blank.items():
            cost_s = self.ticket.n_tokens / rate
            first = every if self.all else {n: turn for n, turn in every.items() if n in self.numbers}
            if first and self.affordable(cost_s):
                lowest, (_, in_turn) = min(first), min(first.values())
                for each in {min(self.index.shelves[lowest].blank), in_turn}:
                    self.blank(each, cost_s)

    def blanks_of(self, number: int) -> None:
        shelf = self.index.shelves[number]
        cost_s = self.ticket.n_tokens / shelf.server.rate(self.prices.policy)
        if shelf.blank and self.affordable(cost_s):
            for each in self.blank_alike(shelf):
                self.blank(each, cost_s)

    def blank(self, number: int, cost_s: float) -> None:
        if number not in self.seen:
            self.seen.add(number)
            server = self.server(number // MOST_SLOTS)
            slot = server.slots.slots[number % MOST_SLOTS]
            reason = Reason.SIDE if self.ticket.side else Reason.LEAST_VALUABLE if slot.dirty else Reason.EMPTY_SLOT
            self.keep(Place(server, slot, None, 0, cost_s, reason))

    def blank_alike(self, shelf: Shelf) -> set[int]:
        """That with the lowest number and that whose turn it is."""
        turns = shelf.blank
        mine = {number: turn for number, turn in turns.items() if self.usable(number)} if self.sides else turns
        return {min(mine), min(mine, key=mine.__getitem__)} if mine else set()


def _in_order(place: Place) -> tuple[int, bool, int]:
    number = place.slot.number
    return number // MOST_SLOTS, place.root is not None, number
