"""The scheduler's shell: the only writer of it, the only place where its decisions meet sockets and time.

Every event is handed to the scheduler and the effects it returns are carried out before anything is awaited, so its
state and the world's agree at each await. Slow work (warm, save, restore, looking at slots) runs in tasks of one
TaskGroup and comes back as the next event. A request holds its slot through `lease`, which gives it back exactly once
on every way out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import assert_never

from prefixproxy.backends import Backend, SlotReading
from prefixproxy.errors import ProxyError, UpstreamFailed
from prefixproxy.fleet import Fleet
from prefixproxy.lease import CutShort, Lease, Waiting, Watch, rejection
from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import (
    Decode,
    Drop,
    Effect,
    Finish,
    Grant,
    Policy,
    Poll,
    Reject,
    Restore,
    Save,
    SchedulerSnapshot,
    SlotSeen,
    Ticket,
    Warm,
)
from prefixproxy.slotwork import SlotWork
from prefixproxy.types import TicketId, UpstreamFacts
from prefixproxy.upkeep import LOADING_GRACE_S, Health, Listener, Upkeep, UpstreamState
from prefixproxy.warming import Rendering

LOCATE_PAUSES_S = (0.003, 0.006, 0.012, 0.03)
"""Before each look for an unpinned request; the last one again and again. A short answer is over in milliseconds."""
ASSUMED_BYTES_PER_TOKEN = 4.0
RATE_WEIGHT = 0.2
SHORTEST_TICK_S = 0.001
LOST_GRACE_S = 5.0
"""How long the connections to a lost upstream have to say themselves that they are broken."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    waiting: Waiting
    ticket: Ticket
    since: float
    granted: asyncio.Future[Grant]


