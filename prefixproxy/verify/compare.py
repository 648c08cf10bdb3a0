"""Whether two answers to one prompt are the same but for noise: token by token, by their top log-probabilities.

A server sums in another order when it evaluates the same tokens in other pieces, and reuse is just that: most of the
prompt in one request, the rest in another. So the second run without reuse is cut elsewhere too: it is given the first
few tokens of the first run's answer as part of its prompt. What the two say of the rest differs by that noise alone
(quantised models on a CPU: 0.1 to 0.3 nats). Where the leading tokens are nearly as likely, noise may pick the other
one: from there on the texts go their own ways and say nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NOISE_FACTOR = 3.0
"""A difference this many times the largest noise that was measured is none of it."""
LEAST_LIMIT = 0.02
"""Nats. Few requests see little noise; a wrong prefix moves even a random model's log-probabilities by 0.2."""
MOST_NOISE = 1.0
"""Nats. A server whose own answers differ by more than this without reuse cannot be judged by them."""
CUT_TOKENS = 3
"""Tokens of the answer that the second run without reuse is given: blocks of rows, of any size, end elsewhere then."""
TOP = 10
"""Log-probabilities asked for at each token."""
NEAR_NATS = 3.0
"""Tokens this far behind the likeliest one count; the tail is all noise."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer, with the log-probability (nats) of it and its likeliest rivals, by token id."""

    id: int
    text: str
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. `cached` and `evaluated` are the server's cache_n and prompt_n. `complete`: every token is there.
    While its text ends inside a character the server tells none of a token's log-probabilities (server-context.cpp,
    process_token). The tokens up to there are in their places, as `text` says; where the others stand is not known."""

    text: str
    tokens: tuple[Token, ...]
    cached: int
    evaluated: int
    complete: bool = True

    @property
    def placed(self) -> int:
        """How many of the first tokens are the answer's first tokens, none left out."""
        said = ""
        for number, token in enumerate(() if self.complete else self.tokens):
            said += token.text
            if not self.text.startswith(said):
                return number
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Difference:
    """`nats`: the largest difference of a log-probability, at token `at` (from 0). `split`: where the texts part, None
    if they are equal."""

    nats: float
    at: int
    split: int | None


def answer_of(value: Mapping[str, Any]) -> Answer:
    """A chat completion of llama-server with `logprobs`. Raises ValueError in words where it is none."""
    try:
        choice, timings = value["choices"][0], value["timings"]
        entries = (choice.get("logprobs") or {}).get("content") or ()
        return _answer(str(choice["message"].get("content") or ""), (), entries, timings)
    except (KeyError, IndexError, TypeError, AttributeError) as failure:
        raise ValueError(f"this is no chat completion with timings ({failure!r})") from failure


def continued(start: Answer, n: int, value: Mapping[str, Any]) -> Answer:
    """An answer whose first `n` tokens were given, and the rest is this raw completion of llama-server with `n_probs`.
    Raises ValueError in words where it is none."""
    given = start.tokens[:n]
    try:
        entries, timings = value.get("completion_probabilities") or (), value["timings"]
        return _answer("".join(token.text for token in given) + str(value["content"]), given, entries, timings)
    except (KeyError, TypeError, AttributeError) as failure:
        raise ValueError(f"this is no completion with timings ({failure!r})") from failure


def _answer(text: str, given: tuple[Token, ...], entries: Sequence[Mapping[str, Any]], timings: Any) -> Answer:
    said = tuple(_token(entry) for entry in entries)
    complete = len(said) == int(timings["predicted_n"])
    text = "".join(token.text for token in (*given, *said)) if complete else text
    return Answer(text, (*given, *said), int(timings["cache_n"]), int(timings["prompt_n"]), complete)


def _token(entry: Mapping[str, Any]) -> Token:
    top = {int(one["id"]): float(one["logprob"]) for one in entry["top_logprobs"]}
    return Token(int(entry["id"]), str(entry["token"]), {**top, int(entry["id"]): float(entry["logprob"])})


def difference(one: Answer, other: Answer) -> Difference:
    """How far two answers are apart, up to the token where their texts part."""
    worst, at = 0.0, 0
    aligned, placed = one.complete and other.complete, min(one.placed, other.placed)
    for number, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a.id != b.id and number >= placed:
            return Difference(worst, at, number)
        nats = _apart(a.top, b.top)
        if nats > worst:
            worst, at = nats, number
        if a.id != b.id:
            return Difference(worst, at, number)
    ended = min(len(one.tokens), len(other.tokens))
    if len(one.tokens) == len(other.tokens) or not aligned:
        return Difference(worst, at, None)
    going_on = (one if len(one.tokens) > ended else other).tokens[ended]
    lead = _lead(going_on)
    return Difference(max(worst, lead), ended if lead > worst else at, ended)


def _apart(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    """The largest difference among the likely tokens; one that is listed on one side only is at most as likely as the
    last listed on the other."""
    bar = max(*a.values(), *b.values()) - NEAR_NATS
    floor_a, floor_b = min(a.values()), min(b.values())
    worst = 0.0
    for token in a.keys() | b.keys():
        in_a, in_b = a.get(token), b.get(token)
        if max(in_a if in_a is not None else in_b or 0.0, in_b if in_b is not None else in_a or 0.0) < bar:
            continue
        if in_a is None or in_b is None:
            known = in_b if in_a is None else in_a
            floor = floor_a if in_a is None else floor_b
            worst = max(worst, (known or 0.0) - floor)
        else:
            worst = max(worst, abs(in_a - in_b))
    return worst


def _lead(token: Token) -> float:
    """How much likelier the token was than its next rival: the end of the answer was no likelier than that."""
    rivals = [nats for other, nats in token.top.items() if other != token.id]
    return max(0.0, token.top[token.id] - max(rivals, default=token.top[token.id]))


def noise_of(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    """The largest difference between two runs without reuse, over all prompts."""
    return max((difference(one, other).nats for one, other in pairs), default=0.0)


def limit_of(noise: float) -> float:
    """The difference, in nats, that is none of the noise."""
    return max(LEAST_LIMIT, NOISE_FACTOR * noise)
