"""Plays arrivals through a fleet: how long each waits, when its first token comes, what is evaluated in all."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from prefixproxy.prefix import blocks_within
from prefixproxy.schedule.types import Policy, Ticket
from prefixproxy.simulate.run import Request, Simulation
from prefixproxy.simulate.server import VirtualServer
from prefixproxy.simulate.text import BYTES_PER_TOKEN, Text, Trie, starts_of
from prefixproxy.types import DEFAULT_RAM_MIB, Capabilities, Priority, TicketId, UpstreamFacts

PolicyName = Literal["cost", "fifo"]
CAPABILITIES = Capabilities(
    pin=True,
    observe=True,
    snapshot=True,
    warm=True,
    reports_cached=True,
    tokenize=True,
    template=True,
    host_cache=True,
    clears_idle=False,
)
ASSUMED_PREFILL_RATE, ASSUMED_DECODE_RATE = 200.0, 50.0
COPY_CALL_S, SAVE_RATE, RESTORE_RATE = 0.002, 0.7e9, 1.9e9
"""Seconds of a call, and bytes per second to and from a tmpfs: 57 MB in 76 ms and 30 ms, as measured on two cores."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. `time` in seconds from its start. `head`: tokens of its system text and tools, 0 if not
    known. `after`: the request whose answer it carries: it never comes earlier than `think_s` after that answer.
    `awaited`: another one is `after` this."""

    time: float
    key: int
    prompt: Text
    answer: Text
    head: int = 0
    family: str = ""
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    side: bool = False
    after: int | None = None
    think_s: float = 0.0
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a trace is played on: `servers` of `slots` each. Rates are tokens per second: `prefill_rate` of a server,
    one prompt after the other, `decode_rate` of each slot."""

    slots: int
    servers: int = 1
    policy: PolicyName = "cost"
    prefill_rate: float = ASSUMED_PREFILL_RATE
    decode_rate: float = ASSUMED_DECODE_RATE
    kv_bytes: int = 50_000
    queue_limit: int = 256
    queue_timeout_s: float = 600.0
    side_slots: int = 0
    fork: bool = True
    root_threshold_s: float = 0.5


@dataclass(slots=True)
class Outcome:
    """What came of it. `waits` and `ttfts` in seconds from the arrival, of every request that was answered; `least`:
    the fewest tokens anybody could evaluate for these."""

    fleet: Fleet
    waits: array[float] = field(default_factory=lambda: array("d"))
    ttfts: array[float] = field(default_factory=lambda: array("d"))
    rejected: Counter[str] = field(default_factory=Counter)
    evaluated: int = 0
    least: int = 0
    span_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Tokens evaluated over the least possible."""
        return self.evaluated / self.least if self.least else 1.0


def play(arrivals: Iterable[Arrival], fleet: Fleet, tell: Callable[[int], None] | None = None) -> Outcome:
    """Play them all; they come in order of their time. `tell` hears how many have ended, now and then."""
    return _Play(iter(arrivals), fleet, tell).run()


class _Play:
    def __init__(self, arrivals: Iterator[Arrival], fleet: Fleet, tell: Callable[[int], None] | None) -> None:
        self._arrivals = arrivals
        self._fleet = fleet
        self._tell = tell
        self._out = Outcome(fleet)
        self._trie = Trie()
        self._ended: dict[int, float] = {}
        self._awaited: set[int] = set()
        self._parked: dict[int, list[Arrival]] = {}
        self._n_ended = 0
        policy = Policy(
            policy=fleet.policy,
            queue_limit=fleet.queue_limit,
            side_slots=fleet.side_slots,
            fork=fleet.fork,
            root_threshold_s=fleet.root_threshold_s,
        )
        self._sim = Simulation(_servers(fleet), policy, self._took)

    def run(self) -> Outcome:
        self._next()
        self._sim.run()
        broken = [each for server in self._sim.servers.values() for each in server.violations]
        if broken:
            raise AssertionError(f"the scheduler broke its first rule: {broken[0]}")
        self._out.evaluated = sum(server.evaluated for server in self._sim.servers.values())
        self._out.least = self._trie.tokens
        self._out.span_s = self._sim.now
        return self._out

    def _next(self) -> None:
        """Plan the next arrival; no more than one at a time, as there may be millions."""
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._sim.at(max(self._sim.now, arrival.time), self._comes, arrival)

    def _comes(self, arrival: Arrival) -> None:
        self._next()
        after = arrival.after
        if arrival.awaited:
            self._awaited.add(arrival.key)
        if after in self._awaited:
            self._parked.setdefault(after, []).append(arrival)
            return
        earliest = self._ended.get(after, 0.0) + arrival.think_s if after is not None else 0.0
        self._enter(arrival, max(self._sim.now, earliest))

    def _enter(self, arrival: Arrival, time: float) -> None:
        chain = arrival.prompt.chain()
        ticket = Ticket(
            id=TicketId(str(arrival.key)),
            chain=chain,
            head_blocks=blocks_within(BYTES_PER_TOKEN * arrival.head),
            family=arrival.family,
            n_tokens=len(arrival.prompt),
            arrived=time,
            deadline=time + self._fleet.queue_timeout_s,
            tenant=arrival.tenant,
            priority=arrival.priority,
            side=arrival.side,
            starts=starts_of(chain, arrival.head),
        )
        self._sim.submit(time, Request(arrival.prompt, arrival.answer, ticket, arrival.head))

    def _took(self, request: Request) -> None:
        """A request has ended; those that carry its answer may come."""
        arrived = request.ticket.arrived
        if request.ends == "ok":
            self._out.waits.append(request.granted_at - arrived)
            self._out.ttfts.append(request.first_token_at - arrived)
            self._trie.add(request.prompt)
        else:
            self._out.rejected[request.ends] += 1
        self._n_ended += 1
        if self._tell is not None and not self._n_ended % 256:
            self._tell(self._n_ended)
        key = int(request.ticket.id)
        if key in self._awaited:
            self._awaited.remove(key)
            self._ended[key] = self._sim.now
            for arrival in self._parked.pop(key, ()):
                self._enter(arrival, self._sim.now + arrival.think_s)


def _servers(fleet: Fleet) -> list[VirtualServer]:
    ram_tokens = (DEFAULT_RAM_MIB << 20) // fleet.kv_bytes
    return [
        VirtualServer(
            UpstreamFacts(
                f"server-{number}",
                "llama-server",
                fleet.slots,
                capabilities=CAPABILITIES,
                ram_mib=DEFAULT_RAM_MIB,
            ),
            rate=fleet.prefill_rate,
            decode_s=1.0 / fleet.decode_rate,
            ram_tokens=ram_tokens,
            kv_bytes=fleet.kv_bytes,
            save_s=COPY_CALL_S,
            restore_s=COPY_CALL_S,
            save_rate=SAVE_RATE,
            restore_rate=RESTORE_RATE,
        )
        for number in range(1, fleet.servers + 1)
    ]
