"""Behind several answers of one token llama-server has copies between slots to make: one token is decoded first, in a
slot that is known to be idle. While they run nothing goes there that the server might put into their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from schedule_sim import FULL, Sim, SimServer, facts, request, words

from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slots import COPIES_S
from prefixproxy.schedule.types import (
    Decode,
    Effect,
    Finish,
    Grant,
    HoldReason,
    Policy,
    Reason,
    SlotSeen,
    Ticket,
)
from prefixproxy.types import SlotId, TicketId

SHORT = words("short", 60)
ONE_EACH, TWO_EACH = Finish(True, 0, 100, 2, 0.5), Finish(True, 0, 100, 4, 0.5)
A, B = TicketId("a"), TicketId("b")


def lane(name: str, n_seqs: int = 1) -> Ticket:
    ticket = request(SHORT, words(name, 40)).ticket
    return replace(ticket, id=TicketId(name), n_seqs=n_seqs)


def looked(s: Scheduler, now: float, busy: Sequence[int] = (), n_slots: int = 2, sampled: int = 0) -> list[Effect]:
    seen = {i: SlotSeen(i in busy, 0, sampled=sampled if i in busy else 0) for i in range(n_slots)}
    return s.slots_seen("u", seen, now, now)


def several_answers(n_slots: int = 2, *, shared: bool = False) -> Scheduler:
    """Two answers to ticket "a" run in slots 0 and 1."""
    s = Scheduler(Policy(park=False))
    s.upstream_up(replace(facts(n_slots=n_slots, capabilities=FULL), shared=shared), -1.0)
    looked(s, -0.1, n_slots=n_slots)
    assert s.submit([lane("a", n_seqs=2)], 0.0)[0] == Grant(A, None, "u", 0, False, Reason.SEVERAL_SEQUENCES)
    looked(s, 0.1, busy=[0, 1], n_slots=n_slots)
    assert [row.ticket for row in s.snapshot(0.1).slots][:2] == [A, A]
    return s


def decodes(effects: Sequence[Effect]) -> list[Decode]:
    return [effect for effect in effects if isinstance(effect, Decode)]


def granted(effects: Sequence[Effect]) -> list[TicketId]:
    return [effect.ticket_id for effect in effects if isinstance(effect, Grant)]


def why(s: Scheduler, now: float) -> list[HoldReason]:
    return [waiting.hold for waiting in s.snapshot(now).waiting]


def test_nobody_gets_a_slot_before_one_token_was_decoded_in_one() -> None:
    s = several_answers()
    s.submit([lane("b")], 0.2)
    assert decodes(s.finished(A, ONE_EACH, 1.0)) == [Decode(SlotId("u", 0))]
    assert why(s, 1.0) == [HoldReason.SETTLING]
    assert granted(s.decoded(SlotId("u", 0), True, 1.1)) == [B]


def test_the_second_token_of_any_answer_was_such_a_decode() -> None:
    s = several_answers()
    s.submit([lane("b")], 0.2)
    effects = s.finished(A, TWO_EACH, 1.0)
    assert (decodes(effects), granted(effects)) == ([], [B])


def test_with_several_prompts_it_may_have_come_too_early() -> None:
    s = Scheduler(Policy(park=False))
    s.upstream_up(facts(n_slots=2, capabilities=FULL), -1.0)
    looked(s, -0.1)
    s.submit([replace(lane("a", n_seqs=2), reuse=False), replace(lane("b"), pinnable=False)], 0.0)
    looked(s, 0.1, busy=[0, 1])
    assert granted(looked(s, 0.2, busy=[0, 1], sampled=2)) == []
    assert len(decodes(s.finished(A, TWO_EACH, 1.0))) == 1


def test_a_client_that_left_may_have_left_copies_too() -> None:
    """Not before the server is done with what it asked for."""
    s = several_answers()
    assert decodes(s.finished(A, Finish(False, confirmed_idle=False), 1.0)) == []
    assert decodes(looked(s, 1.1, busy=[1])) == []
    assert decodes(looked(s, 1.2)) == [Decode(SlotId("u", 0))]


def test_a_slot_that_a_stranger_waited_for_is_seen_idle_first() -> None:
    """With every slot taken somebody else's request may have waited in the server, and has one of them now."""
    s = several_answers(shared=True)
    assert decodes(s.finished(A, ONE_EACH, 1.0)) == []
    assert decodes(looked(s, 1.1)) == [Decode(SlotId("u", 0))]


