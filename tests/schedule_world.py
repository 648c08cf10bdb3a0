"""What the servers know, for testing the scheduler against: who is busy with what, and what is still on its way.

The servers here follow no policy: an unpinned request takes any idle slots, a request sent arrives when the test says
so, a cancelled one runs on until the test says otherwise, and looks at slots may arrive late and out of order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slots import COPIES_S
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
    SlotSeen,
    Ticket,
    Warm,
    WarmResult,
)
from prefixproxy.types import Capabilities, SlotId, SlotState, TicketId, UpstreamFacts

FULL = Capabilities(pin=True, observe=True, snapshot=True, warm=True, reports_cached=True, tokenize=True, template=True)
PIN = Capabilities(pin=True, observe=True, reports_cached=True)
COUNTED = Capabilities(reports_cached=True)
FACTS = {
    "full": UpstreamFacts("full", "llama-server", 3, model="m", capabilities=FULL, shared=True),
    "pin": UpstreamFacts("pin", "llama-server", 2, model="m", models=("pin-model",), capabilities=PIN),
    "counted": UpstreamFacts("counted", "ollama", 2, models=("counted-model",), capabilities=COUNTED),
}
ARRIVAL_S = 0.2
"""Whatever was sent has arrived after so long."""

Choose = Callable[[Sequence[int]], Sequence[int]]


@dataclass(eq=False)
class Sent:
    """One request at a server: on its way, busy in `slots`, or over. `abandoned`: nobody here waits for it any more;
    `over`: the server is done with it, and its last word on its way to us."""

    upstream: str
    pin: int | None
    at: float
    need: int = 1
    ticket: TicketId | None = None
    work: Warm | Save | Restore | Decode | None = None
    slots: list[int] = field(default_factory=list)
    arrived: bool = False
    abandoned: bool = False
    over: bool = False
    sampled: int = 0


@dataclass(frozen=True)
class Look:
    upstream: str
    asked: float
    seen: dict[int, SlotSeen]


class World:
    """A scheduler, the servers it works on, and the state of every ticket: waiting, granted, done, rejected, gone."""

    def __init__(self) -> None:
        self.s = Scheduler()
        self.policy = Policy()
        self.now = 100.0
        self.tickets: dict[TicketId, Ticket] = {}
        self.state: dict[TicketId, str] = {}
        self.up: set[str] = set()
        self.known: set[str] = set()
        """Those that ever were."""
        self.sent: list[Sent] = []
        self.foreign: dict[SlotId, bool] = {}
        """Slots busy with somebody else's request, and whether that can be known."""
        self.strangers: dict[str, int] = {}
        """How many of somebody else's requests wait in a server for a slot to come free."""
        self.content: dict[SlotId, int] = {}
        self.tasks: dict[SlotId, int] = {}
        self.n_tasks = 0
        self.looks: list[Look] = []
        self.asked: set[str] = set()
        self.broken = False
        self.haunted_until = 0.0
        self.uncopied: dict[str, float] = {}
        """Upstreams where several answers to a prompt ended, with nothing decoded since, and when they did."""
        self.had_several: set[str] = set()
        """Upstreams where they ever did."""

    # the servers

    def on(self, slot: SlotId, over: bool = False) -> list[Sent]:
        """What of ours keeps a slot busy; `over`: or did, and we do not know yet."""
        here = (s for s in self.sent if s.arrived and (over or not s.over))
        return [s for s in here if s.upstream == slot.upstream and slot.slot in s.slots]

    def busy(self, slot: SlotId) -> bool:
        return bool(self.on(slot)) or slot in self.foreign

    def check_pin(self, slot: SlotId, what: object) -> None:
        """S2. A foreign request that no look has shown yet cannot be known of."""
        assert not self.on(slot), f"{what} on {slot} where {self.on(slot)} runs"
        assert not self.foreign.get(slot, False), f"{what} on {slot}, known to be foreign"

    def read(self, name: str) -> dict[int, SlotSeen]:
        slots = [SlotId(name, i) for i in range(FACTS[name].n_slots)]
        return {slot.slot: self.seen(slot) for slot in slots}

    def seen(self, slot: SlotId) -> SlotSeen:
        sampled = max((sent.sampled for sent in self.on(slot)), default=0)
        return SlotSeen(self.busy(slot), self.content.get(slot, 0), self.task(slot), sampled)

    def task(self, slot: SlotId) -> int | None:
        """Not every server shows it."""
        return self.tasks.get(slot, -1) if FACTS[slot.upstream].capabilities.snapshot else None

    def take(self, slot: SlotId, foreign: bool | None = None) -> None:
        """A request gets into a slot; `foreign`: somebody else's, and whether that can be known."""
        self.n_tasks += 1
        self.tasks[slot] = self.n_tasks
        if foreign is not None:
            self.foreign[slot], self.content[slot] = foreign, 77

    def reach(self, sent: Sent, choose: Choose = list) -> None:
        """A pinned request must find its slot idle; an unpinned one takes any, or waits in the server."""
        if sent.pin is not None:
            self.check_pin(SlotId(sent.upstream, sent.pin), sent)
            sent.slots = [sent.pin]
        else:
            every = range(FACTS[sent.upstream].n_slots)
            idle = [i for i in every if not self.busy(SlotId(sent.upstream, i))]
            if len(idle) < sent.need:
                return
            sent.slots = list(choose(idle))[: sent.need]
        sent.arrived = True
        for slot in [SlotId(sent.upstream, i) for i in sent.slots]:
            if not isinstance(sent.work, Save | Restore):
                self.take(slot)
            if sent.ticket is not None:
                self.content[slot] = self.tickets[sent.ticket].n_tokens // 2

    def freed(self, sent: Sent) -> None:
        """A slot that comes free goes to whoever waits in the server, at once."""
        for slot in sent.slots if not sent.over else []:
            self.next_in(SlotId(sent.upstream, slot))

    def leave(self, slot: SlotId) -> None:
        """Somebody else's request is over."""
        del self.foreign[slot]
        self.next_in(slot)

    def next_in(self, slot: SlotId) -> None:
        if self.strangers.get(slot.upstream):
            self.strangers[slot.upstream] -= 1
            self.take(slot, foreign=True)

    def unlocated(self, name: str) -> bool:
        """Whether an unpinned request of ours is on its way to this upstream or in a slot that nobody has found."""
        found = {row.ticket for row in self.s.snapshot(self.now).slots}
        mine = [s for s in self.sent if s.upstream == name and s.pin is None and s.ticket]
        return any(not s.arrived or (not s.abandoned and s.ticket not in found) for s in mine)

    def answered(self, sent: Sent) -> None:
        """The server is done with it, and nobody here has heard of that. Of several slots the first alone keeps it."""
        assert sent.ticket is not None
        for slot in sent.slots:
            n_tokens = self.tickets[sent.ticket].n_tokens + 9
            self.content[SlotId(sent.upstream, slot)] = n_tokens if slot == sent.slots[0] else 0
        self.freed(sent)
        sent.over = True

    def end(self, sent: Sent, ok: bool = True, cached: int | None = None, predicted: int = 10) -> None:
        """The server's last word; told twice, as the second must be ignored (S4)."""
        assert sent.ticket is not None
        ticket = self.tickets[sent.ticket]
        self.sent.remove(sent)
        self.state[sent.ticket] = "done"
        if not sent.over:
            self.answered(sent)
        evaluated = None if cached is None else max(1, ticket.n_tokens - cached)
        finish = Finish(ok, cached, evaluated, predicted, 1.0)
        if not ok or predicted <= ticket.n_seqs:
            self.leave_copies(sent)
        self.do(self.s.finished(sent.ticket, finish, self.now))
        self.do(self.s.finished(sent.ticket, finish, self.now))

    def leave_copies(self, sent: Sent) -> None:
        if sent.ticket and self.tickets[sent.ticket].n_seqs > 1 and FACTS[sent.upstream].capabilities.pin:
            self.had_several.add(sent.upstream)
            if sent.arrived:
                self.uncopied[sent.upstream] = self.now

    def copied(self, sent: Sent) -> None:
        """Something was decoded, or nobody waits for that any longer."""
        if self.uncopied.get(sent.upstream, sent.at) <= sent.at:
            self.uncopied.pop(sent.upstream, None)

    def is_uncopied(self, upstream: str) -> bool:
        """A slot that was busy for long has decoded something."""
        return self.now < self.uncopied.get(upstream, -inf) + COPIES_S

    def answer(self, sent: Sent, ok: bool = True) -> None:
        """A warm-up, save, restore or decode is over."""
        self.sent.remove(sent)
        slot = SlotId(sent.upstream, sent.slots[0])
        match sent.work:
            case Warm(root=root):
                self.content[slot] = 1000
                self.do(self.s.warmed(root, WarmResult(ok, 1000 if ok else 0, 5.0, evaluated=1000), self.now, slot))
            case Save(root=root):
                self.do(self.s.saved(root, ok, 20_000_000, 0.05, self.now))
            case Restore(root=root, slot=target):
                self.content[slot] = 1000 if ok else 0
                self.do(self.s.restored(target, root, ok, 0.03, self.now))
            case Decode(slot=target):
                self.content[slot] = 1
                self.copied(sent)
                self.do(self.s.decoded(target, ok, self.now))

    def step(self, sent: Sent) -> None:
        """The usual next thing that happens to a request."""
        if sent.abandoned and sent.arrived:
            self.sent.remove(sent)
            self.freed(sent)
        elif not sent.arrived:
            self.reach(sent)
        elif sent.ticket:
            self.end(sent)
        else:
            self.answer(sent)

    def deliver(self, look: Look) -> None:
        """An answer to GET /slots."""
        if look.upstream not in self.up:
            return
        self.asked.discard(look.upstream)
        for slot in self.foreign:
            if slot.upstream == look.upstream and look.seen[slot.slot].busy:
                self.foreign[slot] = True
        self.do(self.s.slots_seen(look.upstream, look.seen, self.now, look.asked))

    def look_now(self, name: str) -> None:
        self.now += 0.001
        self.deliver(Look(name, self.now, self.read(name)))

    def lose(self, name: str) -> None:
        self.up.remove(name)
        self.asked.discard(name)
        lost = [s.ticket for s in self.sent if s.upstream == name and s.ticket and not s.abandoned]
        self.state.update(dict.fromkeys(lost, "done"))
        self.sent = [s for s in self.sent if s.upstream != name]
        self.strangers.pop(name, None)
        self.uncopied.pop(name, None)
        self.foreign = {slot: seen for slot, seen in self.foreign.items() if slot.upstream != name}
        self.content = {slot: n for slot, n in self.content.items() if slot.upstream != name}
        self.tasks = {slot: n for slot, n in self.tasks.items() if slot.upstream != name}
        self.looks = [look for look in self.looks if look.upstream != name]
        self.do(self.s.upstream_lost(name, self.now))
        for ticket in lost:
            self.do(self.s.finished(ticket, Finish(ok=False, confirmed_idle=False), self.now))

    def move_to(self, time: float) -> None:
        for sent in [s for s in self.sent if not s.arrived and s.at + ARRIVAL_S < time]:
            self.reach(sent)
        self.now = time
        self.do(self.s.tick(self.now))

    # effects

    def do(self, effects: list[Effect]) -> None:
        self.broken = True  # until all of them passed
        for effect in effects:
            match effect:
                case Grant():
                    self._granted(effect)
                case Reject():
                    assert self.state[effect.ticket_id] == "waiting", "S3: rejected after its end"
                    assert effect.retry_after_s > 0
                    self.state[effect.ticket_id] = "rejected"
                case Warm() | Save() | Restore() | Decode():
                    self._ordered(effect)
                case Poll():
                    assert effect.upstream in self.up
                    self.asked.add(effect.upstream)
                case Drop():
                    assert effect.file
        self.broken = False

    def _granted(self, grant: Grant) -> None:
        assert self.state[grant.ticket_id] == "waiting", "S3: granted twice, or after its end"
        assert grant.upstream in self.up
        self.state[grant.ticket_id] = "granted"
        ticket = self.tickets[grant.ticket_id]
        assert 0 <= grant.expected_cached < max(1, ticket.n_tokens)
        if grant.slot is not None:
            assert grant.slot.upstream == grant.upstream
            assert ticket.pinnable
            self.check_pin(grant.slot, grant)
        if FACTS[grant.upstream].capabilities.pin:
            assert not self._choosing(grant.upstream), "S2: granted while the server chooses a slot"
            assert not self.is_uncopied(grant.upstream), "S2: granted while copies between slots are to come"
            mine = [s for s in self.sent if s.upstream == grant.upstream and not s.abandoned]
            several = [s for s in mine if s.need > 1 and s.sampled < 2]
            assert grant.slot or not several, f"S2: unpinned while {several} may leave copies to be made"
            coming = [s for s in self.sent if s.upstream == grant.upstream and s.pin is not None and not s.arrived]
            assert grant.slot or not coming, f"S2: unpinned while {coming} could find its slot taken"
        pin = None if grant.slot is None else grant.slot.slot
        need = ticket.n_seqs if ticket.n_seqs <= FACTS[grant.upstream].n_slots else 1  # more is answered by an error
        self.sent.append(Sent(grant.upstream, pin, self.now, need, ticket.id))

    def _choosing(self, name: str) -> bool:
        """Whether an unpinned request of ours may still take any idle slot."""
        mine = [s for s in self.sent if s.upstream == name and not s.abandoned]
        return any(s.pin is None and not s.arrived for s in mine)

    def _ordered(self, effect: Warm | Save | Restore | Decode) -> None:
        slot, pinned = effect.slot, not isinstance(effect, Decode) or effect.pinned
        assert slot.upstream in self.up
        if pinned:
            self.check_pin(slot, effect)
        assert not self._choosing(slot.upstream), "S2: ordered while the server chooses a slot"
        if isinstance(effect, Decode):
            several = [s for s in self.sent if s.need > 1 and s.upstream == slot.upstream and s.arrived]
            assert not [s for s in several if s.abandoned and not s.over], "S2: decoded while a copy is still to come"
            coming = [s for s in self.sent if s.upstream == slot.upstream and s.pin is not None and not s.arrived]
            assert pinned or not coming, f"S2: decoded in any slot while {coming} could find its slot taken"
            return self._send(effect, pinned)
        assert not self.is_uncopied(slot.upstream), "S2: ordered while copies between slots are to come"
        if isinstance(effect, Warm):
            assert effect.tickets
        else:
            assert not set(effect.file) & set('/\\:*?"<>|')
        return self._send(effect)

    def _send(self, effect: Warm | Save | Restore | Decode, pinned: bool = True) -> None:
        self.sent.append(Sent(effect.slot.upstream, effect.slot.slot if pinned else None, self.now, work=effect))

    # views

    def those(self, state: str) -> list[TicketId]:
        return [ticket for ticket, its in self.state.items() if its == state]

    def observed(self) -> list[str]:
        return [name for name in sorted(self.up) if FACTS[name].capabilities.observe]

    def serving(self, ticket: Ticket) -> set[str]:
        """No two of these run the same model: one of them takes what nobody lists."""
        if named := {name for name in self.known if ticket.model in FACTS[name].models}:
            return named & self.up
        return {"full"} & self.up or set(sorted(self.up)[:1])

    def all_idle(self) -> bool:
        return all(row.state is SlotState.IDLE for row in self.s.snapshot(self.now).slots)

    def play_out(self) -> None:
        """Given servers that answer, everything comes to an end by itself, and not because its time is over."""
        self.foreign.clear()
        self.strangers.clear()
        for ticket in self.those("waiting"):
            self.tickets[ticket] = replace(self.tickets[ticket], deadline=self.now + 1e6)
            self.do(self.s.rekey(self.tickets[ticket], self.now))
        n_saves = 0
        for turn in range(500):
            if not self.those("waiting") and not self.sent and self.all_idle():
                return
            for sent in list(self.sent):
                n_saves += isinstance(sent.work, Save)
                self.step(sent)
            assert n_saves < 50, "saved again and again"
            for name in sorted(self.asked):
                self.look_now(name)
            wake = self.s.next_wake()
            if wake is None or turn > 100:  # ticks may come late
                wake = self.now + 5.0
            self.now = min(self.now + 5.0, max(self.now + 0.001, wake))
            self.do(self.s.tick(self.now))
        raise AssertionError(f"left over: {self.s} {self.sent} {self.s.snapshot(self.now).waiting}")
