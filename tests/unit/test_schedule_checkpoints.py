"""Where memory cannot be cut back: which checkpoints of a slot are counted on, and what is learned of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_sim import FULL, NO_SNAPSHOT, Sim, SimServer, facts, request, words

from prefixproxy.prefix import blocks_within, bytes_of
from prefixproxy.schedule.fleet import Fleet
from prefixproxy.schedule.ram import Loads
from prefixproxy.schedule.run import Running, end, lease
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slot import BATCH_TOKENS, LAST_TOKENS, NOTHING, Cut, Held
from prefixproxy.schedule.types import Finish, Restore
from prefixproxy.simulate.run import Request
from prefixproxy.simulate.server import Checkpoints

RECURRENT = replace(NO_SNAPSHOT, rolls_back=False, host_cache=True)
IN_FRONT = LAST_TOKENS + BATCH_TOKENS


class WithoutStarts(SimServer):
    """Its template does not let it find where messages start."""

    def _checkpoints(self, before: Checkpoints, cached: int, n_tokens: int, head: int) -> Checkpoints:
        return super()._checkpoints(before, cached, n_tokens, 0)


def server_of(kind: type[SimServer] = SimServer, n_slots: int = 4) -> SimServer:
    told = facts(n_slots=n_slots, capabilities=RECURRENT, ram_mib=8192)
    return kind(told, rollback=False, ram_tokens=100_000)


def asked(sim: Sim, one: Request) -> Request:
    sim.submit(sim.now + 0.1, one)
    sim.run()
    assert one.ends == "ok"
    return one


def test_checkpoints_at_messages_are_not_counted_on_where_the_server_takes_none() -> None:
    """The one a batch before the end serves all the same, and is not taken for less than it is."""
    server = server_of(WithoutStarts)
    sim = Sim([server])
    found = [asked(sim, request(words("root", 700), words(f"{n}", 60), head=700, at=sim.now)).cached for n in range(5)]
    assert found == [0, *[760 - IN_FRONT] * 4]
    rates = sim.scheduler.servers["u"].slots.rates
    assert not rates.takes_starts
    assert rates.cut_reuse == 1.0


def test_they_are_where_it_does() -> None:
    sim = Sim([server_of()])
    found = [asked(sim, request(words("root", 700), words(f"{n}", 60), head=700, at=sim.now)).cached for n in range(5)]
    assert found == [0, *[700] * 4]
    assert sim.scheduler.servers["u"].slots.rates.takes_starts


@pytest.mark.parametrize("wrong", [0.6, 1.0, 1.6])
def test_where_one_lies_is_known_better_when_the_tokens_are_counted(wrong: float) -> None:
    """They were estimated when the prompt was sent."""
    fleet = Fleet()
    server = fleet.obtain(facts(capabilities=RECURRENT))
    server.slots.rates.truncated_reuse = 0.0
    ticket = request(words("root", 700), words("question", 60)).ticket
    running = Running(replace(ticket, n_tokens=int(760 * wrong)), server, 0.0)
    left = running.left_by(Finish(True, 0, 760, 11, 0.5), NOTHING)
    assert (left.prompt_tokens, left.tokens) == (760, 770)
    assert Cut(ticket.chain.n_bytes * (760 - IN_FRONT) // 760) in left.cuts


def tails(server: SimServer, shared: int) -> list[Request]:
    """Four prompts of 1,000 tokens that have so many in common, one after the other."""
    sim = Sim([server])
    prompts = [request(words("text", shared), words(f"tail {n}", 1000 - shared), head=0) for n in range(4)]
    return [asked(sim, replace(one, ticket=replace(one.ticket, arrived=sim.now))) for one in prompts]


def test_one_that_may_lie_a_few_bytes_before_the_difference_is_hoped_to() -> None:
    """Blocks do not tell more exactly what is shared."""
    shared, cut = 487, 1000 - IN_FRONT
    n_bytes = request(words("text", 1000), words("", 0)).ticket.chain.n_bytes
    assert bytes_of(blocks_within(n_bytes * shared // 1000)) < n_bytes * cut // 1000
    asked_for = tails(server_of(), shared)
    assert [one.cached for one in asked_for] == [0, cut, cut, cut]
    assert all(one.grant is not None and one.grant.expected_cached > 400 for one in asked_for[1:])


def test_of_slots_that_cost_the_same_that_with_most_of_the_prompt_is_taken() -> None:
    """As the server would. It keeps a copy of what is displaced, so an empty slot is worth no more."""
    asked_for = tails(server_of(), 460)
    assert [one.cached for one in asked_for] == [0, 0, 0, 0]
    assert len({one.slot for one in asked_for}) == 1


def test_a_miss_of_the_last_one_that_an_earlier_one_explains_says_nothing_of_checkpoints() -> None:
    """It lay a few bytes too far back."""
    s = Scheduler()
    s.upstream_up(facts(n_slots=1, capabilities=RECURRENT), 0.0)
    server = s._fleet.get("u")
    assert server is not None
    [slot] = server.slots.slots
    ticket = request(words("root", 700), words("question", 60)).ticket
    cuts = tuple(Cut(ticket.chain.n_bytes * n // 760) for n in (200, 600))
    before = Held(ticket.chain, 760, 770, cuts)
    slot.before = before
    running = Running(
        ticket, server, 0.0, [slot], expected=600, truncated=True, by_cut=True, cuts=(600, 600), pinned=True
    )
    for cached, reuse in ((200, None), (600, 1.0), (200, 1.0), (100, pytest.approx(1 - (1 - 100 / 600) / 2))):
        s._running[ticket.id] = running
        s.finished(ticket.id, Finish(True, cached, 760 - cached, 10, 0.5), 1.0)
        slot.before = before
        assert server.slots.rates.cut_reuse == reuse, cached


def test_a_cache_that_was_seen_serves_memory_that_can_be_cut_back_without_files() -> None:
    told = facts(n_slots=1, capabilities=replace(FULL, host_cache=True), ram_mib=8192)
    server = SimServer(told, ram_tokens=100_000)
    sim = Sim([server])
    history = words("history", 400)
    for turn in range(4):
        one = asked(sim, request(history, words(f"turn {turn}", 40), head=400, at=sim.now))
        history = one.prompt + one.answer
        asked(sim, request(words("health", 0), words("check", 90), head=0, answer=5, at=sim.now))
    assert server.evaluated <= len(history) + 90 + 2 * 4 * 20
    assert not any(isinstance(effect, Restore) for effect in sim.effects)


@pytest.mark.parametrize(("cached", "there"), [(396, True), (0, False)])
def test_what_the_server_loads_from_its_own_cache_brings_its_checkpoints(cached: int, there: bool) -> None:
    s = Scheduler()
    s.upstream_up(facts(n_slots=1, capabilities=RECURRENT), 0.0)
    server = s._fleet.get("u")
    assert server is not None
    server.slots.rates.truncated_reuse = 0.0
    [slot] = server.slots.slots
    server.slots.free(slot, 0.0)
    server.slots.hold(slot, Held(words("other", 300).chain(), 300, 320, (Cut(400),)))
    talk = words("talk", 400)
    entry = Held(talk.chain(), 400, 420, (Cut(800),))
    server.slots.ram.store(entry)
    ticket = request(talk, words("next", 60)).ticket
    running = lease(server, ticket, [slot], True, 1.0, Loads(entry, 400))
    assert Cut(800) in slot.held.cuts
    end(running, Finish(True, cached, 460 - cached, 10, 0.5), 2.0)
    assert (Cut(800) in slot.held.cuts) is there
    assert Cut(400) not in slot.held.cuts


def test_for_several_answers_a_file_is_restored_all_the_same() -> None:
    """The server chooses their slots, so nothing is loaded into the one that was thought of."""
    server = SimServer(facts(n_slots=3, capabilities=replace(FULL, host_cache=True), ram_mib=8192), ram_tokens=100_000)
    sim = Sim([server])
    talks = [words(f"talk {n}", 400) for n in range(4)]
    for talk in talks:
        asked(sim, request(talk, words("first", 40), head=400, at=sim.now))
    before = server.evaluated
    asked(sim, request(talks[0], words("second", 40), head=400, n_seqs=2, at=sim.now))
    assert any(isinstance(effect, Restore) for effect in sim.effects)
    assert server.evaluated - before <= 100
