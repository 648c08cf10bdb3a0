"""Conversations that take turns on fewer slots: what one left in a slot is saved before another takes it, and restored
when it comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_sim import FULL, NO_SNAPSHOT, Sim, SimServer, facts, lower_bound, request, words

from prefixproxy.prefix import chain_of
from prefixproxy.schedule.roots import RootTable
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import Finish, Policy, Reason, Restore, Save, SlotSeen, Warm
from prefixproxy.simulate.run import Request
from prefixproxy.simulate.text import Text
from prefixproxy.types import TicketId

CANNOT_CUT = replace(FULL, rolls_back=False)
N_TURNS, N_CONVERSATIONS, N_ROOTS = 3, 12, 3


def converse(
    server: SimServer, policy: Policy | None = None, *, quotes: bool = True, turns: int = N_TURNS
) -> tuple[Sim, list[Request]]:
    """Twelve conversations on three roots take turns on the server's slots. `quotes`: the next prompt repeats the last
    answer token by token."""
    sim, asked = Sim([server], policy), []
    histories: list[Text] = [words(f"root {i % N_ROOTS}", 600) for i in range(N_CONVERSATIONS)]
    heads = [600] * N_CONVERSATIONS
    for turn in range(turns):
        for i in range(N_CONVERSATIONS):
            one = request(histories[i], words(f"turn {turn} of {i}", 60), head=heads[i], answer=20, at=sim.now)
            sim.submit(sim.now + 0.1, one)
            sim.run()
            asked.append(one)
            histories[i] = one.prompt + (one.answer if quotes else words(f"else {turn} of {i}", 20))
    assert server.violations == []
    assert [one.ends for one in asked] == ["ok"] * len(asked)
    return sim, asked


def least(asked: list[Request], *, quotes: bool = True) -> int:
    """What the server wrote itself and the next prompt quotes need not be evaluated."""
    return lower_bound([one.prompt for one in asked]) - quotes * (N_TURNS - 1) * N_CONVERSATIONS * 19


@pytest.mark.parametrize("rate", [50.0, 200.0])
@pytest.mark.parametrize("n_slots", [2, 4])
def test_turns_on_few_slots_cost_little_more_than_the_least(n_slots: int, rate: float) -> None:
    server = SimServer(facts(n_slots=n_slots), rate=rate)
    _, asked = converse(server)
    assert server.evaluated <= 1.1 * least(asked)


def test_without_parking_the_history_is_evaluated_again() -> None:
    server = SimServer(facts())
    _, asked = converse(server, Policy(park=False))
    assert server.evaluated > 1.3 * least(asked)


def test_a_prompt_without_text_takes_a_slot_that_is_worth_parking() -> None:
    server = SimServer(facts(n_slots=1))
    sim, _ = converse(server, turns=1)
    one = request(words("nothing", 0), words("nothing", 0), at=sim.now)
    sim.submit(sim.now + 0.1, one)
    sim.run()
    assert one.ends == "ok"
    assert any(isinstance(effect, Save) for effect in sim.effects)


def test_memory_that_cannot_be_cut_back_is_saved_without_the_answer() -> None:
    server = SimServer(facts(), rollback=False)
    sim, asked = converse(server, quotes=False, turns=6)
    assert server.evaluated <= 1.5 * least(asked, quotes=False)
    assert any(isinstance(effect, Warm) and effect.whole for effect in sim.effects)


def test_what_the_probe_found_of_the_memory_spares_finding_it_out_from_requests() -> None:
    unknown, told = SimServer(facts(), rollback=False), SimServer(facts(capabilities=CANNOT_CUT), rollback=False)
    for server in (unknown, told):
        converse(server, quotes=False)
    assert told.evaluated < unknown.evaluated


def test_requests_overrule_what_the_probe_found() -> None:
    """Where a slot was made to forget a tail and kept its prefix after all (checkpoints), that counts."""
    sim = Sim([SimServer(facts(n_slots=1, capabilities=replace(NO_SNAPSHOT, rolls_back=False)))])
    for question in range(2):
        sim.submit(sim.now + 1.0, request(words("root", 600), words(f"question {question}", 60), head=600, at=sim.now))
        sim.run()
    assert sim.scheduler.snapshot(sim.now).upstreams[0].truncated_reuse > 0.5


def test_a_conversation_that_comes_back_is_restored_for_it() -> None:
    _, asked = converse(SimServer(facts(n_slots=2)))
    back = [one.grant for one in asked[N_CONVERSATIONS:]]
    assert sum(grant is not None and grant.reason is Reason.FORKED for grant in back) > len(back) // 2
    assert all(one.cached >= len(one.prompt) - 60 - 20 for one in asked[N_CONVERSATIONS:])


def test_a_conversation_alone_is_never_copied() -> None:
    """It stays in its slot, and nothing is overwritten."""
    sim, history = Sim([SimServer(facts())]), words("root", 60)
    for turn in range(5):
        one = request(history, words(f"turn {turn}", 60), head=60, at=sim.now)
        sim.submit(sim.now + 1.0, one)
        sim.run()
        history = one.prompt + one.answer
        assert turn == 0 or one.cached >= len(one.prompt) - 61
    assert not any(isinstance(effect, Save | Restore) for effect in sim.effects)


def test_where_copies_cost_more_than_evaluating_nothing_is_parked() -> None:
    """A prefill of 100,000 tokens/s, and copies of 50 ms: after the first one that is known."""
    server = SimServer(facts(n_slots=2), rate=100_000.0)
    sim, _ = converse(server)
    assert sum(isinstance(effect, Save) for effect in sim.effects) <= 3


def test_where_nothing_can_be_saved_nothing_is_parked() -> None:
    sim, _ = converse(SimServer(facts(capabilities=NO_SNAPSHOT)))
    assert not any(isinstance(effect, Save) for effect in sim.effects)


def test_the_pool_stays_bounded_and_earlier_turns_make_room() -> None:
    server = SimServer(facts(n_slots=2))
    converse(server, Policy(max_snapshots=6))
    assert len(server.files) <= 6
    roomy = SimServer(facts(n_slots=2))
    converse(roomy)
    assert len(roomy.files) <= N_CONVERSATIONS + N_ROOTS, "one for each conversation, not for each turn"


def test_restores_without_effect_end_it() -> None:
    server = SimServer(facts(n_slots=2), restore_effect=False)
    sim, _ = converse(server)
    assert sum(isinstance(effect, Restore) for effect in sim.effects) <= 4


def test_another_question_on_the_root_does_not_pass_for_the_next_turn() -> None:
    """It may differ in the last, partial block alone: what the first was answered is worth a copy all the same."""
    server = SimServer(facts(n_slots=1))
    sim, root = Sim([server]), words("root", 600)
    first = request(root, words("one", 3), answer=200)
    other = request(root, words("two", 3), answer=20)
    for one in (first, other):
        sim.submit(sim.now + 1.0, one)
        sim.run()
    assert len(server.files) == 2, "the root, and the first conversation"


def test_a_request_does_not_wait_for_a_save_that_there_is_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RootTable, "room_for", lambda table, root, n_bytes, policy, now: None)
    server = SimServer(facts(n_slots=1), rate=200.0)
    sim = Sim([server])
    first = request(words("a", 600), words("first", 60))
    sim.submit(0.1, first)
    sim.run()
    asked = sim.now + 0.1
    second = request(words("b", 600), words("second", 60), at=asked)
    sim.submit(asked, second)
    sim.run()
    assert second.ends == "ok"
    assert not [effect for effect in sim.effects if isinstance(effect, Save)]
    assert second.granted_at - asked < 10.0  # its root is warmed alone meanwhile: 3 s; a save is waited for 30 s


def test_what_is_parked_counts_as_its_own_familys_and_length_whoever_takes_the_slot() -> None:
    """Once it was given the overwriting prompt's, and an empty prompt (llama-server answers it) ended in an error."""
    s = Scheduler()
    s.upstream_up(facts(n_slots=1), -1.0)
    s.slots_seen("u", {0: SlotSeen(False, 0)}, -0.1, -0.1)
    held = replace(request(words("root", 900), words("a", 40)).ticket, family="mine", warmable=False)
    s.submit([held], 0.0)
    s.finished(held.id, Finish(True, 0, 940, 20, 9.0), 10.0)
    empty = replace(held, id=TicketId("empty"), chain=chain_of([]), head_blocks=0, n_tokens=1, family="other")
    effects = s.submit([empty], 11.0)
    assert [type(effect) for effect in effects] == [Save]
    assert [(root.family, root.tokens) for root in s.snapshot(11.0).roots] == [("mine", 959)]
