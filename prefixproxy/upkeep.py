"""Keeps each upstream's state true: probes it until it answers, looks at its slots, notices when it is gone.

Down upstreams are probed with a growing pause, which stays short while they load. Live ones are looked at every few
seconds: their slots while there was traffic lately (foreign requests and emptied slots show there), else only their
health, so that a server that sleeps when idle may go on sleeping (GET /slots wakes it, server-queue.cpp).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from prefixproxy.backends import Backend, SlotReading
from prefixproxy.context import ContextLimits
from prefixproxy.errors import ProxyError, UpstreamFailed, UpstreamLoading, UpstreamUnavailable
from prefixproxy.types import Capabilities, UpstreamFacts

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LOADING_PAUSE_S = 0.5
"""The longest while it says that it is loading: that ends by itself, with requests waiting for it."""
LOOK_EVERY_S = 3.0
TRAFFIC_MEMORY_S = 60.0
LOADING_GRACE_S = 10.0
"""How long a live server that says it is loading may take before requests are refused; its probes go on."""
READING_PAUSE_S = 0.01
"""Between two readings of the slots while something waits for one: a reading costs the server about 1 ms."""

CLEARS_IDLE = (
    "clears its idle slots whenever a request starts, so nothing is pinned, warmed or copied there: start it with -np "
    "and --no-kv-unified"
)

log = logging.getLogger(__name__)


class Health(StrEnum):
    """starting: not reached yet; loading: its process (re)starts or loads its model; lost: was up."""

    STARTING = "starting"
    LOADING = "loading"
    UP = "up"
    LOST = "lost"


@dataclass(slots=True)
class UpstreamState:
    """What upkeep knows of one upstream. `facts` are the last probe's, None before the first."""

    backend: Backend
    health: Health = Health.STARTING
    facts: UpstreamFacts | None = None
    failure: str = ""
    warning: str = ""
    """What is wrong with an upstream that serves all the same."""
    pause_s: float = FIRST_PAUSE_S
    used_at: float = float("-inf")
    back_by: float = float("-inf")
    restart_s: float = 0.0
    """Its process is started anew whenever it ends, and takes this long at the most; 0: nobody here starts it."""
    back_since: float | None = None
    loading_since: float = float("-inf")
    read_at: float = float("-inf")
    told_down: bool = False
    """The log has it: once for each time it is down, not for each probe that finds it so."""
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)
    read_now: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Listener:
    """Whom upkeep tells; each call is synchronous and changes the scheduler's belief at once."""

    up: Callable[[UpstreamFacts], None]
    lost: Callable[[str], None]
    not_coming: Callable[[], None]
    read: Callable[[str, Mapping[int, SlotReading], float], None]
    """With the moment at which the slots were asked for: the answer may be older than what happened since."""
    coming: Callable[[str], None] = lambda name: None
    """It is down, but loads its model."""


