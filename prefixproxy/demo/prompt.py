"""The prompts of the demo: one long briefing that all lanes share, behind a first line that no two lanes share.

No chance and no clock: the same nonce gives the same text. The briefing is about nothing that exists, but reads like
the real thing: headings, rules with numbers in them, names that come back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BYTES_PER_TOKEN = 3.95
"""Of this text in SmolLM2's vocabulary, counted with /tokenize; other vocabularies differ by a tenth or so."""

MAX_TOKENS = 4
SEED = "harbour"

_PLACES = (
    "the north quay",
    "the cold store",
    "shed twelve",
    "the tank farm",
    "the customs yard",
    "the rail sidings",
    "the workshop",
    "the pilot station",
    "the container stack",
    "the fuel jetty",
)
_ROLES = (
    "the shift lead",
    "the duty officer",
    "the crane driver",
    "the yard planner",
    "the harbour pilot",
    "the customs clerk",
    "the safety engineer",
    "the night watch",
    "the electrician on call",
    "the weighbridge operator",
)
_THINGS = (
    "a reefer container",
    "a damaged seal",
    "an overdue pallet",
    "a leaking valve",
    "a late barge",
    "an unlabelled drum",
    "a power cut",
    "a missing manifest",
    "a blocked track",
    "a wind warning",
)
_DEEDS = (
    "writes it into the log book",
    "calls the control room",
    "closes the gate",
    "takes two photographs",
    "asks for a second signature",
    "moves the load to the spare berth",
    "switches to the reserve pump",
    "stops the belt",
    "informs the agent by telephone",
    "puts up the yellow sign",
)
_REASONS = (
    "because the insurer asks for it",
    "since the tide leaves no second chance",
    "as the sensors there are known to drift",
    "because two lorries met in the lane last winter",
    "since the next shift cannot see it otherwise",
    "as the contract names a penalty",
    "because the ground gives way after rain",
    "since the radio does not reach that corner",
)
_HEADINGS = (
    "Arrivals",
    "Cold chain",
    "Dangerous goods",
    "Cranes and wind",
    "Handover between shifts",
    "Customs",
    "Rail",
    "Fire and flood",
    "Reporting",
    "Visitors",
    "Maintenance",
    "Energy",
)
_QUESTIONS = (
    "Who closes the north gate?",
    "When is the belt stopped?",
    "Which load goes in first?",
    "What does the pilot check?",
    "How long may drums stand?",
    "Name the first safety rule.",
    "Where is the spare berth?",
    "Does the clerk take pictures?",
    "Must the planner sign twice?",
    "Is the cold store watched?",
)
"""About as long as each other, so that the lanes of a wave need the same."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One of the agents that start together. `run` tells one wave from the next; so does `question`, or a wave would
    find the questions of the wave before behind the root."""

    number: int
    of: int
    run: str
    clock: str
    question: int

    def first_line(self) -> str:
        return f"Current time: {self.clock}  Lane: {self.number} of {self.of}  Run: {self.run}"

    def body(self, briefing: str) -> dict[str, Any]:
        """Its chat request. `verbose` makes the server name the slot it used, which nothing else in the answer does."""
        return {
            "messages": [
                {"role": "system", "content": f"{self.first_line()}\n{briefing}"},
                {"role": "user", "content": _QUESTIONS[self.question % len(_QUESTIONS)]},
            ],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "verbose": True,
        }


def briefing(nonce: str, n_tokens: int) -> str:
    """About `n_tokens` of text. With another `nonce` it differs in its first line, so that no prefix is shared, and
    nowhere else, so that it costs the same."""
    wanted = n_tokens * BYTES_PER_TOKEN
    lines: list[str] = []
    size = 0.0
    for line in _lines(nonce):
        lines.append(line)
        size += len(line) + 1
        if size >= wanted:
            break
    return "\n".join(lines)


def _lines(nonce: str) -> Iterator[str]:
    dice = random.Random(SEED)
    yield f"Briefing for terminal {nonce}. You answer questions of the people who work there, in one or two sentences."
    yield "Use only the rules below. Where they are silent, say so and name the rule that comes closest."
    section = 0
    while True:
        section += 1
        yield f"\n## {section}. {_HEADINGS[(section - 1) % len(_HEADINGS)]}"
        for rule in range(1, dice.randint(4, 7)):
            yield f"{section}.{rule} {_rule(dice)}"


def _rule(dice: random.Random) -> str:
    place, role, other = dice.choice(_PLACES), *dice.sample(_ROLES, 2)
    first, second = dice.sample(_DEEDS, 2)
    one, another = dice.sample(_THINGS, 2)
    return dice.choice(
        (
            f"When {dice.choice(_THINGS)} turns up at {place}, {role} {first} within {dice.randint(2, 45)} minutes, "
            f"{dice.choice(_REASONS)}; after that {other} {second}.",
            f"At {place} no more than {dice.randint(2, 60)} units stand at once, {dice.choice(_REASONS)}. "
            f"Whoever counts more {first}, and {role} {second}.",
            f"Between {dice.randint(0, 11):02d}:00 and {dice.randint(12, 23):02d}:30 {role} checks {place} every "
            f"{dice.randint(10, 90)} minutes. Whoever finds {dice.choice(_THINGS)} there {first}.",
            f"If {one} and {another} come together, {role} {first} and {other} {second}, "
            f"in this order, {dice.choice(_REASONS)}.",
        )
    )
