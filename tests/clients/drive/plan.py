"""What all drivers ask: a briefing with a clock in its first line, one tool, two questions for each session.

python DRIVER.py URL SESSION        # prints the answers it was given, as one JSON list in the last line
"""

from __future__ import annotations

import json
import sys

RULES = " ".join(f"Rule {n}: sheet {n} lies in drawer {n * 7 % 23}, scale one to {n}000." for n in range(60))
BRIEFING = f"You are the clerk of a map archive. {RULES}"


def url() -> str:
    return sys.argv[1]


def session() -> int:
    return int(sys.argv[2])


def clock(turn: int = 0) -> str:
    """The time as frameworks write it into a prompt: another one in each session, and where it is made anew each turn,
    in each turn."""
    return f"Current time: 2026-11-29 1{session()}:{turn:02d}:0{session()}"


def briefing(turn: int = 0) -> str:
    return f"{clock(turn)}\n{BRIEFING}"


def questions() -> list[str]:
    return [f"Session {session()}: where is sheet {n}, and what is its “Größe”?" for n in (session() * 10, 7)]


def lookup(sheet: int) -> str:
    """Looks up a sheet in the catalogue.

    Args:
        sheet: The number of the sheet.
    """
    return f"sheet {sheet}: drawer {sheet * 7 % 23}, “Größe” 1:{sheet}000"


LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks up a sheet in the catalogue.",
        "parameters": {
            "type": "object",
            "properties": {"sheet": {"type": "integer", "description": "The number of the sheet."}},
            "required": ["sheet"],
        },
    },
}


def tell(answers: list[str]) -> None:
    print(json.dumps(answers), flush=True)
