"""What slots held before a restart of the proxy is believed only where the server shows as much."""

from __future__ import annotations

import pytest
from schedule_sim import Sim, SimServer, request, words
from schedule_sim import facts as sim_facts

from prefixproxy.keeping import SlotRows
from prefixproxy.prefix import chain_of
from prefixproxy.schedule.memory import Recalled, residency, snapshots
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slot import NOTHING, Held
from prefixproxy.schedule.types import Effect, Grant, Reason, Restore, SlotSeen, Ticket, Warm
from prefixproxy.simulate.text import EMPTY, Text
from prefixproxy.types import Capabilities, SlotId, TicketId, UpstreamFacts

ALL = Capabilities(pin=True, observe=True, snapshot=True, warm=True, reports_cached=True, tokenize=True, template=True)
FACTS = UpstreamFacts(name="local", kind="llama-server", n_slots=2, model="m", build="b1", capabilities=ALL)
PROMPT = b"rules of the archive " * 40
N_TOKENS = len(PROMPT) // 4
HELD = Held(chain_of([PROMPT]), N_TOKENS, N_TOKENS + 7)


def mark() -> str:
    """The mark a scheduler gives to what it holds on this upstream."""
    s = Scheduler()
    s.upstream_up(FACTS, 0.0)
    return next(mark for _, mark, _ in residency(s.servers.values()))


def granted(seen_tokens: int, recalled_mark: str) -> Grant:
    """Where a prompt that extends what slot 1 held goes, if slot 1 is now seen to hold `seen_tokens`."""
    s = Scheduler()
    s.recall("local", Recalled(recalled_mark, {1: HELD}))
    s.upstream_up(FACTS, 0.0)
    s.slots_seen("local", {0: SlotSeen(False, 900), 1: SlotSeen(False, seen_tokens)}, 1.0)
    ticket = Ticket(
        TicketId("t"),
        chain_of([PROMPT, b"the answer, and the next question"]),
        0,
        "f",
        N_TOKENS,
        2.0,
        99.0,
        warmable=False,
    )
    effects: list[Effect] = s.submit([ticket], 2.0)
    (grant,) = [effect for effect in effects if isinstance(effect, Grant)]
    return grant


def test_a_slot_that_still_holds_as_much_is_found_again() -> None:
    grant = granted(HELD.tokens, mark())
    assert (grant.slot, grant.reason) == (SlotId("local", 1), Reason.RESIDENT)
    assert grant.expected_cached > 0.9 * N_TOKENS


@pytest.mark.parametrize(("seen", "recalled_mark"), [(HELD.tokens + 300, None), (20, None), (HELD.tokens, "another")])
def test_another_count_or_another_server_makes_it_unknown(seen: int, recalled_mark: str | None) -> None:
    assert granted(seen, recalled_mark or mark()).expected_cached == 0


def test_what_is_written_down_is_what_is_believed() -> None:
    s = Scheduler()
    s.recall("local", Recalled(mark(), {1: HELD}))
    s.upstream_up(FACTS, 0.0)
    assert [held for _, _, held in residency(s.servers.values())] == [NOTHING, NOTHING], (
        "nothing is certain before a look"
    )
    s.slots_seen("local", {0: SlotSeen(False, 0), 1: SlotSeen(False, HELD.tokens)}, 1.0)
    assert [(slot.slot, held) for slot, _, held in residency(s.servers.values())] == [(0, NOTHING), (1, HELD)]


ROOT: Text = words("root", 1000)


def second_life(server: SimServer, mark: str = "") -> Sim:
    """Another proxy before the same server, which was restarted too: its slots are empty, its files are there."""
    (first,) = snapshots(play(Sim([server]), "first").scheduler.servers.values())
    _, its_mark, files = first
    assert len(files) == 1
    for row in server.rows:
        row.text = EMPTY
    again = Scheduler()
    again.recall("u", Recalled(mark or its_mark, {}, files))
    return Sim([server], scheduler=again)


def play(sim: Sim, name: str) -> Sim:
    sim.run(sim.now + 5.0)
    one = request(ROOT, words(name, 40), at=sim.now)
    sim.submit(sim.now + 5.0, one)
    sim.run()
    assert one.ends == "ok"
    return sim


def test_files_of_an_earlier_process_are_used_again() -> None:
    server = SimServer(sim_facts())
    sim = play(second_life(server), "second")
    assert not any(isinstance(effect, Warm) for effect in sim.effects)
    assert server.evaluated == 1000 + 40 + 40


def test_files_written_for_another_server_are_not() -> None:
    server = SimServer(sim_facts())
    sim = play(second_life(server, mark="another"), "second")
    assert not any(isinstance(effect, Restore) for effect in sim.effects)
    assert server.evaluated == 2 * 1040


@pytest.mark.parametrize("old", ["prefixproxy-{mark}-000.bin", "prefixproxy-{mark}-01234567-000.bin"])
def test_files_that_somebody_else_may_write_are_neither_used_nor_remembered(old: str) -> None:
    """An earlier version named them without their upstream; another proxy, or this one at another port, uses others."""
    server = SimServer(sim_facts())
    rows = SlotRows(play(Sim([server]), "first").scheduler, ["u"]).changes()
    (ours,) = [name for name in rows if name.endswith(".bin")]
    row = rows[ours]
    theirs = "slots/u/" + old.format(mark=row["mark"])
    for slot in server.rows:
        slot.text = EMPTY
    kept = SlotRows(again := Scheduler(), ["u"])
    kept.load({theirs: row})
    sim = play(Sim([server], scheduler=again), "second")
    assert not any(isinstance(effect, Restore) for effect in sim.effects)
    assert server.evaluated == 2 * 1040
    after = kept.changes()
    assert after[theirs] is None
    assert after[ours] is not None


def test_files_that_are_gone_cost_one_attempt_and_snapshots_stay_on() -> None:
    server = SimServer(sim_facts())
    sim = second_life(server)
    server.restore_ok = False
    play(sim, "second")
    assert any(isinstance(effect, Restore) for effect in sim.effects)
    assert server.evaluated == 2 * 1040
    server.restore_ok = True
    assert sim.scheduler.snapshot(sim.now).upstreams[0].snapshots


def test_what_is_written_down_of_slots_and_files_is_read_back() -> None:
    sim = play(Sim([SimServer(sim_facts())]), "first")
    rows = SlotRows(sim.scheduler, ["u"]).changes()
    kept = SlotRows(again := Scheduler(), ["u"])
    kept.load({name: row for name, row in rows.items() if row is not None})
    again.upstream_up(sim_facts(), 0.0)
    assert list(snapshots(again.servers.values())) == list(snapshots(sim.scheduler.servers.values()))
    again.slots_seen("u", sim.servers["u"].seen(), 1.0)
    assert [held for _, _, held in residency(again.servers.values())] == [
        held for _, _, held in residency(sim.scheduler.servers.values())
    ]


def test_a_file_that_was_given_up_is_written_down_as_gone() -> None:
    sim = play(Sim([SimServer(sim_facts())]), "first")
    rows = SlotRows(sim.scheduler, ["u"])
    (name,) = [name for name in rows.changes() if name.endswith(".bin")]
    sim.scheduler.upstream_lost("u", sim.now)
    sim.scheduler.upstream_up(sim_facts(build="newer"), sim.now)
    assert rows.changes()[name] is None