class Dispatcher:
    """Owns the scheduler. Use `running()` around everything else."""

    def __init__(
        self,
        scheduler: Scheduler,
        backends: Sequence[tuple[Backend, int, bool]],
        watch: Watch,
        clock: Callable[[], float],
        loading_wait_s: float = 300.0,
        address: str = "",
    ) -> None:
        """`backends`: each with the user's slot count (0: ask) and whether snapshots are allowed on it. `address`:
        where the proxy listens."""
        self._scheduler = scheduler
        self._watch = watch
        self._clock = clock
        listener = Listener(
            up=self._upstream_up,
            lost=self._upstream_lost,
            not_coming=lambda: self.fleet.tell_news(),
            read=self._slots_read,
            coming=self._upstream_coming,
        )
        self.keepers = {
            backend.name: Upkeep(
                UpstreamState(backend),
                listener,
                clock,
                slots=slots,
                snapshots=snapshots,
                rank=rank,
                owner=f"{address} {backend.url}",
            )
            for rank, (backend, slots, snapshots) in enumerate(backends)
        }
        self.fleet = Fleet(self.keepers, clock, loading_wait_s)
        self._work = SlotWork(watch, self.lost, self.fleet.model_of)
        self._entries: dict[TicketId, _Entry] = {}
        self._leases: dict[TicketId, Lease] = {}
        self._cut_short = CutShort()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._nudge = asyncio.Event()
        self._bytes_per_token = ASSUMED_BYTES_PER_TOKEN

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps upstreams probed and the scheduler's clock going; on leaving, every task has ended and every connection
        is closed."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for keeper in self.keepers.values():
                    self._spawn(keeper.run())
                self._spawn(self._keep_ticking())
                try:
                    yield
                finally:
                    for task in self._tasks:
                        task.cancel()
        finally:
            for keeper in self.keepers.values():
                await keeper.state.backend.close()

    @asynccontextmanager
    async def lease(self, waiting: Waiting) -> AsyncIterator[Lease]:
        """Waits for a slot, and gives it back on leaving, however that comes about.

        Raises Rejected (queue full, or waited too long) and UpstreamUnavailable; UpstreamFailed when its upstream was
        lost while it ran, and its connection only fell silent.
        """
        lease = await self._granted(waiting)
        try:
            async with asyncio.timeout(None) as lease.limit:
                yield lease
        except TimeoutError:
            if lease.limit is None or not lease.limit.expired():
                raise
            raise UpstreamFailed(f"upstream {lease.backend.name} is lost, and did not end its answer") from None
        finally:
            self._release(lease)

    def started(self, lease: Lease) -> None:
        """The server works on it: its response has a head."""
        self._apply(self._scheduler.started(lease.ticket.id, self._clock()))

    def first_token(self, lease: Lease) -> None:
        """Its prefill is over: what the slot holds can serve others."""
        self._apply(self._scheduler.first_token(lease.ticket.id, self._clock()))

    def refresh(self) -> None:
        """New evidence: the requests that wait may be stabilised differently now."""
        for entry in list(self._entries.values()):
            ticket = entry.waiting.ticket()
            if ticket != entry.ticket and not entry.granted.done():
                entry.ticket = ticket
                self._apply(self._scheduler.rekey(ticket, self._clock()))

    def estimate_tokens(self, chain: PrefixChain) -> int:
        """Prompt tokens by the bytes-per-token ratio that the servers' own counts have shown so far."""
        return max(1, round(chain.n_bytes / self._bytes_per_token))

    def snapshot(self) -> SchedulerSnapshot:
        return self._scheduler.snapshot(self._clock())

    def set_policy(self, policy: Policy) -> None:
        """Effective at once, for those that wait too, with the deadlines they have now."""
        self._apply(self._scheduler.set_policy(policy, self._clock()))
        for entry in list(self._entries.values()):
            deadline = entry.waiting.deadline()
            if deadline != entry.ticket.deadline and not entry.granted.done():
                entry.ticket = replace(entry.ticket, deadline=deadline)
                self._apply(self._scheduler.rekey(entry.ticket, self._clock()))

    def lost(self, backend: Backend, failure: ProxyError) -> None:
        """A request found this upstream gone."""
        self.keepers[backend.name].met(failure)

    def is_lost(self, backend: Backend) -> bool:
        """Whether it is known to be gone already."""
        return self.keepers[backend.name].state.health is not Health.UP

    def loading(self, backend: Backend) -> None:
        """A request was told that this upstream is loading its model: wait for it a little before saying no."""
        self.keepers[backend.name].restarting(LOADING_GRACE_S)

    # -- one request's way through the queue

    async def _granted(self, waiting: Waiting) -> Lease:
        ticket, since = waiting.ticket(), self._clock()
        if await self.fleet.until_served(ticket.model, ticket.path, ticket.deadline):
            ticket = waiting.ticket()  # which model answers is known by now, and what was seen meanwhile
        entry = _Entry(waiting, ticket, since, asyncio.get_running_loop().create_future())
        self._entries[ticket.id] = entry
        try:
            self._apply(self._scheduler.submit([ticket], self._clock()))
            grant = await entry.granted
        except BaseException:
            self._withdraw(entry)
            raise
        finally:
            del self._entries[ticket.id]
        return self._leases[grant.ticket_id]

    def _withdraw(self, entry: _Entry) -> None:
        """Cancelled while it waited; a grant that came in the same moment is given back unused."""
        if entry.granted.cancelled() or not entry.granted.done():
            self._apply(self._scheduler.cancel(entry.ticket.id, self._clock()))
        elif entry.granted.exception() is None:
            lease = self._leases[entry.ticket.id]
            lease.idle = True
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        del self._leases[lease.ticket.id]
        usage = lease.usage
        finish = Finish(
            ok=lease.ok and not lease.truncated,
            cached_tokens=usage.cached_tokens,
            evaluated_tokens=usage.evaluated_tokens,
            predicted_tokens=usage.predicted_tokens,
            prompt_s=None if usage.prompt_ms is None else usage.prompt_ms / 1e3,
            confirmed_idle=lease.idle,
        )
        self._learn_ratio(lease)
        if lease.had_no_effect:
            self._watch.no_effect(lease.backend.name, forked=lease.fork)
        self._cut_short.released(lease, self._clock())
        self._apply(self._scheduler.finished(lease.ticket.id, finish, self._clock()))

    def _learn_ratio(self, lease: Lease) -> None:
        if lease.ok and lease.usage.prompt_tokens and not lease.truncated:
            seen = lease.ticket.chain.n_bytes / lease.usage.prompt_tokens
            self._bytes_per_token += RATE_WEIGHT * (seen - self._bytes_per_token)

    # -- effects

    def _apply(self, effects: list[Effect]) -> None:
        """Carries out what the scheduler decided. No await beyond this point."""
        todo = deque(effects)
        while todo:
            todo.extend(self._carry_out(todo.popleft()))
        self._nudge.set()

    def _carry_out(self, effect: Effect) -> list[Effect]:
        match effect:
            case Grant():
                return self._grant(effect)
            case Reject():
                self._reject(effect)
            case Warm():
                lanes = [self._entries[i].waiting.rendering() for i in effect.tickets if i in self._entries]
                self._spawn(self._warm(effect, lanes))
            case Save():
                self._spawn(self._save(effect))
            case Restore():
                self._spawn(self._restore(effect))
            case Decode():
                self._spawn(self._decode(effect))
            case Poll():
                self.keepers[effect.upstream].read_soon()
            case Drop():
                log.debug("snapshot %s on %s is given up", effect.file, effect.upstream)
            case _:
                assert_never(effect)
        return []

    def _grant(self, grant: Grant) -> list[Effect]:
        entry, now = self._entries.get(grant.ticket_id), self._clock()
        if entry is None or entry.granted.done():
            return self._scheduler.finished(grant.ticket_id, Finish(ok=False, confirmed_idle=True), now)
        keeper = self.keepers[grant.upstream]
        keeper.used()
        lease = Lease(
            ticket=entry.ticket,
            backend=keeper.state.backend,
            slot=None if grant.slot is None else grant.slot.slot,
            expected_cached=grant.expected_cached,
            fork=grant.fork,
            reason=grant.reason,
            queued_s=now - entry.since,
            upstream_since=keeper.state.back_since,
            model=self.fleet.model_of(grant.upstream),
            native=keeper.can.native,
            reuse_off=keeper.reuse_off,
            reuses_unasked=keeper.state.facts is None or keeper.state.facts.reuses_unasked is not False,
        )
        lease.run_beside(self._leases.values())
        self._leases[grant.ticket_id] = lease
        entry.granted.set_result(grant)
        if grant.slot is None and keeper.can.observe:
            self._spawn(self._locate(lease))
        return []

    def _reject(self, reject: Reject) -> None:
        entry = self._entries.get(reject.ticket_id)
        if entry is None or entry.granted.done():
            return
        entry.granted.set_exception(rejection(reject))

    async def _warm(self, effect: Warm, lanes: Sequence[Rendering]) -> None:
        result = await self._work.warm(self.keepers[effect.slot.upstream].state.backend, effect, lanes)
        self._apply(self._scheduler.warmed(effect.root, result, self._clock(), effect.slot))

    async def _save(self, effect: Save) -> None:
        done = await self._work.save(self.keepers[effect.slot.upstream].state.backend, effect)
        n_bytes, seconds = (0, 0.0) if done is None else (done.n_bytes, done.seconds)
        self._apply(self._scheduler.saved(effect.root, done is not None, n_bytes, seconds, self._clock()))

    async def _restore(self, effect: Restore) -> None:
        done = await self._work.restore(self.keepers[effect.slot.upstream].state.backend, effect)
        seconds = 0.0 if done is None else done.seconds
        self._apply(self._scheduler.restored(effect.slot, effect.root, done is not None, seconds, self._clock()))

    async def _decode(self, effect: Decode) -> None:
        ok = await self._work.decode(self.keepers[effect.slot.upstream].state.backend, effect)
        self._apply(self._scheduler.decoded(effect.slot, ok, self._clock()))

    async def _locate(self, lease: Lease) -> None:
        """Looks until the scheduler knows which slot the server gave to an unpinned request, and what that reused."""
        pauses, found = chain(LOCATE_PAUSES_S, repeat(LOCATE_PAUSES_S[-1])), False
        while self._leases.get(lease.ticket.id) is lease and not found:
            await asyncio.sleep(next(pauses))
            asked_at = self._clock()
            try:
                reading = await lease.backend.slots()
            except ProxyError as failure:
                log.debug("looking for a slot on %s: %s", lease.backend.name, failure.message)
                continue
            self._slots_read(lease.backend.name, reading, asked_at)
            found = lease.look(reading)

    # -- upstreams and time

    def _upstream_up(self, facts: UpstreamFacts) -> None:
        for slot, usage in facts.tried.items():
            self._watch.tried(facts.name, facts.model, slot, usage)
        self.fleet.tell_news()
        self._end_by(facts.name, None)
        self._apply(self._scheduler.upstream_up(facts, self._clock()))

    def _upstream_coming(self, name: str) -> None:
        self.fleet.tell_news()
        self._apply(self._scheduler.upstream_lost(name, self._clock()))

    def _upstream_lost(self, name: str) -> None:
        self._cut_short.lost(name)
        self._end_by(name, asyncio.get_running_loop().time() + LOST_GRACE_S)
        self._apply(self._scheduler.upstream_lost(name, self._clock()))

    def _end_by(self, upstream: str, when: float | None) -> None:
        """What runs on a lost upstream ends, unless that comes back first: connections to a host that froze or lost its
        network stay open, and nobody else would ever end them."""
        for lease in self._leases.values():
            if lease.backend.name == upstream:
                lease.end_by(when)

    def _slots_read(self, upstream: str, reading: Mapping[int, SlotReading], asked_at: float) -> None:
        for lease, slot, cached, evaluated in self._cut_short.read(upstream, reading, asked_at):
            self._watch.cut_short(upstream, self.fleet.model_of(upstream), slot, lease.ticket.family, cached, evaluated)
        seen = {slot: SlotSeen(r.busy, r.n_tokens, r.task, r.sampled or 0) for slot, r in reading.items()}
        self._apply(self._scheduler.slots_seen(upstream, seen, self._clock(), asked_at))
        for lease in self._leases.values():
            if lease.slot is None and lease.backend.name == upstream:
                where = self._scheduler.slot_of(lease.ticket.id)
                lease.slot = None if where is None else where.slot

    async def _keep_ticking(self) -> None:
        while True:
            self._nudge.clear()
            wake = self._scheduler.next_wake()
            pause_s = None if wake is None else max(SHORTEST_TICK_S, wake - self._clock())
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._nudge.wait()
                    continue
            self._apply(self._scheduler.tick(self._clock()))

    def _spawn(self, job: Coroutine[object, object, None]) -> None:
        if self._group is None:
            raise RuntimeError("the dispatcher is not running")
        task = self._group.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
