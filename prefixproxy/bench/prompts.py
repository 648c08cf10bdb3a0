"""What `bench` asks: seven scenarios with the same root length, each from a nonce that no run before had.

A scenario is a list of waves; what is in one wave is sent at once. Waves marked as not counted only prepare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from prefixproxy.questions import FOLLOW_UP, QUESTIONS, Brief

Message = Mapping[str, str]
Messages = tuple[Message, ...]

MOST_CONTROLS = 3


class Scenario(StrEnum):
    """In the order in which they run: continuations go on from what the sequential lanes left."""

    UNIQUE = "unique prefix"
    SHARED = "shared root, one by one"
    CONTINUED = "continuations, one by one"
    CONTINUED_AT_ONCE = "continuations at once"
    REDUCER = "reducer"
    SHARED_AT_ONCE = "shared root at once"
    VOLATILE = "clock and lane id first"


ROOTED = frozenset(Scenario) - {Scenario.UNIQUE, Scenario.REDUCER}
"""Scenarios whose prompts begin with a root that was asked for before."""


@dataclass(frozen=True, slots=True)
class Wave:
    prompts: tuple[Messages, ...]
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Sizes:
    """`lanes` agents on a root of `root` tokens."""

    lanes: int
    root: int

    @property
    def controls(self) -> int:
        return min(self.lanes, MOST_CONTROLS)

    @property
    def requests(self) -> int:
        """Of one run of all scenarios."""
        return self.controls + (1 + self.lanes) + 2 * self.lanes + 1 + self.lanes + (1 + self.lanes)


def unique(sizes: Sizes, nonce: str, brief: Brief) -> list[Wave]:
    """The control: nothing of these prompts was ever seen, and they are as long as the others."""
    return [Wave((lane(brief(f"{nonce}-{i}", sizes.root), i),)) for i in range(sizes.controls)]


def shared(sizes: Sizes, nonce: str, brief: Brief) -> list[Wave]:
    """Another question warms the root, then the lanes one after the other."""
    text = brief(nonce, sizes.root)
    return [Wave((lane(text, sizes.lanes),), counted=False), *(Wave((lane(text, i),)) for i in range(sizes.lanes))]


def shared_at_once(sizes: Sizes, nonce: str, brief: Brief) -> list[Wave]:
    """The same lanes, all at once on a root that nobody has seen."""
    text = brief(nonce, sizes.root)
    return [Wave(tuple(lane(text, i) for i in range(sizes.lanes)))]


def volatile(sizes: Sizes, nonce: str, clock: Sequence[str], brief: Brief) -> list[Wave]:
    """A clock and a lane id in the first line of every system text, as frameworks like to have it; `clock`: the time
    for each lane, and one before them."""
    text = brief(nonce, sizes.root)
    first = [f"Current time: {time}  Lane: {i}  Run: {nonce}" for i, time in enumerate(clock)]
    prompts = [lane(f"{first[i]}\n{text}", i) for i in range(sizes.lanes + 1)]
    return [Wave((prompts[-1],), counted=False), *(Wave((prompt,)) for prompt in prompts[:-1])]


def continued(prompts: Sequence[Messages], answers: Sequence[str]) -> list[Messages]:
    """The next turn of each conversation."""
    return [
        (*prompt, {"role": "assistant", "content": answer}, {"role": "user", "content": FOLLOW_UP})
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def one_by_one(prompts: Sequence[Messages]) -> list[Wave]:
    return [Wave((prompt,)) for prompt in prompts]


def reducer(sizes: Sizes, nonce: str, answers: Sequence[str], brief: Brief) -> list[Wave]:
    """The lanes' answers, pasted into a prompt of its own: caches do not merge."""
    system = f"You merge the answers of several agents ({nonce}).\n{brief(nonce, sizes.root)}"
    quoted = "\n".join(f"Agent {i + 1}: {answer}" for i, answer in enumerate(answers))
    return [Wave((({"role": "system", "content": system}, {"role": "user", "content": f"Merge these:\n{quoted}"}),))]


def lane(system: str, number: int) -> Messages:
    question = QUESTIONS[number % len(QUESTIONS)]
    return {"role": "system", "content": system}, {"role": "user", "content": f"{question} (lane {number + 1})"}


def shorter(sizes: Sizes, root: int) -> Sizes:
    """With roots of no more than so many tokens."""
    return replace(sizes, root=min(sizes.root, root))
