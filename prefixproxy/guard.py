"""Keeps prompts that no slot can take from waiting for one: counts them where they come near the limit.

A prompt is refused only on the server's own count of it. Everything that cannot be counted (images, several prompts in
one request, a server that does not say how long its slots are) is sent, and the server decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixproxy.backends import Backend
from prefixproxy.context import (
    HOPELESS_BYTES_PER_TOKEN,
    Calibration,
    ContextLimits,
    PartCounts,
    asked_tokens,
    counted_by_client,
    surely_fits,
    usable_generation,
)
from prefixproxy.errors import ContextLengthExceeded, ProxyError, Rejected
from prefixproxy.exchange import Exchange, sequences
from prefixproxy.fleet import Fleet
from prefixproxy.plan import Plan
from prefixproxy.stabilise.notes import count_tokens

INLINE_BYTES = 8192
"""So much text is estimated in place, in about 2 ms; more goes to a thread."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Room:
    """What there is for one prompt: the slots of the upstreams that may get it, and its tenant's limit (0: none)."""

    backend: Backend
    model: str
    largest: int | None
    smallest: int | None
    generation: int
    asked: int
    tenant_limit: int

    @property
    def undisputed(self) -> int:
        """Prompts up to this length fit wherever they go."""
        limits = [] if self.smallest is None else [self.smallest - self.generation]
        if self.tenant_limit:
            limits.append(self.tenant_limit - self.asked)
        return min(limits)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant's request may need; 0: no limit. `max_context` in tokens, prompt and asked answer together."""

    max_slots: int = 0
    max_context: int = 0


class ContextGuard:
    """`tenants`: those with limits of their own, by name."""

    def __init__(self, fleet: Fleet, limits: ContextLimits, tenants: Mapping[str, TenantLimits]) -> None:
        self._fleet = fleet
        self._limits = limits
        self._tenants = dict(tenants)
        self._calibration = Calibration()
        self._parts = PartCounts()

    async def check(self, exchange: Exchange) -> bool:
        """Raises ContextLengthExceeded, and Rejected for more answers at once than its tenant may have slots. False if
        it had to wait for a count, so that the plan may be out of date."""
        plan, tenant = exchange.planned(), self._tenants.get(exchange.tenant, TenantLimits())
        n_seqs = sequences(plan.body.data)
        if tenant.max_slots and n_seqs > tenant.max_slots:
            told = f"{n_seqs} answers need {n_seqs} slots; tenant {exchange.tenant} may use {tenant.max_slots}"
            raise Rejected(f"{told} (tenants.max_slots)", code="tenant_limit", status=400)
        room = self._room(exchange, plan)
        if room is None:
            return True
        parts = plan.canonical.parts if plan.canonical else ()
        if surely_fits(plan.chain.n_bytes, len(parts), room.undisputed):
            return True
        exchange.measured.model = room.model
        estimated_at_once = await self._estimate(exchange, parts, plan.chain.n_bytes, room)
        estimate = exchange.measured.estimate
        if estimate is not None and self._calibration.at_most(room.model, estimate) <= room.undisputed:
            return estimated_at_once
        await self._count(exchange, plan, room)
        if exchange.measured.exact is not None:
            self._judge(exchange, exchange.measured.exact, room)
        return False

    def learn(self, exchange: Exchange) -> None:
        """The server has told how long the prompt was."""
        measured, real = exchange.measured, exchange.usage.prompt_tokens
        if measured.estimate is not None and measured.exact is None and real:
            self._calibration.learn(measured.model, measured.estimate, real)

    def _room(self, exchange: Exchange, plan: Plan) -> _Room | None:
        """None if nothing limits it, or it cannot be counted."""
        tenant_limit = self._tenants.get(exchange.tenant, TenantLimits()).max_context
        serving = self._fleet.serving(str(plan.body.data.get("model") or ""), exchange.path)
        if not serving or plan.prompt is None or plan.prompt.multimodal:
            return None
        slots = [facts.n_ctx_slot for _, facts in serving if facts.n_ctx_slot is not None]
        known = len(slots) == len(serving)
        if not known and not tenant_limit:
            return None
        asked = asked_tokens(exchange.api, plan.body.data)
        backend, facts = max(serving, key=lambda each: each[1].n_ctx_slot or 0)
        return _Room(
            backend,
            facts.model,
            max(slots) if known else None,
            min(slots) if known else None,
            self._limits.generation(asked),
            asked or 0,
            tenant_limit,
        )

    async def _estimate(self, exchange: Exchange, parts: Sequence[bytes], n_bytes: int, room: _Room) -> bool:
        """False if that took a thread."""
        if not parts or n_bytes > HOPELESS_BYTES_PER_TOKEN * room.undisputed:
            return True
        unknown = self._parts.unknown(parts)
        in_place = sum(map(len, unknown)) <= INLINE_BYTES
        counts = _estimates(unknown) if in_place else await asyncio.to_thread(_estimates, unknown)
        self._parts.learn(unknown, counts)
        exchange.measured.estimate = self._parts.total(parts)
        return in_place

    async def _count(self, exchange: Exchange, plan: Plan, room: _Room) -> None:
        """The server's own count, if it can be had."""
        measured = exchange.measured
        measured.exact = counted_by_client(plan.body.data)
        if measured.exact is None:
            try:
                measured.exact = await room.backend.count_tokens(exchange.api, plan.body.data, plan.rendered())
            except (ProxyError, KeyError, TypeError, ValueError) as failure:
                log.debug("the prompt of %s was not counted: %s", exchange.id, failure)
        if measured.exact is not None and measured.estimate is not None:
            self._calibration.learn(room.model, measured.estimate, measured.exact)

    def _judge(self, exchange: Exchange, prompt_tokens: int, room: _Room) -> None:
        measured = exchange.measured
        measured.needs = prompt_tokens + room.generation
        known: dict[str, Any] = {} if room.largest is None else {"n_ctx_slot": room.largest}
        if room.tenant_limit and prompt_tokens + room.asked > room.tenant_limit:
            measured.exceeded = "tenant"
            raise ContextLengthExceeded(
                f"the prompt has {prompt_tokens} tokens and asks for {room.asked} more; tenant"
                f" {exchange.tenant} may use {room.tenant_limit} (tenants.max_context)",
                n_prompt_tokens=prompt_tokens,
                **known,
                max_context=room.tenant_limit,
            )
        if room.largest is None or measured.needs <= room.largest:
            return
        measured.exceeded, measured.needs = "slot", 0
        left = max(0, usable_generation(room.largest, prompt_tokens))
        told = (
            f"the prompt has {prompt_tokens} tokens, a slot {room.largest}: that leaves {left} for the answer, and"
            f" {room.generation} are needed (context.min_generation, or fewer if the request asks for fewer)"
        )
        if self._limits.reject:
            raise ContextLengthExceeded(told, n_prompt_tokens=prompt_tokens, n_ctx_slot=room.largest)
        log.warning("request %s is sent although it does not fit: %s", exchange.id, told)


def _estimates(parts: Sequence[bytes]) -> list[int]:
    return [count_tokens(part.decode("utf-8", "replace")) for part in parts]
