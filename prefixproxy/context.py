"""Whether a prompt fits into a slot, and how its length is guessed: pure arithmetic, no counting of its own.

llama-server takes a prompt of at most `n_ctx_slot - 1` tokens and generates until prompt and answer fill the slot: to a
prompt of p tokens, n_ctx_slot - p tokens of answer can come (measured in tests/integration/test_context_guard.py). So
nothing has to be kept back: the margin is zero where the count is exact, and only exact counts refuse.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from prefixproxy.types import Api, UpstreamFacts

UNCALIBRATED = 2.0
"""How many real tokens one estimated token may be, before anything was compared."""
SLACK = 1.1
"""The same on top of the largest ratio seen lately: prompts differ."""
LOWEST_RATIO, HIGHEST_RATIO = 0.5, 4.0
"""Bounds of what is believed of one comparison."""
RATIOS_KEPT = 32
MAX_MODELS = 32
MAX_COUNTED_PARTS = 16_384
TEMPLATE_BYTES, TEMPLATE_BYTES_PER_PART = 512, 16
"""What a chat template adds to a prompt's own text, on the safe side; special tokens are single tokens."""
HOPELESS_BYTES_PER_TOKEN = 8
"""A prompt with more bytes than this for each token of room is not worth guessing at: it is counted exactly."""

_ANSWER_KEYS = ("max_completion_tokens", "max_tokens", "n_predict", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """`[context]`. `reject`: refuse what does not fit; else only warn."""

    min_n_ctx_slot: int = 0
    min_generation: int = 128
    reject: bool = True

    def shortfall(self, facts: UpstreamFacts) -> str:
        """What is wrong with an upstream whose slots are too small; "" if they are not, or do not say."""
        if facts.n_ctx_slot is None or facts.n_ctx_slot >= self.min_n_ctx_slot:
            return ""
        return (
            f"each of its {facts.n_slots} slots has {facts.n_ctx_slot} tokens of context,"
            f" context.min_n_ctx_slot asks for {self.min_n_ctx_slot}: raise -c, or lower -np"
        )

    def generation(self, asked: int | None) -> int:
        """The tokens of answer there must be room for: what is asked for, at most `min_generation`, at least one."""
        wanted = self.min_generation if asked is None else min(asked, self.min_generation)
        return max(1, wanted)


def usable_generation(n_ctx_slot: int, prompt_tokens: int) -> int:
    """The longest answer that a prompt of so many tokens leaves room for; 0 or less: the server refuses it."""
    return n_ctx_slot - prompt_tokens


def asked_tokens(api: Api, data: Mapping[str, Any]) -> int | None:
    """How long an answer the client asks for; None without a limit. Where several keys say it, the smallest counts:
    a request must never be refused for one that the server does not read."""
    if api in (Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE):
        options = data.get("options")
        given = [options.get("num_predict")] if isinstance(options, dict) else []
    else:
        given = [data.get(key) for key in _ANSWER_KEYS]
    counts = [n for n in given if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    return min(counts, default=None)


def counted_by_client(data: Mapping[str, Any]) -> int | None:
    """The tokens of a prompt that came as token ids; None for any other."""
    prompt = data.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(n, int) and not isinstance(n, bool) for n in prompt):
        return len(prompt)
    return None


def surely_fits(n_bytes: int, n_parts: int, room: int) -> bool:
    """Whether a prompt fits into `room` tokens whatever its tokenizer: no token is shorter than a byte."""
    return n_bytes + TEMPLATE_BYTES + TEMPLATE_BYTES_PER_PART * n_parts <= room


class Calibration:
    """How many tokens a model makes of one estimated token, by the server's own counts of the last prompts."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[str, deque[float]] = OrderedDict()

    def learn(self, model: str, estimate: int, real: int) -> None:
        if estimate <= 0 or real <= 0:
            return
        ratios = self._ratios.setdefault(model, deque(maxlen=RATIOS_KEPT))
        self._ratios.move_to_end(model)
        ratios.append(min(HIGHEST_RATIO, max(LOWEST_RATIO, real / estimate)))
        if len(self._ratios) > MAX_MODELS:
            self._ratios.popitem(last=False)

    def at_most(self, model: str, estimate: int) -> float:
        """Real tokens that an estimate may stand for, on the safe side."""
        ratios = self._ratios.get(model)
        return estimate * (max(ratios) * SLACK if ratios else UNCALIBRATED)


class PartCounts:
    """Estimated tokens of prompt parts, each counted once: a conversation's next turn costs only what is new in it."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def unknown(self, parts: Iterable[bytes]) -> list[bytes]:
        """The parts that were not counted yet."""
        return [part for part in parts if _key(part) not in self._counts]

    def learn(self, parts: Sequence[bytes], counts: Sequence[int]) -> None:
        for part, n_tokens in zip(parts, counts, strict=True):
            self._counts[_key(part)] = n_tokens
        while len(self._counts) > MAX_COUNTED_PARTS:
            self._counts.popitem(last=False)

    def total(self, parts: Iterable[bytes]) -> int | None:
        """The sum over all parts, None while one is unknown."""
        total = 0
        for part in parts:
            key = _key(part)
            n_tokens = self._counts.get(key)
            if n_tokens is None:
                return None
            self._counts.move_to_end(key)
            total += n_tokens
        return total


def _key(part: bytes) -> bytes:
    return blake2b(part, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Measured:
    """What was found out about one prompt's length. `model` as the upstream calls it. `needs`: tokens a slot must have
    for it, 0 where that was no question. `exceeded`: "slot" or "tenant" for the limit that it is over."""

    model: str = ""
    estimate: int | None = None
    exact: int | None = None
    needs: int = 0
    exceeded: str = ""
