"""What a ticket may not have: slots that are too short for it, or anything of what a slot holds."""

from __future__ import annotations

from dataclasses import replace

from schedule_sim import NO_SNAPSHOT, Sim, SimServer, facts, request, words

from prefixproxy.schedule.types import Restore, Save, Warm
from prefixproxy.simulate.run import Request

LONG = replace(facts("long", 1), n_ctx_slot=4096)
SHORT = replace(facts("short", 4), n_ctx_slot=1024)
UNKNOWN = facts("unknown", 1)


def test_a_prompt_that_is_too_long_for_one_upstream_waits_for_the_other() -> None:
    sim = Sim([SimServer(SHORT), SimServer(LONG)])
    lanes = [request(words("root", 40), words(name, 40)) for name in "abc"]
    for lane in lanes:
        lane.ticket = replace(lane.ticket, needs_ctx=2000)
    sim.submit(0.0, *lanes)
    sim.run()
    assert [lane.grant and lane.grant.upstream for lane in lanes] == ["long"] * 3


def test_what_fits_nowhere_and_what_nobody_knows_is_left_to_the_servers() -> None:
    for servers in ([SHORT, LONG], [SHORT, UNKNOWN]):
        sim = Sim([SimServer(each) for each in servers])
        lane = request(words("root", 40), words("tail", 40))
        lane.ticket = replace(lane.ticket, needs_ctx=9000)
        sim.submit(0.0, lane)
        sim.run()
        assert lane.ends == "ok"
        assert lane.grant is not None
        assert UNKNOWN not in servers or lane.grant.upstream == "unknown"


# requests that reuse nothing


def lane(name: str, reuse: bool = True) -> Request:
    made = request(ROOT, words(name, 40), answer=3)
    made.ticket = replace(made.ticket, reuse=reuse, warmable=reuse)
    return made


ROOT = words("root", 400)


def test_without_reuse_nothing_is_warmed_saved_restored_or_waited_for() -> None:
    sim = Sim([SimServer(facts(n_slots=4))])
    lanes = [lane(name, reuse=False) for name in "abc"]
    sim.submit(0.0, *lanes)
    sim.run()
    assert not [effect for effect in sim.effects if isinstance(effect, Warm | Save | Restore)]
    assert [one.grant and one.grant.expected_cached for one in lanes] == [0] * 3
    assert len({one.granted_at for one in lanes}) == 1  # all as soon as the slots are seen to be idle


def test_without_reuse_it_takes_the_slot_that_is_worth_least_not_the_one_with_its_root() -> None:
    sim = Sim([SimServer(facts(n_slots=2, capabilities=NO_SNAPSHOT))])
    first, off, again = lane("a"), lane("b", reuse=False), lane("a")
    sim.submit(0.0, first)
    sim.submit(20.0, off)
    sim.submit(40.0, again)
    sim.run()
    assert off.slot != first.slot
    assert (again.slot, again.cached) == (first.slot, len(ROOT) + 39)


def test_what_a_request_without_reuse_left_in_its_slot_serves_others() -> None:
    sim = Sim([SimServer(facts(n_slots=2, capabilities=NO_SNAPSHOT))])
    off, on = lane("a", reuse=False), lane("b")
    sim.submit(0.0, off)
    sim.submit(20.0, on)
    sim.run()
    assert on.slot == off.slot
    assert on.grant is not None
    assert on.grant.expected_cached > 0.9 * len(ROOT)
    assert on.cached >= len(ROOT)


def test_lanes_with_reuse_follow_the_prefill_of_one_without() -> None:
    sim = Sim([SimServer(facts(n_slots=4))])
    on, off = [lane(name) for name in "ab"], [lane(name, reuse=False) for name in "cd"]
    sim.submit(0.0, *off, *on)
    sim.run()
    assert len({one.granted_at for one in off}) == 1
    assert min(one.granted_at for one in on) > max(one.granted_at for one in off)
    assert all(one.cached >= len(ROOT) - 1 for one in on)
