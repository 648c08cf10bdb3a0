"""What a ticket may not have: slots that are too short for it."""

from __future__ import annotations

from dataclasses import replace

from schedule_sim import Sim, SimServer, facts, request, words

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
