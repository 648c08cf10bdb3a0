"""Arrivals made up: fan-outs, conversations and side requests, in Poisson order, from one seed.

Each kind brings its arrivals in bursts of its own (a fan-out, a conversation); they are merged by time as they come, so
that a million of them never are in memory at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from prefixproxy.simulate.play import Arrival
from prefixproxy.simulate.text import Text, span
from prefixproxy.types import Priority

Workload = Literal["fanout", "conversations", "mixed"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)
ROOTS = 8
ROOT_TOKENS = (1500, 6000)
LANES = (3, 8)
LANE_GAP_S = 0.05
LANE_TOKENS = (20, 120)
TURNS = (3, 10)
TURN_TOKENS = (20, 300)
ANSWER_TOKENS = (20, 250)
THINK_S = 20.0
"""Between an answer and the next question, on average."""
NOMINAL_ANSWER_S = 5.0
"""How long an answer is taken to be when a conversation is planned; the next turn waits for the real one."""
SIDE_TOKENS = (150, 600)
SIDE_ANSWER_TOKENS = 12
SIDE_SHARE, UNIQUE_SHARE = 0.1, 0.02
"""Of the bursts of a mixed load: title and summary requests, prompts that nobody else has."""


class Dice(Protocol):
    """What is needed of random.Random."""

    def random(self) -> float: ...

    def randint(self, a: int, b: int) -> int: ...

    def expovariate(self, lambd: float) -> float: ...


@dataclass(slots=True)
class _Maker:
    """Numbers everything it makes; `roots` stay the same, the busiest first."""

    dice: Dice
    roots: list[Text]
    next_key: int = 0

    def key(self) -> int:
        self.next_key += 1
        return self.next_key

    def root(self) -> tuple[int, Text]:
        """The k-th root is asked for half as often as the one before, or a bit more."""
        k = min(int(len(self.roots) * self.dice.random() ** 2), len(self.roots) - 1)
        return k, self.roots[k]

    def own(self, key: int, tokens: tuple[int, int]) -> Text:
        return span(len(self.roots) + key, self.dice.randint(*tokens))

    def answer(self, key: int) -> Text:
        return span(-key, self.dice.randint(*ANSWER_TOKENS))

    def fanout(self, time: float) -> Iterator[Arrival]:
        """Lanes on one root, within milliseconds."""
        k, root = self.root()
        for _ in range(self.dice.randint(*LANES)):
            key = self.key()
            yield Arrival(
                time, key, root + self.own(key, LANE_TOKENS), self.answer(key), head=len(root), family=f"root {k}"
            )
            time += self.dice.expovariate(1 / LANE_GAP_S)

    def conversation(self, time: float) -> Iterator[Arrival]:
        """Turns that follow each other, each carrying the answer of the one before."""
        k, root = self.root()
        text, after, think_s = root, None, 0.0
        turns = self.dice.randint(*TURNS)
        for turn in range(1, turns + 1):
            key = self.key()
            text, answer = text + self.own(key, TURN_TOKENS), self.answer(key)
            yield Arrival(
                time, key, text, answer, len(root), f"root {k}", after=after, think_s=think_s, awaited=turn < turns
            )
            text, after, think_s = text + answer, key, self.dice.expovariate(1 / THINK_S)
            time += NOMINAL_ANSWER_S + think_s

    def side(self, time: float) -> Iterator[Arrival]:
        """One title or summary."""
        key = self.key()
        prompt, answer = self.own(key, SIDE_TOKENS), span(-key, SIDE_ANSWER_TOKENS)
        yield Arrival(time, key, prompt, answer, side=True, priority=Priority.BATCH, family="side")

    def unique(self, time: float) -> Iterator[Arrival]:
        """One prompt that shares nothing with any other."""
        key = self.key()
        yield Arrival(time, key, self.own(key, ROOT_TOKENS), self.answer(key), family="unique")

    def mixed(self, time: float) -> Iterator[Arrival]:
        x = self.dice.random()
        if x < SIDE_SHARE:
            return self.side(time)
        if x < SIDE_SHARE + UNIQUE_SHARE:
            return self.unique(time)
        return self.fanout(time) if self.dice.random() < 0.5 else self.conversation(time)


def synthetic(workload: Workload, requests: int, rate: float, dice: Dice, roots: int = ROOTS) -> Iterator[Arrival]:
    """`requests` arrivals in order of time, `rate` of them per second on average."""
    maker = _Maker(dice, [span(k + 1, dice.randint(*ROOT_TOKENS)) for k in range(roots)])
    burst: Callable[[float], Iterator[Arrival]] = {
        "fanout": maker.fanout,
        "conversations": maker.conversation,
        "mixed": maker.mixed,
    }[workload]
    size = _mean_burst(workload)
    time, made = 0.0, 0
    open_: list[tuple[float, int, Arrival, Iterator[Arrival]]] = []
    while made < requests:
        while not open_ or time <= open_[0][0]:
            _push(open_, burst(time))
            time += dice.expovariate(rate / size)
        _, _, arrival, rest = heapq.heappop(open_)
        yield arrival
        made += 1
        _push(open_, rest)


def _push(open_: list[tuple[float, int, Arrival, Iterator[Arrival]]], burst: Iterator[Arrival]) -> None:
    arrival = next(burst, None)
    if arrival is not None:
        heapq.heappush(open_, (arrival.time, arrival.key, arrival, burst))


def _mean_burst(workload: Workload) -> float:
    """Requests in a burst, on average."""
    lanes, turns = sum(LANES) / 2, sum(TURNS) / 2
    if workload == "mixed":
        single = SIDE_SHARE + UNIQUE_SHARE
        return single + (1 - single) * (lanes + turns) / 2
    return lanes if workload == "fanout" else turns