def test_while_others_use_the_upstream_it_is_decoded_where_the_server_likes() -> None:
    """Nothing may be pinned there, and what the server's RAM cache has for the next one would be overwritten."""
    s = several_answers(shared=True)
    s.submit([lane("b")], 0.2)
    assert decodes(s.finished(A, ONE_EACH, 1.0)) == []
    effects = looked(s, 1.1, busy=[1])
    assert (decodes(effects), granted(effects)) == ([Decode(SlotId("u", 0), pinned=False)], [])
    effects = s.decoded(SlotId("u", 0), True, 1.2)
    assert granted(effects or looked(s, 1.3, busy=[1])) == [B]


def test_a_decode_anywhere_leaves_no_belief_unchecked() -> None:
    s = several_answers(n_slots=4, shared=True)
    s.submit([lane("b")], 0.2)
    s.started(B, 0.3)
    s.finished(B, TWO_EACH, 0.8)
    seen = {0: SlotSeen(True), 1: SlotSeen(True), 2: SlotSeen(False, 103), 3: SlotSeen(True)}
    s.slots_seen("u", seen, 0.9, 0.9)
    assert s.snapshot(0.9).slots[2].tokens == 103
    assert decodes(s.finished(A, ONE_EACH, 1.0)) == [Decode(SlotId("u", 2), pinned=False)]
    s.decoded(SlotId("u", 2), True, 1.2)
    s.slots_seen("u", {i: SlotSeen(False, 1 if i == 2 else 0) for i in range(4)}, 1.3, 1.3)
    assert s.snapshot(1.3).slots[2].tokens == 0, "it was decoded there"


def test_a_task_of_a_decode_anywhere_is_not_taken_for_the_next_request() -> None:
    """It was decoded in slot 1, not in the one that it was expected in."""
    s = Scheduler(Policy(park=False))
    s.upstream_up(replace(facts(n_slots=3, capabilities=FULL), shared=True), -1.0)

    def look(now: float, *rows: tuple[bool, int]) -> list[Effect]:
        return s.slots_seen("u", {i: SlotSeen(busy, 0, task) for i, (busy, task) in enumerate(rows)}, now, now)

    look(-0.1, (False, 1), (False, 2), (False, 3))
    s.submit([lane("a", n_seqs=2)], 0.0)
    look(0.1, (True, 4), (True, 5), (False, 3))
    look(0.2, (True, 4), (True, 5), (True, 6))
    effects = s.finished(A, ONE_EACH, 1.0) + look(1.1, (False, 4), (False, 5), (True, 6))
    assert decodes(effects) == [Decode(SlotId("u", 0), pinned=False)]
    look(1.15, (False, 4), (False, 5), (True, 6))
    s.submit([lane("b")], 1.2)
    assert granted([*s.decoded(SlotId("u", 0), True, 1.3), *look(1.4, (False, 4), (False, 7), (True, 6))]) == [B]
    look(1.5, (False, 4), (False, 7), (True, 6))
    assert s.slot_of(B) is None
    s.started(B, 1.55)
    look(1.6, (True, 8), (False, 7), (True, 6))
    assert s.slot_of(B) == SlotId("u", 0)


