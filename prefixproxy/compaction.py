"""What a long conversation costs if it goes on, and if it is compacted now: prompt tokens evaluated either way.

A turn of a conversation that kept its slot evaluates what is new in it. Compacting writes a summary in the place of the
history: the next turn evaluates all of that behind the root, once, and the turns after it cost what they did before. So
a compaction never pays by what the next turns cost. It pays when the window ends, and each time the conversation has to
be evaluated anew: after its slot went to another, on another upstream, and in every lane of a fan-out that cannot copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefixproxy.types import Kind, RequestRecord

LONG_TOKENS = 1024
"""Shorter conversations are not worth the question."""
TURNS_KEPT = 16
SUMMARY_SHARE = 5
"""A summary is taken to have one token for so many of the history, until this conversation shows otherwise."""
SMALLEST_SUMMARY = 128
FEW_TURNS = 3
AHEAD_TURNS = 10
_REWRITTEN = frozenset({Kind.COMPACTION, Kind.REWRITE})


@dataclass(frozen=True, slots=True)
class Way:
    """Prompt tokens evaluated on one way: by the next turn, by the next ten, and each time all has to be evaluated
    anew."""

    next_turn: int
    ten_turns: int
    anew: int


def turns_of(record: RequestRecord, get: Callable[[str], RequestRecord | None]) -> list[RequestRecord]:
    """This request and those it continues, the newest first, as far as the journal has them: back to where the
    conversation began or was rewritten."""
    turns = [record]
    while turns[-1].kind is Kind.CONTINUATION and len(turns) < TURNS_KEPT:
        before = get(turns[-1].reference)
        if before is None or before in turns:
            break
        turns.append(before)
    return turns


def price(
    turns: Sequence[RequestRecord], root_tokens: int | None, n_ctx_slot: int | None, min_generation: int
) -> dict[str, Any] | None:
    """The two ways, as JSON values; None for what is no long conversation. `turns`: see `turns_of`. `root_tokens`: what
    all of its family share, None if that is not known; `n_ctx_slot` None: no window is known."""
    record = turns[0]
    prompt, growth = record.prompt_tokens, _growth(turns)
    if prompt is None or prompt < LONG_TOKENS or growth is None or root_tokens is None:
        return None
    history = max(0, prompt - root_tokens)
    summary, measured = _summary(turns, root_tokens, history)
    left = None if n_ctx_slot is None else max(0, (n_ctx_slot - min_generation - prompt) // growth)
    on = Way(growth, AHEAD_TURNS * growth, prompt + growth)
    now = Way(summary + growth, summary + AHEAD_TURNS * growth, root_tokens + summary + growth)
    return {
        "turns_seen": len(turns),
        "growth_tokens": growth,
        "root_tokens": root_tokens,
        "history_tokens": history,
        "summary_tokens": summary,
        "summary_is": "measured" if measured else "assumed",
        "turns_left": left,
        "carry_on": asdict(on),
        "compact_now": asdict(now),
        "advice": _advice(on, now, left),
    }


def spike(turns: Sequence[RequestRecord]) -> int | None:
    """Tokens that a rewritten history had to evaluate anew; None for a request that rewrote none, or is not known."""
    record = turns[0]
    return record.prompt_n if record.kind in _REWRITTEN else None


def _growth(turns: Sequence[RequestRecord]) -> int | None:
    """Tokens that a turn adds, answer included, on average over the turns that are known; None of a single one."""
    sizes = [turn.prompt_tokens for turn in turns if turn.prompt_tokens is not None]
    if len(sizes) < 2 or sizes[0] <= sizes[-1]:
        return None
    return max(1, round((sizes[0] - sizes[-1]) / (len(sizes) - 1)))


def _summary(turns: Sequence[RequestRecord], root_tokens: int, history: int) -> tuple[int, bool]:
    """What a compaction leaves of the history: as the last one of this conversation did, else a share of it."""
    last = turns[-1]
    if last.kind is Kind.COMPACTION and last.prompt_tokens is not None and last.prompt_tokens > root_tokens:
        return last.prompt_tokens - root_tokens, True
    return min(history, max(SMALLEST_SUMMARY, history // SUMMARY_SHARE)), False


def _advice(on: Way, now: Way, left: int | None) -> str:
    """One sentence."""
    spared = on.anew - now.anew
    when = "at a boundary between tasks, and before a fan-out rather than in the middle of one"
    if left is not None and left <= FEW_TURNS:
        return f"Compact now: about {left} more turns fit into the slot."
    if spared <= 0:
        return "Carry on: a summary would be as long as the history it replaces."
    costs = now.next_turn - on.next_turn
    return (
        f"Carry on while it keeps its slot: compacting costs {costs:,} tokens more now, and spares {spared:,} "
        f"each time everything has to be evaluated anew. If you compact, do it {when}."
    )
