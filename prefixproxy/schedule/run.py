"""A granted ticket from its start to its end: which slots it has, what was expected of it, what it taught us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prefixproxy.schedule import copies, work
from prefixproxy.schedule.plan import Server, is_truncated, kept_by_cut, shared, tokens_in
from prefixproxy.schedule.ram import MIN_FOUND_TOKENS, Loads, was_there
from prefixproxy.schedule.rates import MIN_RATE_TOKENS, mixed
from prefixproxy.schedule.roots import DELIVERED_SHARE, Root
from prefixproxy.schedule.slot import NOTHING, UNSTARTED_SETTLE_S, Held, Settling, Slot, cuts_of
from prefixproxy.schedule.turns import Charge
from prefixproxy.schedule.types import Effect, Finish, Ticket
from prefixproxy.types import SlotState

ESTIMATE_SLACK_TOKENS = 16
"""What was expected is an estimate: a block, or an eighth, less than it is as good."""
FEW_TOKENS = 128
"""Where a probe found that slots can be cut back, no fewer tokens than these that were expected and missing tell
otherwise: templates leave out parts of a prompt, such as tool calls, so it may share less than its bytes say."""
TRUNCATION_WEIGHT = 0.5
"""One bad truncation is enough to prefer a restore, two to expect little of any."""


@dataclass(slots=True)
class Running:
    """`slots`: empty while the server is still choosing. `expected`: tokens its slot was believed to share with it;
    `truncated`: by forgetting a tail first; `by_cut`: of `shares` tokens those before a checkpoint, `cuts` if that may
    be one at the start of a message, and if not; `answered`: all that its slot held, if that was the same prompt with
    an answer; `root`: restored for it; `warmed`: the root was warmed in its slot; `keeps`: the one of its several slots
    that keeps the prompt; `loads`: what the server should load for it from its own cache."""

    ticket: Ticket
    server: Server
    granted_at: float
    slots: list[Slot] = field(default_factory=list)
    need: int = 1
    expected: int = 0
    truncated: bool = False
    by_cut: bool = False
    cuts: tuple[int, int] = (0, 0)
    shares: int = 0
    answered: int = 0
    root: Root | None = None
    warmed: bool = False
    keeps: Slot | None = None
    loads: Loads | None = None
    pinned: bool = False
    charged: Charge | None = None
    started_at: float | None = None
    first_token_at: float | None = None

    def held_over(self, before: Held, n_tokens: int | None = None) -> Held:
        """What a slot that held `before` will hold when its prompt is evaluated. `n_tokens`: how many it has, the
        estimate if that is not known."""
        ticket, n_tokens = self.ticket, self.ticket.n_tokens if n_tokens is None else n_tokens
        held = Held(ticket.chain, n_tokens, n_tokens)
        if self.server.slots.rolls_back:
            return held
        return replace(held, cuts=cuts_of(ticket.chain, n_tokens, ticket.starts, before))

    def real(self, finish: Finish) -> float:
        """What the estimate of its tokens has to be multiplied with."""
        n_tokens = finish.prompt_tokens
        return n_tokens / self.ticket.n_tokens if n_tokens else 1.0

    def found(self, finish: Finish, slot: Slot) -> Held:
        """What it was evaluated over."""
        loads = self.loads
        return loads.held if loads is not None and was_there(loads.tokens, finish.cached_tokens or 0) else slot.before

    def left_by(self, finish: Finish, before: Held) -> Held:
        """What its slot keeps: prompt and answer, less the last sampled token, which is never decoded
        (server-context.cpp handle_last_sampled_token)."""
        held = self.held_over(before, finish.prompt_tokens)
        return replace(held, tokens=held.prompt_tokens + max(0, (finish.predicted_tokens or 0) - 1))

    @property
    def settling(self) -> Settling | None:
        """Set while the server is still choosing its slots."""
        settling = self.server.slots.settling
        return settling if settling is not None and settling.ticket == self.ticket.id else None

    def start(self, now: float, first_token: bool) -> None:
        """The server was seen to work on it, or gave its first token."""
        self.started_at = now if self.started_at is None else self.started_at
        if first_token and self.first_token_at is None:
            self.first_token_at = now
        self.server.slots.clearing.started(self.granted_at, now)
        self.server.slots.touch()
        for slot in self.slots:
            slot.started, slot.first_token_at = True, self.first_token_at
            if first_token:
                self.server.slots.census.note(slot)

    def settle_in(self, slots: Sequence[Slot], now: float) -> None:
        """The server chose these slots for it. Of several the oldest task has the prompt; the others get a copy of it,
        and are cleared when they end (server-context.cpp, release())."""
        self.server.slots.settling = None
        tasks = [slot.task for slot in slots if slot.task is not None]
        if len(tasks) == len(slots) > 1:
            self.keeps = next(slot for slot in slots if slot.task == min(tasks))
        held = self.held_over(NOTHING)
        for slot in slots:
            self.server.slots.lease(slot, self.ticket.id, self.ticket.family, held, self.ticket.n_tokens, now)
            slot.started, slot.first_token_at, slot.tenant = True, self.first_token_at, self.ticket.tenant
        self.slots = list(slots)

    def leaves_prompt(self, finish: Finish) -> bool:
        """Whether a slot of its own holds its prompt when it has ended; of several prompts nobody knows which."""
        return finish.ok and (self.need == 1 or self.ticket.reuse)

    def started_before(self, asked: float) -> bool:
        """Whether the server was known to work on it when a look was asked for."""
        return self.started_at is not None and asked > self.started_at

    @property
    def expected_cached(self) -> int:
        """What the client and the journal are told to expect."""
        if not self.truncated or self.by_cut:
            return self.expected
        return int(self.expected * self.server.slots.kept_share(can_fork=False))


def lease(
    server: Server, ticket: Ticket, slots: Sequence[Slot], pinned: bool, now: float, loads: Loads | None = None
) -> Running:
    """Give a ticket these idle slots; `loads`: what the server should have of it in its own cache."""
    first = slots[0]
    shares, blocks = shared(ticket, server, first.held)
    truncated = loads is None and is_truncated(ticket, server, first.held, blocks)
    by_cut = truncated and bool(first.held.cuts) and not server.slots.rolls_back
    expected, cuts = shares, (0, 0)
    if by_cut:
        cuts = _cuts_for(ticket, first.held, blocks)
        expected = cuts[0] if server.slots.rates.takes_starts else cuts[1]
    if loads is not None:
        expected = shares = loads.tokens
    server.slots.strangers.meet(ticket.form, len(server.slots.slots))
    running = Running(
        ticket,
        server,
        now,
        list(slots),
        need=len(slots),
        expected=expected,
        truncated=truncated,
        by_cut=by_cut,
        cuts=cuts,
        shares=shares,
        answered=first.held.tokens if loads is None and not truncated and first.held.answered else 0,
        root=None if first.source is None else server.roots.roots.get(first.source),
        warmed=first.promised == ticket.id and first.warmed,
        loads=loads,
        pinned=pinned,
    )
    if pinned and running.truncated and expected >= MIN_RATE_TOKENS and server.slots.trying is None:
        server.slots.trying = ticket.id
    if loads is not None:
        server.slots.ram.count_on(loads, ticket.id)
    for slot in slots:
        held = running.held_over(slot.held if loads is None else loads.held)
        server.slots.lease(slot, ticket.id, ticket.family, held, ticket.n_tokens - expected, now)
        slot.quiet = not (ticket.streams or server.slots.facts.capabilities.native)
        slot.tenant = ticket.tenant
    return running


def _cuts_for(ticket: Ticket, held: Held, blocks: int) -> tuple[int, int]:
    """See `Running.cuts`."""
    return kept_by_cut(ticket, held, blocks, starts=True), kept_by_cut(ticket, held, blocks, starts=False)


def settle(server: Server, ticket: Ticket, need: int, now: float, likely: Slot | None = None) -> Running:
    """Let the server choose `need` of its idle slots; one answer goes where most of its prompt is (`likely`)."""
    tasks = {slot.id.slot: slot.task for slot in server.slots.slots if slot.task is not None}
    server.slots.settling = Settling(ticket.id, need, now, tenant=ticket.tenant, before=tasks)
    server.slots.poll_soon = True
    server.slots.strangers.meet(ticket.form, len(server.slots.slots))
    server.slots.strangers.tries = max(0, server.slots.strangers.tries - 1)
    if ticket.n_seqs > 1:
        server.slots.several.add(ticket.id)
        server.slots.cleared.note(need - 1, now)
    server.slots.touch()
    expected, blocks = shared(ticket, server, likely.held) if likely is not None else (0, 0)
    truncated = likely is not None and blocks < len(likely.held.chain.hashes)
    return Running(ticket, server, now, need=need, expected=expected, truncated=truncated)


def end(running: Running, finish: Finish, now: float) -> None:
    """Take its slots back, each with what it holds now."""
    slots, settling = running.server.slots, running.settling
    slots.ram.learn(running.ticket.id, finish.cached_tokens if finish.ok else None)
    if slots.trying == running.ticket.id:
        slots.trying = None
    for slot in running.slots:
        if running.need > 1 and not (slot is running.keeps and running.leaves_prompt(finish)):
            slots.forget(slot, dirty=running.keeps in (None, slot))
        elif finish.ok:
            slots.hold(slot, running.left_by(finish, running.found(finish, slot)))
        elif finish.confirmed_idle or (not slots.observed and slot.first_token_at is None):
            slots.hold(slot, slot.before if not slot.started else slot.before.cut(_common(slot), 0))
            slots.poll_soon = slots.observed
        if finish.confirmed_idle:
            slots.release(slot, finish.ok, now)
        elif not slots.observed:
            slots.free(slot, now)
        else:
            slots.drain(slot, now)
    if settling is not None:
        _end_unseen(running, settling, finish, now)
    slots.several.discard(running.ticket.id)
    _ask_about_clearing(running, finish, now)
    if slots.observed and copies.may_be_left(running.ticket, finish):
        slots.expect_copies(now, draining_first=not finish.confirmed_idle)


def _ask_about_clearing(running: Running, finish: Finish, now: float) -> None:
    """It takes a look before a request starts, and one after it. A single slot is never idle then."""
    slots = running.server.slots
    if finish.ok:
        slots.clearing.started(running.granted_at, now)
    if slots.observed and slots.clears_idle is None and len(slots.slots) > 1:
        slots.poll_soon = True
        slots.stir()


def _end_unseen(running: Running, settling: Settling, finish: Finish, now: float) -> None:
    """It ended before anybody saw which slot the server gave it: it may have been any that is idle now."""
    slots = running.server.slots
    slots.settling, slots.poll_soon = None, True
    slots.touch()
    if running.started_at is None and not finish.confirmed_idle:
        slots.haunted_until = now + UNSTARTED_SETTLE_S
    for slot in slots.in_state(SlotState.FOREIGN, SlotState.DRAINING) if not finish.confirmed_idle else ():
        # it may have taken one that was idle by then: no look from before tells
        slot.since, slot.started = now, slot.started and running.started_at is not None
    left = running.left_by(finish, NOTHING)
    slots.ram.launches += 1
    for slot in list(slots.in_state(SlotState.IDLE)):
        slots.ram.displace(slot)
        slots.suspect(slot, left if running.leaves_prompt(finish) else NOTHING)
        slots.census.promise(slot, None)
        slot.task = None
        if slot.id in settling.seen_busy or not finish.confirmed_idle:
            slot.started = running.started_at is not None
            slots.drain(slot, now)


def _common(slot: Slot) -> int:
    return slot.before.chain.common_blocks(slot.held.chain)


def learn(running: Running, finish: Finish, now: float) -> None:
    """Rates of this upstream, from what the server reported of a whole answer."""
    rates = running.server.slots.rates
    if finish.evaluated_tokens is not None and finish.prompt_s is not None:
        rates.learn_prefill(finish.evaluated_tokens, finish.prompt_s)
    if finish.ok:
        rates.service_s = mixed(rates.service_s, now - running.granted_at)
        if running.first_token_at is not None:
            rates.answer_s = mixed(rates.answer_s, now - running.first_token_at)


def judge(running: Running, finish: Finish) -> list[Effect]:
    """Compare the reuse that was expected with the reported one, and mend the belief that was wrong."""
    server = running.server
    if not finish.ok or finish.cached_tokens is None:
        return []
    if not running.pinned:
        if finish.cached_tokens > running.expected + MIN_FOUND_TOKENS:
            server.slots.strangers.found(running.ticket.form, len(server.slots.slots))
        return []
    server.slots.ram.note_reuse(running.slots[0].before, running.expected, finish.cached_tokens)
    if running.expected < MIN_RATE_TOKENS:
        return []
    share = _found(finish.cached_tokens, running.expected)
    if running.root is not None:
        return _judge_copy(running, running.root, share)
    if running.by_cut and _is_of_cut(running, finish):
        _judge_cut(running, finish.cached_tokens, running.real(finish))
    elif running.truncated and not _is_estimate(running, finish.cached_tokens):
        share = min(1.0, finish.cached_tokens / max(1, running.shares)) if running.by_cut else share
        rates = server.slots.rates
        rates.truncated_reuse = mixed(rates.truncated_reuse, min(1.0, share), TRUNCATION_WEIGHT)
    elif finish.cached_tokens < running.answered:
        rates = server.slots.rates  # the answer had to be forgotten, as this prompt has it in other tokens
        known = 1.0 if rates.turn_reuse is None else rates.turn_reuse
        rates.turn_reuse = mixed(known, min(1.0, share), TRUNCATION_WEIGHT)
        server.slots.poll_soon = server.slots.poll_soon or share < DELIVERED_SHARE
    elif share < DELIVERED_SHARE:
        server.slots.poll_soon = True
    return []


def _is_of_cut(running: Running, finish: Finish) -> bool:
    """Whether no more was reused than a checkpoint explains: the expected one, or any other, as where they are is an
    estimate."""
    cached, real = finish.cached_tokens or 0, running.real(finish)
    return cached < running.expected * real + ESTIMATE_SLACK_TOKENS or _is_at_cut(running, cached, real)


def _is_at_cut(running: Running, cached: int, real: float) -> bool:
    """Whether so many tokens end at one of the checkpoints of its slot that lie in front of where the two differ."""
    ticket, before = running.ticket, running.slots[0].before
    blocks = ticket.chain.common_blocks(before.chain)
    cuts = (tokens_in(ticket, cut.n_bytes) * real for cut in before.cuts if cut.serves(ticket.chain, blocks))
    return any(abs(cut - cached) <= max(ESTIMATE_SLACK_TOKENS, cached // 8) for cut in cuts)


def _judge_cut(running: Running, cached: int, real: float) -> None:
    """Which checkpoint it came from, if any."""
    rates, (any_cut, end_cut) = running.server.slots.rates, (int(tokens * real) for tokens in running.cuts)
    if any_cut > end_cut:
        rates.start_reuse = mixed(rates.start_reuse, _found(cached, any_cut), TRUNCATION_WEIGHT)
    if end_cut < MIN_RATE_TOKENS or (any_cut > end_cut and rates.takes_starts):
        return
    share = _found(cached, end_cut)
    if share == 1.0 or not _is_at_cut(running, cached, real):  # an earlier one says that the last one lay too far back
        rates.cut_reuse = mixed(rates.cut_reuse, share, TRUNCATION_WEIGHT)


def _found(cached: int, expected: int) -> float:
    """The share of what was expected, as far as an estimate tells."""
    near = expected - max(ESTIMATE_SLACK_TOKENS, expected // 8)
    return 1.0 if cached >= near else cached / expected


def _is_estimate(running: Running, cached: int) -> bool:
    """Whether what is missing of the expected tokens may be due to the estimate."""
    proven = running.server.slots.facts.capabilities.rolls_back
    return bool(proven) and ESTIMATE_SLACK_TOKENS < running.expected - cached < FEW_TOKENS


def _judge_copy(running: Running, root: Root, share: float) -> list[Effect]:
    """The same of a restored file, of which `share` was reused."""
    server, snapshot = running.server, root.snapshot
    rates = server.slots.rates
    if running.truncated:
        rates.file_reuse = mixed(rates.file_reuse, min(1.0, share), TRUNCATION_WEIGHT)
    if snapshot is None or not snapshot.answered:
        return work.drop(server, root) if server.roots.judge(root, delivered=share >= DELIVERED_SHARE) else []
    if share >= DELIVERED_SHARE:
        return []
    if not running.truncated:  # the answer behind it had to be forgotten, as this prompt has it in other tokens
        rates.file_reuse = mixed(rates.file_reuse, min(1.0, share), TRUNCATION_WEIGHT)
    return work.drop(server, root)