class Upkeep:
    """One upstream's keeper. `slots` and `snapshots` are the user's own settings for it (0: ask the server), `rank` its
    place among them; `owner` as in UpstreamFacts."""

    def __init__(
        self,
        state: UpstreamState,
        listener: Listener,
        clock: Callable[[], float],
        *,
        slots: int = 0,
        snapshots: bool = True,
        rank: int = 0,
        owner: str = "",
    ) -> None:
        self.state = state
        self._listener = listener
        self._clock = clock
        self._slots = slots
        self._snapshots = snapshots
        self._rank = rank
        self._owner = owner
        self.limits = ContextLimits()
        """What its slots must have; whoever builds it says so before `run`."""
        self.against_reuse: Callable[[UpstreamFacts], str] = lambda facts: ""
        """Why nothing may be reused on a server with these facts; whoever builds it says so before `run`."""
        self._short = ""
        self._said: object = None
        """What it said of itself at its last probe."""
        self._told_few = self._told_unread = False

    @property
    def can(self) -> Capabilities:
        """What its last probe found it able to do; nothing before the first."""
        return self.state.facts.capabilities if self.state.facts is not None else Capabilities()

    @property
    def reuse_off(self) -> str:
        """Why nothing is reused there; "" if it may be."""
        return self.state.facts.reuse_off if self.state.facts is not None else ""

    def reconsider(self) -> None:
        """Whether it may reuse anything is to be asked anew."""
        if self.state.facts is None:
            return
        before, self.state.facts = self.state.facts, self._judged(self.state.facts)
        if before.reuse_off != self.state.facts.reuse_off and self.state.health is Health.UP:
            self._listener.up(replace(self.state.facts, tried={}))

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_probed())
            group.create_task(self._keep_read())

    def used(self) -> None:
        """A request goes there now."""
        self.state.used_at = self._clock()

    def restarting(self, seconds: float) -> None:
        """Its process is being started by us; until then, requests wait for it instead of being refused."""
        self.state.back_by = self._clock() + seconds
        self.failed("its process is starting")

    def met(self, failure: ProxyError) -> None:
        """A request or a look came to this: a server that loads its model will be back soon."""
        if isinstance(failure, UpstreamLoading):
            self.restarting(LOADING_GRACE_S)
        else:
            self.failed(failure.message)

    def failed(self, why: str) -> None:
        """It was found gone."""
        if self.state.restart_s:
            self.state.back_by = self._clock() + self.state.restart_s
        if self.state.health is Health.UP:
            self._tell_down("is lost", why)
            self._listener.lost(self.state.backend.name)
        self._is_down(why, loading=False)
        self.state.pause_s = FIRST_PAUSE_S
        self.state.probe_now.set()

    def gone(self, why: str) -> None:
        """Its process has ended for good: no request waits for it any more."""
        self.state.back_by, self.state.restart_s = float("-inf"), 0.0
        self.failed(why)

    def read_soon(self) -> None:
        """Look at the slots shortly, once for however many ask."""
        self.state.read_now.set()

    async def _keep_probed(self) -> None:
        while True:
            if self.state.health is Health.UP:
                await self._wait(self.state.probe_now, LOOK_EVERY_S)
                self.state.probe_now.clear()
                await self._look()
            else:
                await self._probe()

    async def _probe(self) -> None:
        self.state.probe_now.clear()
        try:
            await self._find_out()
        except ProxyError as failure:
            await self._still_down(failure)

    async def _find_out(self) -> None:
        """Its facts, from now on believed. Raises ProxyError while it is not up, or must not serve."""
        facts = self._as_set(await self.state.backend.probe())
        said = await self.state.backend.health()
        self._require_context(facts)
        before, same = self.state.facts, self.state.health is Health.UP and _same_server(self.state.facts, facts)
        if not same:
            self.state.back_since = None if before is None else self._clock()
        self._said = said
        self.state.facts, self.state.failure, self.state.health = facts, "", Health.UP
        self.state.pause_s, self.state.back_by, self.state.told_down = FIRST_PAUSE_S, float("-inf"), False
        log.info("upstream %s is up: %s, %d slots", facts.name, facts.kind, facts.n_slots)
        if facts.capabilities.clears_idle and not (before and before.capabilities.clears_idle):
            log.warning("upstream %s %s", facts.name, CLEARS_IDLE)
        self._listener.up(facts)

    def _require_context(self, facts: UpstreamFacts) -> None:
        """Slots that are too small are told once. Raises UpstreamUnavailable where they must not serve."""
        short = self.limits.shortfall(facts)
        if short and short != self._short:
            log.warning("upstream %s: %s", facts.name, short)
            self.state.told_down = self.state.told_down or self.limits.reject
        self._short = short
        if short and self.limits.reject:
            self.state.warning, self.state.back_by = "", float("-inf")
            raise UpstreamUnavailable(short, retry_after_s=LONGEST_PAUSE_S)
        self.state.warning = short

    async def _still_down(self, failure: ProxyError) -> None:
        loading = isinstance(failure, UpstreamLoading)
        self._is_down(failure.message, loading=loading)
        longest = LOADING_PAUSE_S if loading else LONGEST_PAUSE_S
        await self._wait(self.state.probe_now, min(longest, self.state.pause_s))
        self.state.pause_s = min(longest, self.state.pause_s * 1.5)

    def _is_down(self, why: str, *, loading: bool) -> None:
        self.state.failure = why
        if loading or self._clock() < self.state.back_by:
            if self.state.health is not Health.LOADING:
                self.state.loading_since = self._clock()
            self.state.health = Health.LOADING
            self._listener.coming(self.state.backend.name)
        else:
            self.state.health = Health.STARTING if self.state.facts is None else Health.LOST
            self._tell_down("is not up", why)
            self._listener.not_coming()

    def _tell_down(self, what: str, why: str) -> None:
        if not self.state.told_down:
            log.warning("upstream %s (%s) %s: %s", self.state.backend.name, self.state.backend.url, what, why)
            self.state.told_down = True

    async def _look(self) -> None:
        """One round at a live upstream. One that says something else of itself was started anew with other settings,
        or has other models, between two looks: it is asked for everything again."""
        try:
            said = await self.state.backend.health()
            if said is not None and said != self._said and self.state.health is Health.UP:
                await self._find_out()
        except ProxyError as failure:
            self.met(failure)
            return
        if self._clock() - self.state.used_at < TRAFFIC_MEMORY_S and self.state.health is Health.UP:
            await self._read()

    async def _keep_read(self) -> None:
        while True:
            await self.state.read_now.wait()
            await asyncio.sleep(max(0.0, self.state.read_at + READING_PAUSE_S - self._clock()))
            self.state.read_now.clear()
            if self.state.health is Health.UP:
                await self._read()

    async def _read(self) -> None:
        if not self.can.observe:
            return
        asked_at = self.state.read_at = self._clock()
        try:
            reading = await self._reading()
        except ProxyError as failure:
            self.met(failure)
        else:
            if reading is not None:
                self._listener.read(self.state.backend.name, reading, asked_at)

    async def _reading(self) -> Mapping[int, SlotReading] | None:
        """None from a server that is alive all the same: an answer that is late or broken is no end of what runs
        there."""
        try:
            reading = await self.state.backend.slots()
        except UpstreamFailed as failure:
            await self.state.backend.health()
            if not self._told_unread:
                log.warning(
                    "upstream %s serves, but does not show its slots: %s", self.state.backend.name, failure.message
                )
            self._told_unread = True
            return None
        self._told_unread = False
        return reading

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    def _as_set(self, facts: UpstreamFacts) -> UpstreamFacts:
        """With what the user says of it. Slots that a server shows are as many as it says: a pin to one beyond them
        would hit another (llama-server takes ids modulo)."""
        capabilities, n_slots = facts.capabilities, self._slots or facts.n_slots
        if not self._snapshots:
            capabilities = replace(capabilities, snapshot=False)
        if capabilities.observe and n_slots > facts.n_slots:
            n_slots = facts.n_slots
            if not self._told_few:
                told = "upstream %s has %d slots, not %d (upstreams[].slots)"
                log.warning(told, facts.name, facts.n_slots, self._slots)
            self._told_few = True
        return self._judged(
            replace(facts, n_slots=n_slots, capabilities=capabilities, rank=self._rank, owner=self._owner)
        )

    def _judged(self, facts: UpstreamFacts) -> UpstreamFacts:
        """Only llama-server can be asked for no reuse."""
        off = self.against_reuse(facts) if facts.capabilities.native else ""
        if off and off != self.reuse_off:
            log.warning("upstream %s: reuse and forks are off: %s", facts.name, off)
        elif self.reuse_off and not off:
            log.info("upstream %s: reuse and forks are on again", facts.name)
        return replace(facts, reuse_off=off)


def _same_server(before: UpstreamFacts | None, now: UpstreamFacts) -> bool:
    """Whether it need not have been started anew to tell these facts."""
    if before is None:
        return False
    told = [(one.kind, one.model, one.build, one.n_slots, one.n_ctx_slot) for one in (before, now)]
    return told[0] == told[1]
