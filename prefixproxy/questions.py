"""What the lanes of `bench` and `verify` ask about their briefing."""

from __future__ import annotations

from collections.abc import Callable

Brief = Callable[[str, int], str]
"""Text of so many tokens that differs in its first line for every nonce."""

QUESTIONS = (
    "Which step comes first when a seal is damaged?",
    "Name one place where a second signature is asked for.",
    "What does the night watch do about a power cut?",
    "Who is called when a drum has no label?",
    "When is the belt stopped?",
    "Where is the spare berth used?",
    "Who watches the cold store?",
    "What happens when two loads arrive together?",
)
FOLLOW_UP = "Which rule did you use for that?"
