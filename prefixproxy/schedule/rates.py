"""What an upstream was measured to do, as exponentially weighted means."""

from __future__ import annotations

from dataclasses import dataclass

EWMA_WEIGHT = 0.3
ASSUMED_COPY_S = 0.1
COPY_CALL_S = 0.002
"""What a save or restore costs beside its bytes: one small HTTP exchange."""
MIN_RATE_TOKENS = 32
"""Prompts that evaluate fewer tokens say more about overhead than about the prefill rate."""


@dataclass(slots=True)
class Rates:
    """What this upstream was measured to do, each an exponentially weighted mean; None until the first sample.

    `truncated_reuse`: the share of an expected prefix that was really reused where a slot had to forget a tail
    first. 1 for plain attention; recurrent and sliding-window models cannot roll back.
    """

    prefill: float | None = None
    answer_s: float | None = None
    service_s: float | None = None
    bytes_per_token: float | None = None
    restore_s_per_byte: float | None = None
    truncated_reuse: float | None = None

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        if tokens >= MIN_RATE_TOKENS and seconds > 0:
            self.prefill = mixed(self.prefill, tokens / seconds)

    def restore_s(self, n_bytes: int) -> float:
        """Expected seconds of one restore."""
        if self.restore_s_per_byte is None:
            return ASSUMED_COPY_S
        return COPY_CALL_S + self.restore_s_per_byte * n_bytes

    def copy_s(self, tokens: int) -> float:
        """Expected seconds of saving or restoring so many tokens. Until one was measured it is worth a try."""
        return COPY_CALL_S + (self.restore_s_per_byte or 0.0) * (self.bytes_per_token or 0.0) * tokens

    def learn_save(self, n_bytes: int, seconds: float) -> None:
        """Reading a file back takes no longer than writing it did: the best guess until one was read."""
        if self.restore_s_per_byte is None and n_bytes > 0 and seconds > 0:
            self.restore_s_per_byte = seconds / n_bytes


def mixed(mean: float | None, sample: float, weight: float = EWMA_WEIGHT) -> float:
    """The mean with one more sample in it."""
    return sample if mean is None else mean + weight * (sample - mean)
