"""Which requests reuse prefixes: all, none, or in a canary those of a fixed part of the conversations.

A conversation stays in its arm from its first turn to its last, over restarts too: the arm is a digest of what never
changes in it (the client's name for it, else its first user message as the client wrote it, else its family).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Literal

from prefixproxy.body import json_bytes
from prefixproxy.types import PINNABLE, Api

_DIGEST_BYTES = 8


class Arm(StrEnum):
    """Journal field and label of a canary: `on` reuses, `off` does not."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class ReuseMode:
    """`[reuse]`. `fraction`: share of the conversations that a canary runs with reuse."""

    mode: Literal["on", "canary", "off"] = "on"
    fraction: float = 0.1

    def arm(self, api: Api, data: Mapping[str, Any], lane: str, family: str) -> Arm | None:
        """None outside a canary, and for requests that cannot take part: /v1/messages has no way to ask the server for
        no reuse (server-chat.cpp drops `cache_prompt`)."""
        if self.mode != "canary" or api not in PINNABLE:
            return None
        digest = blake2b(_identity(data, lane, family), digest_size=_DIGEST_BYTES).digest()
        share = int.from_bytes(digest, "big") / (1 << 8 * _DIGEST_BYTES)
        return Arm.ON if share < self.fraction else Arm.OFF

    def reuses(self, api: Api, arm: Arm | None) -> bool:
        """Whether a request may be served from the cache."""
        if api not in PINNABLE:
            return True
        return self.mode != "off" and arm is not Arm.OFF


def _identity(data: Mapping[str, Any], lane: str, family: str) -> bytes:
    if lane:
        return b"lane\0" + lane.encode("utf-8", "surrogatepass")
    messages = data.get("messages", data.get("input"))
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            return b"user\0" + json_bytes(message.get("content"))
    return b"family\0" + family.encode()
