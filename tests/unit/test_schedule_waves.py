"""Whole fan-outs on virtual servers: what is evaluated, against the least anybody could evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedule_sim import (
    FULL,
    NO_SNAPSHOT,
    UNPINNED,
    Sim,
    SimServer,
    facts,
    lower_bound,
    request,
    words,
)

from prefixproxy.prefix import blocks_within
from prefixproxy.schedule.plan import cuttable
from prefixproxy.schedule.types import Grant, Policy, Reason, Restore, Save, Ticket, Warm
from prefixproxy.simulate.run import Request
from prefixproxy.simulate.text import BYTES_PER_TOKEN, Text
from prefixproxy.types import Capabilities, SlotId, TicketId

ROOT = words("briefing", 2500)
OTHER = words("another one", 2000)
NO_PARKING = Policy(park=False)
"""Roots and their waves alone; what else is saved is tested in test_schedule_park.py."""


def lanes(n: int, root: Text = ROOT, head: int | None = None, **more: int) -> list[Request]:
    return [request(root, words(f"lane {i}", 40), head=head, **more) for i in range(n)]  # type: ignore[arg-type]


def play(server: SimServer, requests: Sequence[Request], gap_s: float = 0.0) -> Sim:
    sim = Sim([server], NO_PARKING)
    for i, one in enumerate(requests):
        sim.submit(1.0 + gap_s * i, one)
    sim.run()
    assert server.violations == []
    assert [one.ends for one in requests] == ["ok"] * len(requests)
    return sim


def least(requests: Sequence[Request]) -> int:
    return lower_bound([one.prompt for one in requests])


@pytest.mark.parametrize("gap_s", [0.0, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("n", [1, 3, 5, 8, 12])
def test_a_fan_out_evaluates_its_root_once(n: int, gap_s: float) -> None:
    server, wave = SimServer(facts()), lanes(n)
    play(server, wave, gap_s)
    assert server.evaluated == least(wave)


@pytest.mark.parametrize("gap_s", [0.0, 0.05])
def test_a_root_that_is_fast_to_evaluate_is_still_waited_for_while_it_is_saved(gap_s: float) -> None:
    server, wave = SimServer(facts(), rate=17_000.0), lanes(5)
    play(server, wave, gap_s)
    assert server.evaluated == least(wave)


def test_a_save_that_takes_longer_than_the_prefill_is_not_waited_for() -> None:
    server, wave = SimServer(facts(), rate=100_000.0), lanes(4)
    play(server, wave)
    assert [one.grant.fork for one in wave if one.grant] == [False] * 4


def test_two_fan_outs_at_once_evaluate_each_root_once() -> None:
    server = SimServer(facts())
    wave = [one for pair in zip(lanes(6), lanes(6, OTHER), strict=True) for one in pair]
    play(server, wave, 0.01)
    assert server.evaluated == least(wave)


@pytest.mark.parametrize("gap_s", [0.0, 0.05, 30.0])
@pytest.mark.parametrize("head", [60, 1000])
def test_a_briefing_in_the_user_message_is_evaluated_once_too(head: int, gap_s: float) -> None:
    server, wave = SimServer(facts()), lanes(8, words("head", head) + OTHER, head=head)
    play(server, wave, gap_s)
    assert server.evaluated == least(wave)


def test_a_second_wave_on_a_known_root_evaluates_only_its_tails() -> None:
    server, first, second = SimServer(facts()), lanes(5), lanes(5)
    sim = play(server, first)
    before = server.evaluated
    for one in second:
        sim.submit(sim.now + 1.0, one)
    sim.run()
    assert server.evaluated - before == 5 * 40
    assert all(one.cached == 2500 for one in second)


def test_a_root_that_every_slot_lost_is_restored_and_not_evaluated() -> None:
    server = SimServer(facts(n_slots=2))
    sim = play(server, lanes(2))
    for one in lanes(4, OTHER):
        sim.submit(sim.now + 1.0, one)
    sim.run()
    late = lanes(2)
    for one in late:
        sim.submit(sim.now + 1.0, one)
    sim.run()
    assert [one.cached for one in late] == [2500, 2500]
    assert all(one.grant is not None and one.grant.fork for one in late)


def test_a_recurrent_model_learns_to_restore_before_every_lane() -> None:
    """It cannot drop a tail, and has no checkpoints: a lane finds out each, every later one gets the exact root
    restored."""
    server, wave = SimServer(facts(), rollback=False, max_checkpoints=0), lanes(16)
    play(server, wave, 0.01)
    assert [one.cached for one in wave].count(0) == 2
    assert server.evaluated == least(wave) + 2 * 2500


def test_a_document_asked_about_again_and_again_is_evaluated_alone_where_slots_cannot_be_cut_back() -> None:
    """It is no head, and nobody waits beside: what the second question shares with a slot is the root."""
    server = SimServer(facts(capabilities=replace(FULL, rolls_back=False)), rollback=False)
    sim, document, cached = Sim([server]), words("document", 800), []
    for question in range(4):
        one = request(document, words(f"question {question}", 20), head=10, at=sim.now)
        sim.submit(sim.now + 1.0, one)
        sim.run()
        cached.append(one.cached)
    (warm,) = [effect for effect in sim.effects if isinstance(effect, Warm) and not effect.whole]
    assert 0.97 * 800 <= warm.n_bytes / BYTES_PER_TOKEN <= 800
    assert cached[0] == 0
    assert all(tokens >= 0.97 * 800 for tokens in cached[1:]), cached
    assert server.evaluated <= 2 * 820 + 2 * 40


def ask_in_turn(server: SimServer, asked: Sequence[Request]) -> Sim:
    """One after the other has ended."""
    sim = Sim([server])
    for one in asked:
        sim.submit(sim.now + 1.0, one)
        sim.run()
    return sim


CANNOT_CUT = replace(FULL, rolls_back=False)


def test_questions_that_differ_behind_the_last_whole_block_are_no_next_turns_of_each_other() -> None:
    server, document = SimServer(facts(capabilities=CANNOT_CUT), rollback=False), words("document", 810)
    asked = [request(document, words(f"question {n}", 3), head=10, answer=2) for n in range(6)]
    ask_in_turn(server, asked)
    assert server.evaluated <= 2 * 813 + 6 * 40, [one.cached for one in asked]


def test_heads_that_end_in_words_of_their_own_are_one_root() -> None:
    """What was seen before is warmed, not the head, which nobody will have again."""
    server, rules = SimServer(facts(capabilities=CANNOT_CUT), rollback=False), words("rules", 800)
    asked = [request(rules + words(f"user {n}", 40), words(f"question {n}", 20), answer=2) for n in range(6)]
    ask_in_turn(server, asked)
    assert server.evaluated <= 2 * 860 + 6 * 80, [one.cached for one in asked]


def test_a_prompt_is_not_cut_inside_a_tool_call() -> None:
    chain = words("call", 800).chain()
    ticket = Ticket(TicketId("t"), chain, 0, "f", 800, 0.0, 60.0, solid=((640, 3000),))
    assert cuttable(ticket, blocks_within(640)) == cuttable(ticket, blocks_within(1000)) == blocks_within(640)
    assert cuttable(ticket, blocks_within(3100)) == blocks_within(3100)
    assert cuttable(ticket, blocks_within(300)) == blocks_within(300)


def test_a_server_whose_restores_have_no_effect_is_found_out() -> None:
    server = SimServer(facts(), restore_effect=False)
    sim = play(server, lanes(5))
    for _ in range(2):
        for one in [*lanes(3), *lanes(3, OTHER)]:
            sim.submit(sim.now + 1.0, one)
        sim.run()
    assert sim.scheduler.snapshot(sim.now).upstreams[0].snapshots_off_because == "restored roots were not reused"


@pytest.mark.parametrize("server", [SimServer(facts(), warms=False), SimServer(facts(), restore_ok=False)])
def test_failing_warm_ups_and_restores_cost_time_but_no_request(server: SimServer) -> None:
    play(server, lanes(9), 0.05)


@pytest.mark.parametrize("capabilities", [NO_SNAPSHOT, UNPINNED])
def test_without_snapshots_a_known_root_is_used_in_turn(capabilities: Capabilities) -> None:
    server, wave = SimServer(facts(capabilities=capabilities)), lanes(6)
    sim = play(server, wave[:1])
    for one in wave[1:]:
        sim.submit(sim.now + 1.0, one)
    sim.run()
    assert server.violations == []
    assert server.evaluated <= least(wave) + 2500


def test_a_client_that_gives_up_and_retries_pays_once() -> None:
    server = SimServer(facts())
    sim = Sim([server])
    tail = words("the question", 40)
    first, second = request(ROOT, tail), request(ROOT, tail)
    sim.submit(1.0, first)
    sim.cancel(6.0, first)
    sim.submit(6.1, second)
    sim.run()
    assert (first.ends, second.ends) == ("gone", "ok")
    assert server.evaluated == least([second])


def test_disconnects_lose_no_request_and_share_no_slot() -> None:
    server, wave = SimServer(facts()), [*lanes(10, answer=200), *lanes(10, OTHER, answer=200)]
    sim = Sim([server])
    for i, one in enumerate(wave):
        sim.submit(1.0 + 0.7 * i, one)
        if i % 3 == 0:
            sim.cancel(1.0 + 0.7 * i + (0.0005, 0.05, 2.0, 20.0)[i % 4], one)
    sim.run()
    sim.run(sim.now + 60)
    assert server.violations == []
    assert {one.ends for i, one in enumerate(wave) if i % 3} == {"ok"}
    assert all(one.ends in ("ok", "gone") for one in wave)


def test_two_upstreams_share_a_wave() -> None:
    servers = [SimServer(facts("u")), SimServer(facts("v"))]
    sim, wave = Sim(servers), lanes(8, answer=2000)
    sim.submit(1.0, *wave)
    sim.run()
    assert all(server.evaluated > 0 for server in servers)
    assert sum(server.evaluated for server in servers) == least(wave) + 2500
    assert all(one.ends == "ok" for one in wave)


def test_a_short_prompt_does_not_wait_for_somebody_elses_warm_up() -> None:
    sim = Sim([SimServer(facts())])
    long, short = lanes(1)[0], request(words("hello", 30), words("there", 10))
    sim.submit(1.0, long)
    sim.submit(2.0, short)
    sim.run()
    assert short.granted_at == 2.0


def test_what_is_warmed_saved_and_restored_for_five_lanes_on_four_slots() -> None:
    sim = play(SimServer(facts()), lanes(5))
    counts = [sum(isinstance(effect, kind) for effect in sim.effects) for kind in (Warm, Save, Restore)]
    assert counts == [1, 1, 3]
    reasons = sorted(one.grant.reason for one in sim.requests.values() if one.grant)
    assert reasons == sorted([Reason.WARMED, Reason.FORKED, Reason.FORKED, Reason.FORKED, Reason.RESIDENT])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    n_slots=st.integers(1, 5),
    arrivals=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.001, 0.05, 3.0, 40.0])), max_size=14),
)
def test_any_pattern_of_lanes_evaluates_the_least_possible(n_slots: int, arrivals: list[tuple[int, float]]) -> None:
    roots = [words("root one", 900), words("root two", 1500), words("root three", 400)]
    server, sim, wave, now = SimServer(facts(n_slots=n_slots)), None, [], 1.0
    sim = Sim([server], Policy())
    for i, (root, gap_s) in enumerate(arrivals):
        now += gap_s
        wave.append(request(roots[root], words(f"own part {i}", 30), at=now))
        sim.submit(now, wave[-1])
    sim.run()
    assert server.violations == []
    assert server.evaluated == least(wave)
    assert all(one.ends == "ok" for one in wave)


def test_where_reuse_is_off_nothing_is_warmed_copied_waited_for_or_expected() -> None:
    server = SimServer(replace(facts(), reuse_off="it was seen to corrupt"))
    sim = play(server, lanes(6), gap_s=0.1)
    assert not [effect for effect in sim.effects if isinstance(effect, Warm | Save | Restore)]
    grants = [effect for effect in sim.effects if isinstance(effect, Grant)]
    assert [(grant.expected_cached, grant.fork) for grant in grants] == [(0, False)] * 6
    assert {grant.slot for grant in grants[:4]} == {SlotId("u", slot) for slot in range(4)}
