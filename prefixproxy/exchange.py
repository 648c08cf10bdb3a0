"""One request on its way through: what it asked, where it stands, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import Scope

from prefixproxy.canary import Arm
from prefixproxy.context import Measured
from prefixproxy.identity import HEADERS
from prefixproxy.intake import OUR_HEADERS, header
from prefixproxy.lease import Lease
from prefixproxy.misses import Verdict
from prefixproxy.plan import Plan
from prefixproxy.prompt import Prompt, Role, holds_tokens
from prefixproxy.schedule.types import Ticket
from prefixproxy.types import Api, Outcome, Priority, TicketId, Usage
from prefixproxy.warming import Rendering

NO_SLOT = -1
_READ_TIMEOUTS = (b"x-stainless-read-timeout", b"x-stainless-timeout")
"""How SDKs tell the seconds without a byte after which they give up, and those for a whole answer."""
IN_TIME = 0.9
"""A client that will not wait longer than it says is told to come back after this part of it."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What the client told this proxy, and nobody else, in headers."""

    lane: str = ""
    priority: Priority = Priority.INTERACTIVE
    stabilise_off: bool = False
    read_timeout_s: float | None = None
    """How long the client waits for a byte, where it says so."""
    names: Mapping[bytes, str] = field(default_factory=dict)
    """What it calls this conversation, by header (`identity.HEADERS`)."""

    @classmethod
    def of(cls, scope: Scope) -> Hints:
        """Unknown values count as not given: a hint is never a reason to fail."""
        asked = header(scope, OUR_HEADERS + b"priority").lower()
        return cls(
            lane=header(scope, OUR_HEADERS + b"lane")[:200],
            priority=Priority.BATCH if asked == Priority.BATCH else Priority.INTERACTIVE,
            stabilise_off=header(scope, OUR_HEADERS + b"stabilise").lower() == "off",
            names={name: value for name in HEADERS if (value := header(scope, name))},
            read_timeout_s=_seconds(next(filter(None, (header(scope, name) for name in _READ_TIMEOUTS)), "")),
        )

    def longest_wait_s(self, limit_s: float, *, streaming: bool) -> float:
        """How long to let it queue, `limit_s` at the most: a client of a JSON answer hears nothing while it waits, and
        one that left cannot be told to come back."""
        if streaming or self.read_timeout_s is None:
            return limit_s
        return min(limit_s, IN_TIME * self.read_timeout_s)


def _seconds(text: str) -> float | None:
    """A positive number of seconds; None for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None


@dataclass(slots=True, eq=False)
class Times:
    """Monotonic seconds. `own_s` is what the proxy itself took, summed over its steps."""

    arrived: float
    first_token: float | None = None
    queue_s: float = 0.0
    own_s: float = 0.0


@dataclass(slots=True, eq=False)
class Exchange:
    """The state of one request; the relay that runs it is its only writer."""

    id: TicketId
    path: str
    api: Api
    hints: Hints
    tenant: str
    unix_time: float
    times: Times
    target: str = ""
    """The raw path and query to forward."""
    plan: Plan | None = None
    conversation: str = ""
    """The client's own name for it, if it gave one: a hint."""
    side: bool = False
    streaming: bool = False
    outcome: Outcome = Outcome.OK
    usage: Usage = field(default_factory=Usage)
    lease: Lease | None = None
    verdict: Verdict | None = None
    sent: float = 0.0
    reuse: bool = True
    """Whether it may be served from the cache, as the proxy is set."""
    arm: Arm | None = None
    reuse_off: bool = False
    measured: Measured = field(default_factory=Measured)
    truncated: bool = False
    """The upstream evaluated only a part of the prompt."""
    refused: str = ""
    """The code of the error it was refused with, before it reached an upstream."""

    def planned(self) -> Plan:
        if self.plan is None:
            raise RuntimeError("the request has not been planned yet")
        return self.plan


def client_streams(api: Api, data: dict[str, object]) -> bool:
    """Whether the client asked for a stream; Ollama's own paths stream unless told not to."""
    asked = data.get("stream")
    return api in (Api.OLLAMA_CHAT, Api.OLLAMA_GENERATE) if asked is None else bool(asked)


def wanted_slot(data: dict[str, object]) -> int | None:
    """The client's own `id_slot`. Anything but a whole number is ignored, as the server does (server-common.hpp,
    json_value), and so is a negative one."""
    slot = data.get("id_slot")
    return slot if isinstance(slot, int) and not isinstance(slot, bool) and slot >= 0 else None


def sequences(data: dict[str, object]) -> int:
    """How many slots answers were asked for in at once: `n`, for each prompt in the body. Several prompts with one
    answer each take turns in one slot."""
    n = data.get("n_cmpl", data.get("n", 1))
    return n * _prompts(data) if isinstance(n, int) and not isinstance(n, bool) and n > 1 else 1


def spoils_itself(data: dict[str, object]) -> bool:
    """Whether the server may put one prompt of the body into a slot that a copy of another one is still to come to
    (`schedule.copies`), over what is reused there."""
    return _prompts(data) > 1 and sequences(data) > 1


def _prompts(data: dict[str, object]) -> int:
    prompt = data.get("prompt")
    if not isinstance(prompt, list) or "messages" in data:
        return 1
    return 1 if holds_tokens(prompt) else max(1, len(prompt))


def ticket_of(exchange: Exchange, n_tokens: int, deadline: float, *, pinnable: bool) -> Ticket:
    """The exchange as the scheduler sees it."""
    plan = exchange.planned()
    prompt, data = plan.prompt, plan.body.data
    reuse = exchange.reuse and data.get("cache_prompt") is not False
    return Ticket(
        id=exchange.id,
        chain=plan.chain,
        head_blocks=plan.head_blocks,
        family=plan.family,
        n_tokens=n_tokens,
        arrived=exchange.times.arrived,
        deadline=deadline,
        model=str(data.get("model") or ""),
        path=exchange.path,
        tenant=exchange.tenant,
        priority=exchange.hints.priority,
        side=exchange.side,
        wanted_slot=wanted_slot(data) if pinnable else None,
        pinnable=pinnable,
        warmable=reuse and pinnable and exchange.api is Api.CHAT and prompt is not None and _has_head(prompt),
        n_seqs=sequences(data),
        needs_ctx=exchange.measured.needs,
        streams=exchange.streaming,
        reuse=reuse,
        starts=plan.starts,
        solid=plan.solid,
        form=plan.form,
    )


def _has_head(prompt: Prompt) -> bool:
    """Whether something can be left off behind a head."""
    return not prompt.multimodal and any(message.role is Role.USER for message in prompt.messages)


def rendering_of(exchange: Exchange) -> Rendering:
    plan = exchange.planned()
    return Rendering(exchange.path, plan.rendered(), plan.cut_at)
