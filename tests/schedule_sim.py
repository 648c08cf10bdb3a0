"""Virtual servers for tests of the scheduler: the simulator's own, with faults, and every effect remembered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

from prefixproxy.prefix import blocks_within
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import Effect, Policy, Ticket
from prefixproxy.simulate.run import Request, Simulation
from prefixproxy.simulate.server import VirtualServer
from prefixproxy.simulate.text import BYTES_PER_TOKEN, EMPTY, Text, Trie, span, starts_of
from prefixproxy.types import Capabilities, Priority, TicketId, UpstreamFacts

FULL = Capabilities(pin=True, observe=True, snapshot=True, warm=True, reports_cached=True, tokenize=True, template=True)
NO_SNAPSHOT = Capabilities(pin=True, observe=True, warm=True, reports_cached=True)
UNPINNED = Capabilities(reports_cached=True)


def words(name: str, n: int) -> Text:
    """`n` tokens that no other name shares."""
    return span(int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "little"), n)


def lower_bound(prompts: Iterable[Text]) -> int:
    """The least prompt tokens anyone can evaluate: distinct prefixes."""
    trie = Trie()
    for prompt in prompts:
        trie.add(prompt)
    return trie.tokens


@dataclass
class SimServer(VirtualServer):
    """A server whose restores fail, or have no effect."""

    restore_ok: bool = True
    restore_effect: bool = True

    def restore(self, slot: int, file: str, now: float) -> bool:
        super().restore(slot, file, now)
        if not (self.restore_ok and self.restore_effect):
            self.rows[slot].text = EMPTY
        return self.restore_ok


class Sim(Simulation):
    """Remembers every effect."""

    def __init__(
        self, servers: Sequence[VirtualServer], policy: Policy | None = None, scheduler: Scheduler | None = None
    ) -> None:
        self.effects: list[Effect] = []
        super().__init__(servers, policy, scheduler=scheduler)

    def apply(self, effects: Sequence[Effect]) -> None:
        self.effects += effects
        super().apply(effects)


def facts(name: str = "u", n_slots: int = 4, capabilities: Capabilities = FULL, **more: object) -> UpstreamFacts:
    return UpstreamFacts(name, "llama-server", n_slots, capabilities=capabilities, **more)  # type: ignore[arg-type]


_ids = count()


def request(
    root: Text,
    tail: Text,
    *,
    head: int | None = None,
    answer: int = 20,
    at: float = 0.0,
    timeout: float = 5_000.0,
    priority: Priority = Priority.INTERACTIVE,
    pinnable: bool = True,
    warmable: bool = True,
    side: bool = False,
    n_seqs: int = 1,
    wanted_slot: int | None = None,
    model: str = "",
    tenant: str = "",
) -> Request:
    """A request whose head is `root` (or its first `head` tokens)."""
    prompt = root + tail
    chain = prompt.chain()
    name = f"t{next(_ids)}"
    ticket = Ticket(
        TicketId(name),
        chain,
        blocks_within(BYTES_PER_TOKEN * (len(root) if head is None else head)),
        family=str(root.head(1)),
        n_tokens=len(prompt),
        arrived=at,
        deadline=at + timeout,
        model=model,
        tenant=tenant,
        priority=priority,
        side=side,
        wanted_slot=wanted_slot,
        pinnable=pinnable,
        warmable=warmable,
        n_seqs=n_seqs,
        starts=starts_of(chain, len(root) if head is None else head),
    )
    return Request(prompt, words(f"answer {name}", answer), ticket, len(root) if head is None else head)
