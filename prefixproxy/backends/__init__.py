"""What the rest of the proxy asks of an upstream: one interface, one adapter for each kind of server.

Only adapters know wire names and the HTTP client. They raise `errors.UpstreamUnavailable` (nothing was reached),
`errors.UpstreamFailed` (reached, but it answered nonsense or broke off); no foreign exception leaves them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prefixproxy.prompt import Edit
from prefixproxy.types import Api, SlotId, UpstreamFacts, Usage

RawHeaders = Sequence[tuple[bytes, bytes]]
Rendered = Callable[[Sequence[Edit]], bytes]
"""A planned body's bytes, with these edits too."""
NO_TASK = -1
"""The number of the newest task in a slot that never had one."""
NOT_YET = -1
"""Reused tokens of a prompt that the server has not looked at."""


@dataclass(frozen=True, slots=True)
class SlotReading:
    """One entry of a server's slot list: `n_tokens` in the slot, the number of the newest `task` in it (NO_TASK if none
    ever ran there), how many tokens of the prompt that runs there were `reused` (NOT_YET: to be told), and how many
    tokens of its answer were `sampled`; None where the server does not say."""

    busy: bool
    n_tokens: int | None
    task: int | None = None
    reused: int | None = None
    sampled: int | None = None


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A slot saved to or restored from a file: tokens in it, bytes of it, seconds it took (the server's own clock)."""

    n_tokens: int
    n_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WarmCost:
    """A root prefilled alone: the tokens the slot now holds, and what the server says that cost."""

    n_tokens: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that ended by itself, for the adapter to read what only its kind of server means by it.

    `body` is the client's; `last` the objects that carry counts, in the order they came; `usage` what these state on
    their face; `estimated_tokens` our own guess at the prompt; `alone`: no other request of ours ran beside it.
    """

    api: Api
    body: Mapping[str, Any]
    last: Sequence[dict[str, Any]]
    usage: Usage
    estimated_tokens: int
    alone: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """What an answer says: the counts as this server means them, and whether it evaluated only a part of the prompt."""

    usage: Usage
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of an answer in the server's own API, where the client's has fewer: `body` is what was sent there,
    `last` the objects that carry counts."""

    api: Api
    body: Mapping[str, Any]
    last: list[dict[str, Any]]


class UpstreamResponse(Protocol):
    """An answer whose head has come and whose body is still on the way. Close it, always."""

    status: int
    headers: RawHeaders

    @property
    def counted(self) -> Counted | None:
        """Known once the body has been read; None where the body itself tells all there is."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they come, undecoded. Raises UpstreamFailed when the upstream breaks off."""
        ...

    async def close(self) -> None:
        """End the exchange; an unread rest makes the upstream see a disconnect. Idempotent."""
        ...


class Backend(Protocol):
    """One upstream server."""

    name: str
    url: str
    marker: str
    """Names this proxy in the `via` header of every request, so that it knows one of its own when it comes back."""

    async def probe(self) -> UpstreamFacts:
        """What it is and can do. Raises UpstreamUnavailable while it is down, UpstreamLoading while it loads."""
        ...

    async def health(self) -> object:
        """Raises UpstreamUnavailable unless it is ready to serve. Never wakes a sleeping server. Returns what it says
        of itself: equal as long as a probe would find the same; None if it does not tell now."""
        ...

    async def open(
        self, method: str, target: str, headers: RawHeaders, body: bytes | AsyncIterator[bytes]
    ) -> UpstreamResponse:
        """Send one request (`target` is the raw path and query) and wait, without limit, for the answer's head."""
        ...

    async def slots(self) -> Mapping[int, SlotReading]:
        """The slot list as it stands now."""
        ...

    async def tokens(self, path: str, body: Mapping[str, Any]) -> list[int]:
        """The token ids the server would evaluate for `body` sent to `path`."""
        ...

    async def count_tokens(self, api: Api, body: Mapping[str, Any], sent: bytes) -> int | None:
        """How many tokens the server makes of a prompt, by its own count; None where it cannot be asked. `sent` is the
        body as it will go out."""
        ...

    async def warm(self, slot: SlotId, tokens: Sequence[int]) -> WarmCost:
        """Prefill `tokens` in an idle slot, so that it holds exactly these; for as long as the caller lets it."""
        ...

    async def decode_one(self, slot: SlotId | None) -> Usage:
        """Have one token evaluated in an idle slot, or in any, and what the slot held given up for it."""
        ...

    async def save(self, slot: SlotId, file: str) -> CopyResult: ...

    async def restore(self, slot: SlotId, file: str) -> CopyResult: ...

    def control(self, api: Api, body: Mapping[str, Any]) -> Sequence[Edit]:
        """What to change in the client's body for this kind of server, beside what the plan changes."""
        ...

    def shown(self, api: Api, path: str, body: Mapping[str, Any], rendered: Rendered) -> tuple[str, bytes]:
        """The path and the bytes that this kind of server would get for the client's body, of which `rendered` makes
        what was planned; nothing is noted."""
        ...

    def forwards(self, model: str) -> bool:
        """Whether it hands what is asked of `model` on to somebody else's machine: that takes none of its slots."""
        ...

    def interpret(self, answer: Answer) -> Reading:
        """What the counts of an answer mean here."""
        ...

    def report(self) -> Mapping[str, Any]:
        """What the status shows of it beside its facts, as it was last seen; JSON values."""
        ...

    async def close(self) -> None: ...
