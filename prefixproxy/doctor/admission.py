"""The context admission test: a prompt of n_ctx_slot - 256 tokens that asks for 512 must be answered.

It fails on an error, on a prompt that was cut, on an answer that breaks off at once, and on a loop. A model may loop by
itself: then it does so on a short prompt too, and it is not the context's fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefixproxy.doctor.findings import Finding, Severity, error, note, warning

HEADROOM_TOKENS = 256
ASKED_TOKENS = 512
CONTROL_TOKENS = 256
INSTANT_TOKENS = 8
"""An answer that is cut after so few tokens is no answer."""
_LONGEST_PERIOD = 48
_LOOP_REPEATS = 4
_LOOP_TOKENS = 64
_WHY = "A slot too small for its prompts does not fail loudly: it loops, breaks off, or answers as if it were dumb."
_CUT_WHY = "What was cut is gone without a word, usually the system prompt."


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of one prompt. `sent` tokens went out, `prompt_tokens` arrived; `cut`: it stopped because the slot was
    full. `pieces` the answer in tokens, or in words where the server tells none."""

    sent: int
    prompt_tokens: int | None = None
    predicted: int = 0
    cut: bool = False
    pieces: Sequence[object] = ()
    failure: str = ""


def loops(pieces: Sequence[object]) -> bool:
    """Whether an answer ends in repeating itself."""
    for period in range(1, _LONGEST_PERIOD + 1):
        span = max(_LOOP_REPEATS * period, _LOOP_TOKENS)
        tail = pieces[-span:]
        if len(tail) == span and all(a == b for a, b in zip(tail, tail[period:], strict=False)):
            return True
    return False


def admission_findings(answer: Answered, control: Answered | None, fix: str) -> list[Finding]:
    """`control`: the same question on a short prompt, asked only if the long one looped. `fix`: how to give a slot more
    context."""
    prompt = f"a prompt of {answer.sent:,} tokens that asks for {ASKED_TOKENS}"
    if answer.failure:
        return [error("admission-failed", f"{prompt} failed: {answer.failure}", _WHY, fix)]
    if answer.prompt_tokens is not None and answer.prompt_tokens < answer.sent:
        arrived = f"{prompt} was cut to {answer.prompt_tokens:,} tokens"
        return [error("admission-prompt-cut", arrived, _CUT_WHY, fix)]
    if answer.predicted <= INSTANT_TOKENS and answer.cut:
        broken_off = f"{prompt} got {answer.predicted} tokens, then its slot was full"
        return [error("admission-truncated", broken_off, _WHY, fix)]
    if loops(answer.pieces):
        return [_loop(prompt, control, fix)]
    end = f"{answer.predicted} tokens came" + (", then the slot was full, as it has to be" if answer.cut else "")
    return [note("admission", f"{prompt} was answered: {end}", "The context test passed.")]


def _loop(prompt: str, control: Answered | None, fix: str) -> Finding:
    if control is not None and loops(control.pieces):
        return warning(
            "admission-model-loops",
            f"the answer to {prompt} repeats itself, and so does that to {control.sent} tokens",
            "The model or its sampling loops whatever the context, so this test cannot tell anything about that.",
        )
    return error("admission-loop", f"the answer to {prompt} repeats itself", _WHY, fix)


def passed(findings: Sequence[Finding]) -> bool:
    return not any(finding.severity is Severity.ERROR for finding in findings)