def test_nothing_unpinned_is_sent_beside_answers_that_may_all_end_with_their_first_token() -> None:
    """It could get one of their slots in the moment they end, and what the RAM cache has for it."""
    s = several_answers(n_slots=4)
    unpinned = replace(lane("b"), pinnable=False)
    assert granted(s.submit([unpinned], 0.2)) == []
    assert granted(s.submit([lane("c", n_seqs=2)], 0.3)) == []
    assert why(s, 0.3) == [HoldReason.SETTLING, HoldReason.SETTLING]
    assert granted(s.submit([lane("d")], 0.4)) == [TicketId("d")], "a pin hits none of theirs"
    s.started(TicketId("d"), 0.5)
    assert granted(looked(s, 0.6, busy=[0, 1, 2], n_slots=4, sampled=1)) == []
    assert granted(looked(s, 0.7, busy=[0, 1, 2], n_slots=4, sampled=2)) == [B]


def test_while_others_use_the_upstream_nothing_at_all_is() -> None:
    s = several_answers(n_slots=4, shared=True)
    looked(s, 0.1, busy=[0, 1, 3], n_slots=4)
    assert granted(s.submit([lane("b")], 0.2)) == []
    assert granted(looked(s, 0.3, busy=[0, 1, 3], n_slots=4, sampled=2)) == [B]


def test_it_takes_the_slot_that_holds_least() -> None:
    s = several_answers(n_slots=4)
    s.submit([lane("b")], 0.2)
    s.started(B, 0.3)
    s.finished(B, TWO_EACH, 0.9)
    assert [row.tokens > 0 for row in s.snapshot(0.9).slots] == [True, True, True, False]
    s.submit([lane("c")], 0.95)
    assert decodes(s.finished(A, ONE_EACH, 1.0)) == [Decode(SlotId("u", 0))]


@pytest.mark.parametrize("told", [True, False])
def test_a_decode_that_failed_is_not_waited_for_any_longer(told: bool) -> None:
    s = several_answers()
    s.submit([lane("b")], 0.2)
    s.finished(A, ONE_EACH, 1.0)
    effects = s.decoded(SlotId("u", 0), False, 1.1) if told else s.tick(1.0 + Policy().max_copy_s)
    assert granted(effects) == [B]
    before = s.snapshot(40.0).slots
    s.decoded(SlotId("u", 0), True, 40.0)
    assert s.snapshot(40.0).slots == before, "too late"


def test_more_copies_to_come_while_it_is_decoded_take_another() -> None:
    s = Scheduler(Policy(park=False))
    s.upstream_up(facts(n_slots=4, capabilities=FULL), -1.0)
    looked(s, -0.1, n_slots=4)
    for name, busy, now in (("a", [0, 1], 0.0), ("b", [0, 1, 2, 3], 0.2)):
        s.submit([lane(name, n_seqs=2)], now)
        looked(s, now + 0.1, busy=busy, n_slots=4)
        looked(s, now + 0.15, busy=busy, n_slots=4, sampled=2)
    assert decodes(s.finished(A, ONE_EACH, 1.0)) == [Decode(SlotId("u", 0))]
    assert decodes(s.finished(B, ONE_EACH, 1.1)) == []
    assert len(decodes(s.decoded(SlotId("u", 0), True, 1.2))) == 1


def test_it_is_not_waited_for_without_end() -> None:
    """A slot that is busy all that time has decoded something."""
    s = several_answers()
    s.submit([lane("b")], 0.2)
    s.finished(A, Finish(False, confirmed_idle=False), 1.0)
    for now in (1.1, 10.0, 0.9 + COPIES_S):
        assert granted(looked(s, now, busy=[1])) == []
    assert granted(looked(s, 1.0 + COPIES_S, busy=[1])) == [B]


def test_the_simulator_decodes_as_well() -> None:
    server = SimServer(facts(n_slots=3))
    sim = Sim([server], Policy(park=False))
    first, second = (request(SHORT, words(name, 40), answer=1) for name in "xy")
    first.ticket = replace(first.ticket, n_seqs=2)
    sim.submit(0.0, first)
    sim.submit(5.0, second)
    sim.run()
    assert len(decodes(sim.effects)) == 1
    assert server.violations == []
    assert {first.ends, second.ends} == {"ok"}
