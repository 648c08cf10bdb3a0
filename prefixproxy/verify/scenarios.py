"""What `verify` asks: conversations that share prefixes in each way in which a server may reuse them.

A scenario is a few conversations and the steps that walk through them. The steps differ between a llama-server, where
slots are named and copied by hand, and a proxy or a server that cannot save slots, which do it themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixproxy.questions import FOLLOW_UP, QUESTIONS, Brief

LANES = 4
MOST_EVICTED = 9
"""Conversations that push each other out of the slots; with more slots than that nothing is pushed out."""
RECALL_SHARE = 0.6
"""Of a slot's context for the long prompt; the rest is for the template, the question and the answer."""
CODE = "7319"
_FOLLOW_UPS = (FOLLOW_UP, "Say the same in other words.")
_QUESTIONS = (*QUESTIONS, "Which gate is closed first?")


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation: its system text, and what the user says turn by turn."""

    system: str
    turns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """The next turn of each of these talks, all at once; in these slots, or wherever the server likes."""

    talks: tuple[int, ...]
    slots: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Warm:
    """Evaluate what these talks' first prompts share, in this slot."""

    slot: int
    talks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    slot: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Read what was saved last into this slot."""

    slot: int


Step = Ask | Warm | Save | Restore


@dataclass(frozen=True, slots=True)
class Scenario:
    """`skipped`: why it cannot be run there; it has no steps then."""

    name: str
    talks: tuple[Talk, ...]
    steps: tuple[Step, ...]
    skipped: str = ""

    @property
    def requests(self) -> int:
        return sum(len(step.talks) for step in self.steps if isinstance(step, Ask))


@dataclass(frozen=True, slots=True)
class Place:
    """Where it runs. `copies`: slots can be named, saved and restored from here; `keeps`: what a slot loses is kept
    elsewhere and comes back by itself (a proxy, or the server's RAM cache). `worth_tokens`: a shorter root is not
    copied."""

    n_slots: int
    n_ctx_slot: int
    copies: bool
    keeps: bool = True
    worth_tokens: int = 0


def scenarios(place: Place, nonce: str, root_tokens: int, long_tokens: int, brief: Brief) -> list[Scenario]:
    """All six, with prompts that no run before had: roots of `root_tokens`, and one prompt of `long_tokens`."""
    return [
        _multi_turn(brief(f"{nonce}-turns", root_tokens)),
        _fan_out(brief(f"{nonce}-lanes", root_tokens)),
        _forked(place, brief(f"{nonce}-forks", max(root_tokens, place.worth_tokens))),
        _evicted(
            place, [brief(f"{nonce}-evicted-{n}", root_tokens) for n in range(min(place.n_slots + 1, MOST_EVICTED))]
        ),
        _interleaved([brief(f"{nonce}-lane-{n}", root_tokens) for n in range(3)]),
        _recall(brief(f"{nonce}-recall", long_tokens)),
    ]


def _multi_turn(system: str) -> Scenario:
    talk = Talk(system, (_QUESTIONS[0], *_FOLLOW_UPS))
    return Scenario("multi-turn", (talk,), tuple(Ask((0,)) for _ in talk.turns))


def _fan_out(system: str) -> Scenario:
    talks = tuple(Talk(system, (question,)) for question in _QUESTIONS[: LANES + 1])
    return Scenario("fan-out", talks, (Ask((0,)), Ask(tuple(range(1, LANES + 1)))))


def _forked(place: Place, system: str) -> Scenario:
    """The root alone in one slot, and from there in all others. A proxy does that itself for lanes that arrive cold."""
    n = min(LANES, place.n_slots) if place.copies else LANES
    talks = tuple(Talk(system, (question,)) for question in _QUESTIONS[:n])
    everybody = tuple(range(n))
    if not place.copies:
        return Scenario("forked", talks, (Ask(everybody),))
    if n < 2:
        return Scenario("forked", talks, (), "one slot: there is none to copy to")
    restores = tuple(Restore(slot) for slot in range(1, n))
    return Scenario("forked", talks, (Warm(0, everybody), Save(0), *restores, Ask(everybody, everybody)))


def _evicted(place: Place, systems: Sequence[str]) -> Scenario:
    """One conversation is pushed out of its slot by another, comes back, and goes on."""
    two_turns = [
        Talk(system, (question, _FOLLOW_UPS[0])) for system, question in zip(systems, _QUESTIONS, strict=False)
    ]
    if place.copies:
        steps = (Ask((0,), (0,)), Save(0), Ask((1,), (0,)), Restore(0), Ask((0,), (0,)))
        return Scenario("evicted", tuple(two_turns[:2]), steps)
    if not place.keeps or place.n_slots >= MOST_EVICTED:
        why = f"{place.n_slots} slots: too many conversations would be needed" if place.keeps else "nothing is kept"
        return Scenario("evicted", (), (), why)
    everybody = range(place.n_slots + 1)
    return Scenario("evicted", tuple(two_turns), tuple(Ask((talk,)) for _ in range(2) for talk in everybody))


def _interleaved(systems: Sequence[str]) -> Scenario:
    """Lanes with a nonce at their very front, which must never get each other's rest, turn by turn in one another."""
    talks = tuple(Talk(system, (_QUESTIONS[0], _FOLLOW_UPS[0])) for system in systems)
    return Scenario("interleaved", talks, tuple(Ask((talk,)) for _ in range(2) for talk in range(len(talks))))


def _recall(text: str) -> Scenario:
    lines = text.split("\n")
    lines.insert(len(lines) // 3, f"The access code of vault seven is {CODE}.")
    asked = "What is the access code of vault seven? Answer with the number."
    talks = tuple(Talk("\n".join(lines), (question,)) for question in (_QUESTIONS[1], asked))
    return Scenario("recall", talks, (Ask((0,)), Ask((1,))))
