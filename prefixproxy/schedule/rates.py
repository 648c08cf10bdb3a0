"""What an upstream was measured to do, as exponentially weighted means."""

from __future__ import annotations

from dataclasses import dataclass

EWMA_WEIGHT = 0.3
ASSUMED_COPY_S = 0.1
ASSUMED_ANSWER_S = 5.0
COPY_CALL_S = 0.002
"""What a save or restore costs beside its bytes: one small HTTP exchange."""
MIN_RATE_TOKENS = 32
"""Prompts that evaluate fewer tokens say more about overhead than about the prefill rate."""

UNPROVEN_SHARE = 0.5
"""What is hoped to stay of a prefix while the first slot that forgets a tail has not shown it yet."""
CHECKPOINT_SHARE = 0.25
"""The same where the probe found that slots cannot be cut back: the server takes checkpoints of a long prompt, at the
start of its messages and one batch before its end, which a probe is too short for."""
UNPROVEN_FILE_SHARE = 0.7
"""What is hoped to stay of a parked file that has to be cut back, where the probe did not tell that slots can be: of a
sliding window it may have the end alone."""
START_TAKEN_SHARE = 0.85
"""Where less was found of what lies in front of a user's message, the server takes no checkpoints there."""
Kept = tuple[float | None, float | None, float | None, float | None, float | None]

NOTHING_KEPT: Kept = (None, None, None, None, None)


@dataclass(slots=True)
class Rates:
    """What this upstream was measured to do, each an exponentially weighted mean; None until the first sample.

    `truncated_reuse`: the share of an expected prefix that was really reused where a slot had to forget a tail
    first. 1 for plain attention; recurrent and sliding-window models cannot roll back. `turn_reuse`: the same of a
    prompt that goes on from what the slot holds, less the answer; `cut_reuse`: where a checkpoint was expected;
    `start_reuse`: where that was at the start of a user's message, which not every template lets the server find;
    `file_reuse`: of a restored file that had to be cut back (of a sliding window it has the end alone).
    """

    prefill: float | None = None
    answer_s: float | None = None
    service_s: float | None = None
    bytes_per_token: float | None = None
    restore_s_per_byte: float | None = None
    truncated_reuse: float | None = None
    turn_reuse: float | None = None
    cut_reuse: float | None = None
    start_reuse: float | None = None
    file_reuse: float | None = None

    @property
    def kept(self) -> Kept:
        """What was seen to stay in slots."""
        return self.truncated_reuse, self.turn_reuse, self.cut_reuse, self.start_reuse, self.file_reuse

    @property
    def takes_starts(self) -> bool:
        """Whether the server takes checkpoints at the starts of messages, as far as that is known."""
        return self.start_reuse is None or self.start_reuse >= START_TAKEN_SHARE

    @property
    def expected_answer_s(self) -> float:
        """How long an answer is expected to take, from its first token on."""
        return ASSUMED_ANSWER_S if self.answer_s is None else self.answer_s

    def kept_share(self, rolls_back: bool | None, being_tried: bool) -> float:
        """What a slot keeps when it forgets a tail; `rolls_back`: as the probe found."""
        if self.truncated_reuse is not None:
            return self.truncated_reuse
        if rolls_back is False:
            return CHECKPOINT_SHARE
        return UNPROVEN_SHARE if being_tried else 1.0

    def cut_share(self, being_tried: bool) -> float:
        """The same of what is in front of a checkpoint."""
        if self.cut_reuse is not None:
            return self.cut_reuse
        return UNPROVEN_SHARE if being_tried else 1.0

    def file_share(self, parked: bool, rolls_back: bool | None) -> float:
        """The same of a restored file."""
        if self.file_reuse is not None:
            return self.file_reuse
        return UNPROVEN_FILE_SHARE if parked and not rolls_back else 1.0

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        if tokens >= MIN_RATE_TOKENS and seconds > 0:
            self.prefill = mixed(self.prefill, tokens / seconds)

    def restore_s(self, n_bytes: int) -> float:
        """Expected seconds of one restore."""
        if self.restore_s_per_byte is None:
            return ASSUMED_COPY_S
        return COPY_CALL_S + self.restore_s_per_byte * n_bytes

    def copy_s(self, tokens: int) -> float:
        """Expected seconds of saving or restoring so many tokens, before they are in a file. Until one was measured it
        is worth a try."""
        return COPY_CALL_S + (self.restore_s_per_byte or 0.0) * (self.bytes_per_token or 0.0) * tokens

    def learn_save(self, n_bytes: int, seconds: float) -> None:
        """Reading a file back takes no longer than writing it did: the best guess until one was read."""
        if self.restore_s_per_byte is None and n_bytes > 0 and seconds > 0:
            self.restore_s_per_byte = seconds / n_bytes


def mixed(mean: float | None, sample: float, weight: float = EWMA_WEIGHT) -> float:
    """The mean with one more sample in it."""
    return sample if mean is None else mean + weight * (sample - mean)
