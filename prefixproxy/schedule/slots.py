"""The slot table of one upstream: who has which slot, what each slot is believed to hold, and what was measured.

    state     means                                   becomes
    IDLE      known idle                              LEASED, RESERVED, FOREIGN
    LEASED    one of our requests runs in it          IDLE (it ended by itself), DRAINING
    RESERVED  a warm-up, save or restore of ours      IDLE (answered), DRAINING (overdue)
    DRAINING  our side ended, the server's may not    IDLE (seen idle)
    FOREIGN   busy with a request that is not ours    IDLE (seen idle)

Only IDLE slots are granted, warmed, saved or restored: a pin to a busy slot corrupts the request that runs there
(get_available_slot in llama.cpp's server-context.cpp swaps the slot's content before anyone asks whether it is busy).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp2, inf
from operator import attrgetter

from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.census import Census
from prefixproxy.schedule.clearing import Clearing
from prefixproxy.schedule.counts import PrefixCounts
from prefixproxy.schedule.ram import HostCache
from prefixproxy.schedule.rates import Rates
from prefixproxy.schedule.slot import NOTHING, Cleared, Held, Settling, Slot, Work, left_over
from prefixproxy.schedule.strangers import Strangers
from prefixproxy.types import RootId, SlotId, SlotState, TicketId, UpstreamFacts

REUSE_CHANCE = 0.5
"""How likely what a slot holds is asked for again, right after it was used."""
REUSE_HALF_LIFE_S = 300.0
ROLLS_BACK_SHARE = 0.75
"""Slots that keep less than this share of a prefix when its tail has to go cannot be cut back."""
COPIES_S = 30.0
"""A slot that was busy for so long has decoded something."""
WARY_S = 600.0
"""So long after a foreign request was seen, no slot is pinned to without a look at it first."""
MOST_SLOTS = 1 << 20
"""Of one upstream, as slots are numbered."""


@dataclass(slots=True)
class Upstream:
    """One upstream's slots and what is known of it.

    `evicted`: something was overwritten since it came up, so a prefix that is in no slot may be in the server's own RAM
    cache. `haunted_until`: an unpinned request we gave up may still be on its way to any slot. `copies_until`: copies
    between slots may still be to come (`copies`), `draining_first` behind a request that may run on; `several`: those
    that may leave some when they end. `trying`: the running request that shows whether slots can forget a tail.
    `confirm`: an unpinned request waits until our pins were seen to have started. `foreign_at`: when a foreign request
    was seen last. `looked_at`: when the newest look that was heeded was asked for, `seen_at`: when its answer came;
    `polled_at`: when we asked for one. `wanted`: tickets wait. `version` grows with every change that may matter to who
    waits.
    """

    facts: UpstreamFacts
    number: int = 0
    census: Census = field(default_factory=Census)
    up: bool = False
    slots: list[Slot] = field(default_factory=list)
    rates: Rates = field(default_factory=Rates)
    counts: PrefixCounts = field(default_factory=PrefixCounts)
    settling: Settling | None = None
    foreign_until: float = -inf
    foreign_at: float = -inf
    evicted: bool = False
    trying: TicketId | None = None
    confirm: bool = False
    haunted_until: float = -inf
    copies_until: float = -inf
    draining_first: bool = False
    several: set[TicketId] = field(default_factory=set)
    cleared: Cleared = field(default_factory=Cleared)
    clearing: Clearing = field(default_factory=Clearing)
    strangers: Strangers = field(default_factory=Strangers)
    looked_at: float = -inf
    seen_at: float = -inf
    wanted: bool = False
    polled_at: float = -inf
    ram: HostCache = field(default_factory=HostCache)
    poll_soon: bool = False
    version: int = 0
    doubted: set[int] = field(default_factory=set)
    """Slots with a `doubt`."""
    _by_state: dict[SlotState, dict[int, Slot]] = field(default_factory=lambda: {state: {} for state in SlotState})

    def touch(self) -> None:
        """Something changed that may matter to who waits."""
        self.version += 1
        self.census.touch(self.number)

    def stir(self) -> None:
        """Something here has to be looked after."""
        self.census.restless.add(self.number)

    @property
    def name(self) -> str:
        return self.facts.name

    def kept_share(self, can_fork: bool) -> float:
        """The share of a prefix that stays when a slot forgets the tail behind it. Until that is measured one request
        at a time tries it out, where the others can have a copy restored instead; unless the probe found that little
        stays."""
        return self.rates.kept_share(self.facts.capabilities.rolls_back, can_fork and self.trying is not None)

    @property
    def observed(self) -> bool:
        """Whether slots are pinned to and watched at all; if not, they only count requests."""
        return self.facts.capabilities.pin and self.facts.capabilities.observe and not self.clearing.blind

    @property
    def rolls_back(self) -> bool:
        """Whether slots can be cut back, as far as that is known."""
        return self.kept_share(can_fork=False) >= ROLLS_BACK_SHARE

    @property
    def clears_idle(self) -> bool | None:
        """Whether a request that starts clears the idle slots; None if that is not known."""
        return self.clearing.seen_or(self.facts.capabilities.clears_idle)

    @property
    def turn_share(self) -> float:
        """The share of a prompt that stays when only the answer behind it has to go. Hoped to be all until one was
        measured: llama-server takes a checkpoint four tokens before the end where slots cannot be cut back."""
        return max(self.kept_share(can_fork=False), 1.0 if self.rates.turn_reuse is None else self.rates.turn_reuse)

    def unpinned_because(self, now: float) -> str:
        """ "" if requests may be pinned here now, else why not."""
        if not self.facts.capabilities.pin:
            return "the server takes no id_slot"
        if not self.facts.capabilities.observe:
            return "the server does not show its slots"
        if self.clears_idle:
            return "each request that starts clears the idle slots (start the server with -np)"
        return "another client uses this upstream" if now < self.foreign_until else ""

    def open(self, now: float, recalled: Mapping[int, Held]) -> None:
        """Come up with nothing known for certain: an observed slot is not idle until it was seen idle, and what is
        `recalled` of an earlier process's slots counts once a look has shown just as many tokens."""
        self.clearing, self.strangers = Clearing(blind=bool(self.facts.capabilities.clears_idle)), Strangers()
        state = SlotState.DRAINING if self.observed else SlotState.IDLE
        self._clear()
        first = self.number * MOST_SLOTS
        self.slots = [
            Slot(SlotId(self.name, i), state, now, started=True, number=first + i) for i in range(self.facts.n_slots)
        ]
        for slot in self.slots:
            self.suspect(slot, recalled.get(slot.id.slot))
            self._by_state[state][slot.id.slot] = slot
            self.census.open_slots += state in _OPEN
            self.census.note(slot)
        self.up, self.evicted, self.settling, self.poll_soon = True, False, None, self.observed
        self.touch()
        self.foreign_until, self.haunted_until, self.copies_until, self.looked_at = -inf, -inf, -inf, -inf
        has_ram = self.facts.capabilities.host_cache
        self.confirm, self.ram = False, HostCache(mib=self.facts.ram_mib, proven=bool(has_ram))
        if has_ram is False:
            self.ram.limit = 0

    def close(self) -> None:
        self.touch()
        self._clear()
        self.up, self.settling, self.trying = False, None, None

    def _clear(self) -> None:
        for slot in self.slots:
            self.census.promise(slot, None)
            self.census.note(slot)
            self.census.open_slots -= slot.state in _OPEN
        for rows in self._by_state.values():
            rows.clear()
        self.doubted.clear()
        self.several.clear()
        self.slots, self.counts = [], PrefixCounts()

    def slot(self, slot: SlotId) -> Slot | None:
        return self.slots[slot.slot] if 0 <= slot.slot < len(self.slots) else None

    def hold(self, slot: Slot, held: Held) -> None:
        """Believe from now on that `slot` holds `held`."""
        if held is not slot.held:
            self.touch()
            if held.chain is not slot.held.chain:
                self._count_anew(slot, held.chain)
            slot.held = held
        slot.dirty, slot.strange = slot.dirty or held.tokens > 0, 0
        self.census.note(slot)

    def _count_anew(self, slot: Slot, chain: PrefixChain) -> None:
        """Whoever is now alone with a block, or no longer, has another value."""
        who, before = slot.id.slot + 1, slot.held.chain
        start = before.common_blocks(chain)
        self.counts.remove(before, who, start)
        if self.census.noting:
            self._note_sole(before, start)
            self._note_sole(chain, start)
        self.counts.add(chain, who, start)

    def _note_sole(self, chain: PrefixChain, start: int = 0) -> None:
        sole = self.counts.sole(chain, start)
        if sole:
            self.census.note(self.slots[sole - 1])

    def add_saved(self, chain: PrefixChain, root: RootId, root_chain: PrefixChain) -> None:
        """The snapshot of a root holds it."""
        if self.census.noting:
            self._note_sole(chain)
            self.census.saved[self.number, root] = root_chain
        self.counts.add(chain)

    def remove_saved(self, chain: PrefixChain, root: RootId, root_chain: PrefixChain) -> None:
        self.counts.remove(chain)
        if self.census.noting:
            self._note_sole(chain)
            self.census.saved[self.number, root] = root_chain

    def suspect(self, slot: Slot, doubt: Held | None) -> None:
        """It may hold `doubt`, as long as no look has shown it."""
        slot.doubt = doubt
        if doubt is None:
            self.doubted.discard(slot.id.slot)
        else:
            self.doubted.add(slot.id.slot)

    def forget(self, slot: Slot, dirty: bool = True) -> None:
        self.hold(slot, NOTHING)
        self.suspect(slot, None)
        slot.dirty, slot.before = dirty, NOTHING
        slot.source, slot.warmed = None, False

    def lease(self, slot: Slot, ticket: TicketId, family: str, held: Held, uncached: int, now: float) -> None:
        """Give `slot` to a ticket; `held` is what it will hold when the prompt is evaluated."""
        self._note_eviction(slot, held)
        self.start(slot, held.chain)
        slot.before, slot.task = slot.held, None
        self.hold(slot, held)
        self.census.promise(slot, None)
        slot.ticket, slot.family, slot.started = ticket, family, False
        slot.first_token_at, slot.uncached, slot.source, slot.warmed = None, uncached, None, False
        self._move(slot, SlotState.LEASED, now)

    def start(self, slot: Slot, prompt: PrefixChain) -> None:
        """A prompt starts in it. The server's own cache is followed where it is counted on (`Prices.loaded`), or looked
        for (`Prices.places`)."""
        if not self.census.noting:
            self.ram.start(prompt, slot.held)
        for other in self.in_state(SlotState.IDLE) if self.clears_idle else ():
            if other is not slot:
                self.forget(other, dirty=False)

    def reserve(self, slot: Slot, work: Work, root: RootId | None, until: float, now: float) -> None:
        slot.work, slot.root, slot.until, slot.started, slot.ticket, slot.task = work, root, until, False, None, None
        self._move(slot, SlotState.RESERVED, now)

    def overwrite(self, slot: Slot, held: Held) -> None:
        """A warm-up or restore replaced what `slot` held."""
        self._note_eviction(slot, held)
        self.hold(slot, held)
        slot.source, slot.warmed = None, False

    def free(self, slot: Slot, now: float) -> None:
        slot.ticket, slot.work, slot.root, slot.until, slot.before = None, None, None, inf, NOTHING
        slot.last_used, slot.launches = now, self.ram.launches
        self._move(slot, SlotState.IDLE, now)

    def release(self, slot: Slot, ok: bool, now: float) -> None:
        """Its request ended by itself. Where somebody else's may have waited in the server for a slot to come free, it
        has this one now (server-queue.cpp pop_deferred_task): the slot is free once seen to be."""
        if not self.observed or not self.facts.shared or not (self.wary(now) or self.full or self.wanted):
            self.free(slot, now)
            return
        self.suspect(slot, slot.held if ok else None)
        self.drain(slot, now)
        slot.started = slot.ended = True

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return not self.has(SlotState.IDLE)

    def wary(self, now: float) -> bool:
        """Whether others were seen to use this upstream not long ago."""
        return self.facts.shared and now < self.foreign_at + WARY_S

    def stale(self, now: float) -> bool:
        """Whether a look is needed before anything is pinned here."""
        return self.observed and self.wary(now) and self.seen_at < now

    def drain(self, slot: Slot, now: float) -> None:
        self.census.promise(slot, None)
        slot.ticket, slot.work, slot.root, slot.until = None, None, None, inf
        self.poll_soon = True
        self._move(slot, SlotState.DRAINING, now)

    def foreign(self, slot: Slot, now: float, quiet_s: float) -> None:
        self.foreign_until, self.foreign_at = now + quiet_s, now
        if slot.state is not SlotState.FOREIGN:
            self.forget(slot)
            self.census.promise(slot, None)
            slot.started = True
            self._move(slot, SlotState.FOREIGN, now)

    def drained(self, slot: Slot, n_tokens: int | None, now: float) -> None:
        """A draining slot was seen idle, holding `n_tokens`."""
        if slot.doubt is None:
            ours = slot.held.tokens > 0
            self.hold(slot, left_over(slot, n_tokens))
            self.strangers.note(self.slots, slot, n_tokens, ours=ours)
        else:
            self.check(slot, n_tokens)
        slot.dirty = bool(n_tokens)  # llama-server shows no count for a slot that never ran anything
        self.free(slot, now)

    def check(self, slot: Slot, n_tokens: int | None) -> None:
        """An idle slot was seen to hold `n_tokens`: drop what we believed if it cannot be true."""
        doubt = slot.doubt
        self.suspect(slot, None)
        self.census.note(slot)
        if doubt is not None:
            known = n_tokens is not None
            if known and abs((n_tokens or 0) - doubt.tokens) <= 2:
                self.hold(slot, doubt)
            elif not known or abs((n_tokens or 0) - slot.held.tokens) > max(16, slot.held.tokens // 50):
                self.forget(slot)
        if n_tokens is None:
            if slot.counted:  # started anew, or slept
                self.forget(slot, dirty=False)
                slot.counted, self.evicted = False, False
            return
        slot.counted = True
        if n_tokens == 0:
            self.forget(slot, dirty=False)
        elif n_tokens < 0.9 * slot.held.prompt_tokens:
            self.forget(slot)
        slot.dirty = n_tokens > 0
        self.strangers.note(self.slots, slot, n_tokens, ours=doubt is not None)

    def remaining_s(self, slot: Slot, rate: float, now: float) -> float:
        """How long the request in a leased slot is expected to run on."""
        answer_s = self.rates.expected_answer_s
        if slot.first_token_at is None:
            return max(0.0, slot.uncached / rate - (now - slot.since)) + answer_s
        return max(answer_s - (now - slot.first_token_at), answer_s / 4)

    def lost_s(self, slot: Slot, kept_blocks: int, rate: float, now: float) -> float:
        """The value, in seconds of prefill, of what is lost where only the first `kept_blocks` blocks of an idle slot
        stay: what no other slot or snapshot has, times the chance that it is asked for."""
        held = slot.held
        kept = max(kept_blocks, self.counts.deepest(held.chain, holders=2))
        chance = REUSE_CHANCE * exp2((slot.last_used - now) / REUSE_HALF_LIFE_S)
        return max(0, held.tokens - held.tokens_at(kept)) / rate * chance

    def in_state(self, *states: SlotState) -> Sequence[Slot]:
        """In the order of their numbers."""
        found = [slot for state in states for slot in self._by_state[state].values()]
        return sorted(found, key=_number) if len(found) > 1 else found

    def has(self, state: SlotState) -> bool:
        """Whether any slot is in it."""
        return bool(self._by_state[state])

    def choosing(self, now: float) -> bool:
        """Whether the server may be about to put an unpinned request of ours into any idle slot, or a copy."""
        if self.settling is not None or now < self.haunted_until:
            return True
        return now < self.copies_until or (bool(self.several) and bool(self.unpinned_because(now)))

    def expect_copies(self, now: float, draining_first: bool) -> None:
        """From `now` on nothing is sent here before one token was decoded, or all this time has passed."""
        self.draining_first = draining_first or (self.draining_first and now < self.copies_until)
        self.copies_until, self.poll_soon = now + COPIES_S, True
        self.touch()

    def pins_confirmed(self, now: float) -> bool:
        """Whether all we pinned here was seen to have started; else an unpinned request could take its slot, and the
        pin would hit it there."""
        ours = self.in_state(SlotState.LEASED, SlotState.RESERVED)
        given_up = self.in_state(SlotState.DRAINING)
        return all(slot.started and slot.work in (None, Work.WARM) for slot in ours) and all(
            now >= slot.settled_at for slot in given_up
        )

    def _move(self, slot: Slot, state: SlotState, now: float) -> None:
        self.touch()
        self.census.note(slot)
        self.census.open_slots += (state in _OPEN) - (slot.state in _OPEN)
        del self._by_state[slot.state][slot.id.slot]
        self._by_state[state][slot.id.slot] = slot
        slot.state, slot.since, slot.turn, slot.ended = state, now, self.version, False

    def _note_eviction(self, slot: Slot, held: Held) -> None:
        if slot.held.tokens and not held.chain.extends(slot.held.chain):
            self.evicted = True


_OPEN = (SlotState.IDLE, SlotState.FOREIGN)  # a request could be sent there now
_number = attrgetter("number")
