"""Upstreams whose slots can be neither named nor seen: who waits for whom there, and what is believed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from schedule_sim import UNPINNED, facts, request, words

from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import Effect, Finish, Grant, HoldReason, Ticket
from prefixproxy.types import Capabilities

ROOT = words("root", 1000)
SHARED = Capabilities(shared_cache=True)
BROKEN_OFF = Finish(False, confirmed_idle=False)


def lane(name: str, *, streams: bool = True) -> Ticket:
    return replace(request(ROOT, words(name, 40)).ticket, streams=streams)


def ready(capabilities: Capabilities = UNPINNED, n_slots: int = 3) -> Scheduler:
    s = Scheduler()
    s.upstream_up(facts(n_slots=n_slots, capabilities=capabilities), 0.0)
    return s


def granted(effects: Sequence[Effect]) -> list[Grant]:
    grants = [effect for effect in effects if isinstance(effect, Grant)]
    assert all(grant.slot is None for grant in grants)
    return grants


def holds(s: Scheduler, now: float) -> set[HoldReason]:
    return {waiting.hold for waiting in s.snapshot(now).waiting}


def test_followers_of_a_cold_root_wait_for_the_first_token() -> None:
    s, leader = ready(), lane("a")
    assert [g.ticket_id for g in granted(s.submit([leader, lane("b"), lane("c")], 0.0))] == [leader.id]
    assert holds(s, 400.0) == {HoldReason.LEADER}
    assert granted(s.first_token(leader.id, 401.0)) != []


def test_a_leader_whose_first_token_does_not_show_is_waited_for_as_long_as_a_prefill_may_take() -> None:
    """1,040 tokens at 200 per second, and as much again."""
    s = ready()
    s.submit([lane("a", streams=False), lane("b")], 0.0)
    assert s.next_wake() == pytest.approx(10.4)
    s.tick(10.3)
    assert holds(s, 10.3) == {HoldReason.LEADER}
    s.tick(10.4)
    assert HoldReason.LEADER not in holds(s, 10.4)


def test_llama_server_shows_it_to_us_whatever_its_client_asked_for() -> None:
    s = ready(replace(UNPINNED, native=True))
    s.submit([lane("a", streams=False), lane("b")], 0.0)
    s.tick(100.0)
    assert holds(s, 100.0) == {HoldReason.LEADER}


def test_where_one_cache_serves_all_nobody_waits_for_a_slot_after_that() -> None:
    s, leader, followers = ready(SHARED), lane("a"), [lane("b"), lane("c")]
    s.submit([leader, *followers], 0.0)
    assert {g.ticket_id for g in granted(s.first_token(leader.id, 5.0))} == {each.id for each in followers}


@pytest.mark.parametrize("prefilled", [False, True])
def test_what_a_broken_off_request_had_evaluated_is_believed_from_its_first_token_on(*, prefilled: bool) -> None:
    s, leader = ready(n_slots=1), lane("a")
    s.submit([leader], 0.0)
    if prefilled:
        s.first_token(leader.id, 5.0)
    s.finished(leader.id, BROKEN_OFF, 6.0)
    [next_one] = granted(s.submit([lane("b")], 7.0))
    assert (next_one.expected_cached > 900) is prefilled
