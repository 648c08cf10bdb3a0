"""Conversations that take turns on fewer slots: what one left in a slot is saved before another takes it, and restored
when it comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from schedule_sim import FULL, NO_SNAPSHOT, Sim, SimServer, facts, lower_bound, request, words

from prefixproxy.prefix import chain_of
from prefixproxy.schedule.fleet import Fleet
from prefixproxy.schedule.rates import Rates
from prefixproxy.schedule.roots import RootTable
from prefixproxy.schedule.run import Running, judge
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slot import Held
from prefixproxy.schedule.types import (
    Finish,
    Grant,
    HoldReason,
    Policy,
    Reason,
    Restore,
    Save,
    SlotSeen,
    Warm,
    WarmResult,
)
from prefixproxy.simulate.run import Request
from prefixproxy.simulate.text import Text
from prefixproxy.types import TemplateFacts, TicketId

CANNOT_CUT = replace(FULL, rolls_back=False)
N_TURNS, N_CONVERSATIONS, N_ROOTS = 3, 12, 3


def converse(
    server: SimServer,
    policy: Policy | None = None,
    *,
    quotes: bool = True,
    turns: int = N_TURNS,
    slot_of: Callable[[int, int], int | None] = lambda turn, i: None,
) -> tuple[Sim, list[Request]]:
    """Twelve conversations on three roots take turns on the server's slots. `quotes`: the next prompt repeats the last
    answer token by token. `slot_of`: the slot that the client names."""
    sim, asked = Sim([server], policy), []
    histories: list[Text] = [words(f"root {i % N_ROOTS}", 600) for i in range(N_CONVERSATIONS)]
    heads = [600] * N_CONVERSATIONS
    for turn in range(turns):
        for i in range(N_CONVERSATIONS):
            text, wanted = words(f"turn {turn} of {i}", 60), slot_of(turn, i)
            one = request(histories[i], text, head=heads[i], answer=20, at=sim.now, wanted_slot=wanted)
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


def test_conversations_in_the_slots_that_their_clients_name_keep_their_history() -> None:
    """In some turns only, and another one each time: what a slot holds is saved before, and what another slot or a file
    has is brought there."""
    server = SimServer(facts())
    _, asked = converse(server, slot_of=lambda turn, i: (turn + i) % 4 if (turn + i) % 3 == 0 else None)
    assert server.evaluated <= 1.15 * least(asked)
    named = [one for one in asked if one.ticket.wanted_slot is not None]
    assert len(named) > 10
    assert all(one.slot == one.ticket.wanted_slot for one in named)


def test_what_another_conversation_left_in_the_servers_own_cache_is_worth_something() -> None:
    """It moves to the slot of whoever shares the root with it, and is cut back there: a file of one's own is better."""
    can = replace(CANNOT_CUT, host_cache=True)
    told = facts(n_slots=2, capabilities=can, ram_mib=8192)
    server = SimServer(told, rate=2_000.0, rollback=False, ram_tokens=100_000)
    _, asked = converse(server, quotes=False)
    assert server.evaluated <= 1.1 * least(asked, quotes=False)


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
    server = SimServer(facts(capabilities=replace(FULL, host_cache=False)), rollback=False, max_checkpoints=0)
    sim, asked = converse(server, quotes=False, turns=6)
    assert server.evaluated <= 1.5 * least(asked, quotes=False)
    assert any(isinstance(effect, Warm) and effect.whole for effect in sim.effects)


def test_what_the_probe_found_of_the_memory_spares_finding_it_out_from_requests() -> None:
    unknown, told = (
        SimServer(facts(), rollback=False, max_checkpoints=0),
        SimServer(facts(capabilities=CANNOT_CUT), rollback=False, max_checkpoints=0),
    )
    for server in (unknown, told):
        converse(server, quotes=False)
    assert told.evaluated < unknown.evaluated


def test_requests_overrule_what_the_probe_found() -> None:
    """Where a slot was made to forget a tail and kept more than its checkpoints are good for, that counts."""
    sim = Sim([SimServer(facts(n_slots=1, capabilities=replace(NO_SNAPSHOT, rolls_back=False)))])
    for question in range(2):
        ask(sim, words("root", 700), words(f"question {question}", 60), head=600)
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


def ask(sim: Sim, root: Text, tail: Text, *, head: int = 0, answer: int = 20) -> Request:
    """One request alone, from its start to its end."""
    one = request(root, tail, head=head, answer=answer, at=sim.now)
    sim.submit(sim.now + 0.1, one)
    sim.run()
    assert one.ends == "ok"
    return one


def slot_of(one: Request) -> int | None:
    return None if one.grant is None or one.grant.slot is None else one.grant.slot.slot


def whole_warm_ups(sim: Sim) -> int:
    return sum(isinstance(effect, Warm) and effect.whole for effect in sim.effects)


def test_the_next_turn_stays_where_a_checkpoint_of_the_last_one_is() -> None:
    """Four tokens before the end of a prompt, whatever the next one makes of the answer."""
    sim = Sim([SimServer(facts(capabilities=CANNOT_CUT), rollback=False)])
    history = words("root", 600)
    for turn in range(4):
        one = ask(sim, history, words(f"turn {turn}", 60), head=600)
        if turn:
            assert (slot_of(one), one.cached) == (3, len(history) - 20 - 4)
        history = one.prompt + words(f"else {turn}", 20)
    assert not any(isinstance(effect, Restore) for effect in sim.effects)


def test_where_no_checkpoint_is_one_loss_is_enough() -> None:
    sim = Sim([SimServer(facts(capabilities=CANNOT_CUT), rollback=False, max_checkpoints=0)])
    history, cached = words("root", 600), []
    for turn in range(4):
        one = ask(sim, history, words(f"turn {turn}", 60), head=600)
        cached.append(one.cached)
        history = one.prompt + words(f"else {turn}", 20)
    assert cached[:2] == [600, 0]
    assert min(cached[2:]) >= 600


def test_who_takes_the_last_empty_slot_is_saved_whole() -> None:
    """The next conversation overwrites something; nothing was overwritten yet."""
    sim = Sim([SimServer(facts(n_slots=2, capabilities=CANNOT_CUT), rollback=False)])
    first = [ask(sim, words(name, 600), words(f"{name} asks", 60), head=600) for name in ("a", "b", "c")]
    assert whole_warm_ups(sim) == 2  # of b and of c
    again = ask(sim, first[1].prompt, words("other answer, next turn", 60), head=600)
    assert again.cached >= len(first[1].prompt) - 4


def test_as_many_conversations_as_slots_are_not_saved_turn_by_turn() -> None:
    sim = Sim([SimServer(facts(n_slots=2, capabilities=CANNOT_CUT), rollback=False)])
    histories = [words(name, 600) for name in ("a", "b")]
    for turn in range(3):
        for i, history in enumerate(histories):
            one = ask(sim, history, words(f"{turn} of {i}", 60), head=600)
            histories[i] = one.prompt + words(f"else {turn} of {i}", 20)
    assert whole_warm_ups(sim) == 1  # of who came last


def test_a_question_asked_again_in_other_words_goes_on_from_the_turn_before() -> None:
    server = SimServer(facts(n_slots=2, capabilities=CANNOT_CUT), rollback=False)
    sim = Sim([server])
    for name in ("x", "y"):
        ask(sim, words(name, 600), words(f"{name} asks", 60), head=600)
    one = ask(sim, words("a", 600), words("one", 60), head=600)
    two = ask(sim, one.prompt + words("else", 20), words("two", 60), head=600)
    for name in ("z", "w"):
        ask(sim, words(name, 600), words(f"{name} asks", 60), head=600)
    again = ask(sim, one.prompt + words("else", 20), words("two in other words", 60), head=600)
    assert again.cached >= len(one.prompt)
    assert two.prompt.common(again.prompt) == len(one.prompt) + 20


def test_the_turn_before_goes_first_when_the_pool_is_full() -> None:
    table = RootTable("u")
    early, late = (table.obtain(words("talk", n).chain(), "talk", n, 0.0) for n in (600, 700))
    for root in (early, late):
        root.parked, root.snapshot = True, Held(root.chain, root.tokens, root.tokens)
    early.forks = 3
    assert table.supersede(late, rolls_back=False) == []
    assert table.worth(early, 0.0) < table.worth(late, 0.0)
    assert table.supersede(late, rolls_back=True) == [early]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"hello",), (b"hi",)),  # too short for a block
        ((b"r" * 640, b"question 1"), (b"r" * 640, b"question 2")),  # they differ in a partial block
        ((b"r" * 640, b"question 1"), (b"s" * 640, b"question 2")),
    ],
)
def test_what_only_begins_alike_supersedes_nothing(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> None:
    """One of two slots would be saved over the other's file, and so on for ever."""
    table = RootTable("u")
    roots = [table.obtain(chain_of(parts), "f", 40, 0.0) for parts in (one, other)]
    for root in roots:
        root.parked, root.snapshot = True, Held(root.chain, root.tokens, root.tokens)
    assert [table.supersede(root, rolls_back=True) for root in roots] == [[], []]


def test_short_prompts_in_all_slots_are_saved_once_each() -> None:
    """However often one file undoes another, a ticket waits for no more saves than there are slots."""
    sim = Sim([SimServer(facts(n_slots=2, ram_mib=8192), rate=20.0)], Policy(max_snapshots=1))
    for name in ("a", "b", "c", "d"):
        ask(sim, words(name, 12), words(f"{name} asks", 3), answer=30)
    saves = sum(isinstance(effect, Save) for effect in sim.effects)
    assert 0 < saves <= 2 * 3


def test_on_a_fast_server_too_a_short_tail_gives_way_to_a_longer_root() -> None:
    """What is lost counts as much as what is gained: 40 tokens of the root against 20 of another question."""
    sim = Sim([SimServer(facts(), rate=20_000.0)])
    asked = [ask(sim, words("root", 40), words(f"question {n}", 10), head=40, answer=10) for n in range(3)]
    assert [slot_of(one) for one in asked] == [0, 0, 0]
    assert [one.cached for one in asked] == [0, 40, 40]


def taking_turns(server: SimServer, *, quotes: bool, answer: int) -> list[int]:
    """Four conversations take turns on two slots; the tokens that each of the four turns evaluated."""
    sim, costs = Sim([server]), []
    histories = [words(f"root {i}", 400) for i in range(4)]
    for turn in range(4):
        for i, history in enumerate(histories):
            before = server.evaluated
            one = ask(sim, history, words(f"turn {turn} of {i}", 20), head=400, answer=answer)
            histories[i] = one.prompt + (one.answer if quotes else words(f"else {turn} of {i}", answer))
            costs.append(server.evaluated - before)
    return costs


def test_long_answers_of_conversations_that_lost_their_slot_come_from_the_servers_own_cache() -> None:
    """A file of a state that cannot be cut back is of its prompt alone; an entry of the server's cache has the answer,
    and its checkpoints."""
    can = replace(CANNOT_CUT, host_cache=True)
    server = SimServer(facts(n_slots=2, capabilities=can), rollback=False, ram_tokens=100_000)
    costs = taking_turns(server, quotes=True, answer=200)
    assert all(tokens < 50 for tokens in costs[8:]), costs


@pytest.mark.parametrize(("host_cache", "losses"), [(None, 1), (False, 0)])
def test_a_server_without_such_a_cache_costs_one_evaluation_at_most(host_cache: bool | None, losses: int) -> None:
    can = replace(CANNOT_CUT, host_cache=host_cache)
    costs = taking_turns(SimServer(facts(n_slots=2, capabilities=can), rollback=False), quotes=False, answer=20)
    assert sum(tokens > 400 for tokens in costs[4:]) == losses, costs


def test_a_checkpoint_that_serves_does_not_mean_that_slots_can_be_cut_back() -> None:
    """It may lie behind the last whole block that both prompts share, so all of these are reused."""
    sim = Sim([SimServer(facts(n_slots=1, capabilities=replace(NO_SNAPSHOT, rolls_back=False)), rollback=False)])
    for question in range(3):
        one = ask(sim, words("root", 600), words(f"question {question}", 60), head=600)
        assert not question or one.cached == 600
    (upstream,) = sim.scheduler.snapshot(sim.now).upstreams
    assert upstream.truncated_reuse < 0.5


def test_a_parked_file_is_hoped_to_be_cut_back_in_part_before_that_was_seen() -> None:
    """Of a sliding window it may have the end alone, and a slot that has it for certain is better. A root is copied for
    many lanes: one of them finds out."""
    unseen, seen = Rates(), Rates(file_reuse=0.9)
    assert unseen.file_share(parked=True, rolls_back=None) < 0.9
    assert unseen.file_share(parked=True, rolls_back=True) == unseen.file_share(parked=False, rolls_back=None) == 1.0
    assert seen.file_share(parked=True, rolls_back=None) == seen.file_share(parked=False, rolls_back=True) == 0.9


def test_a_prompt_shorter_than_a_block_waits_for_its_own_warm_up_in_a_large_fleet() -> None:
    """Nothing else that is under way shares anything with it."""
    s = Scheduler(Policy(), Fleet(few_slots=0))
    s.upstream_up(facts(n_slots=3, capabilities=CANNOT_CUT), -1.0)
    s.slots_seen("u", {i: SlotSeen(False, 0) for i in range(3)}, -0.1, -0.1)
    for i in range(3):
        one = request(words(f"root {i}", 900), words("question", 40), warmable=False).ticket
        s.submit([replace(one, id=TicketId(f"x{i}"))], 0.0)
    for i in range(2):
        s.finished(TicketId(f"x{i}"), Finish(True, 0, 940, 10, 5.0), 6.0)
    short = replace(request(words("hello", 4), words("", 0)).ticket, id=TicketId("short"))
    assert not short.chain.hashes
    [warm] = [effect for effect in s.submit([short], 7.0) if isinstance(effect, Warm)]
    assert not any(
        isinstance(effect, Grant) for effect in s.finished(TicketId("x2"), Finish(True, 0, 940, 1, 5.0), 7.1)
    )
    assert [(waiting.id, waiting.hold) for waiting in s.snapshot(7.1).waiting] == [("short", HoldReason.WARMING)]
    [save] = [effect for effect in s.warmed(warm.root, WarmResult(True, 4, 0.02), 7.2) if isinstance(effect, Save)]
    effects = s.saved(save.root, True, 1_000, 0.001, 7.3)
    assert [effect.ticket_id for effect in effects if isinstance(effect, Grant)] == ["short"]


def missed(s: Scheduler, question: str, cached: int, now: float) -> float:
    """What slots are believed to keep, after a prompt on the same root of which so much was reused."""
    ticket = replace(request(words("root", 400), words(question, 40), warmable=False).ticket, id=TicketId(question))
    s.submit([ticket], now)
    s.finished(ticket.id, Finish(True, cached, 440 - cached, 10, 0.5), now + 0.5)
    return s.snapshot(now + 0.5).upstreams[0].truncated_reuse


@pytest.mark.parametrize(("rolls_back", "cached", "kept"), [(True, 300, 1.0), (True, 100, 0.25), (None, 300, 0.75)])
def test_a_few_missing_tokens_do_not_disprove_a_probe(rolls_back: bool | None, cached: int, kept: float) -> None:
    """Templates leave out tool calls, so two prompts may share less than their bytes say."""
    s = Scheduler(Policy(fork=False))
    s.upstream_up(facts(n_slots=1, capabilities=replace(NO_SNAPSHOT, rolls_back=rolls_back)), -1.0)
    s.slots_seen("u", {0: SlotSeen(False, 0)}, -0.1, -0.1)
    missed(s, "first", 0, 0.0)
    assert missed(s, "second", cached, 1.0) == pytest.approx(kept, abs=0.02)


@pytest.mark.parametrize("truncated", [True, False])
def test_a_file_that_cannot_be_cut_back_says_nothing_of_slots(truncated: bool) -> None:
    """Of a sliding window it has the end alone, where a slot has checkpoints too."""
    s = Scheduler(Policy())
    s.upstream_up(facts(n_slots=1, capabilities=replace(FULL, rolls_back=None)), -1.0)
    server = s._fleet.get("u")
    assert server is not None
    ticket = request(words("root", 400), words("question", 40)).ticket
    root = server.roots.obtain(ticket.chain, "", 440, 0.0)
    root.snapshot = Held(ticket.chain, 440, 460)
    server.slots.add_saved(ticket.chain, root.id, root.chain)
    slots = server.slots.slots
    running = Running(ticket, server, 0.0, slots, expected=400, truncated=truncated, root=root, pinned=True)
    judge(running, Finish(True, 0, 440, 10, 0.5))
    assert (server.slots.rates.file_reuse, server.slots.rates.truncated_reuse) == (0.0, None)
    assert root.snapshot is None


@pytest.mark.parametrize(("opening", "reason"), [("", Reason.RESIDENT), ("x" * 128, Reason.EMPTY_SLOT)])
def test_what_the_template_opens_every_chat_with_is_not_counted_on_where_memory_may_not_be_cut_back(
    opening: str, reason: Reason
) -> None:
    """What lies in the slot is in a file already, so it costs nothing to displace it."""
    server = SimServer(facts(n_slots=2, template=TemplateFacts(opening)))
    sim = Sim([server])
    for name in "aab":
        sim.submit(sim.now + 0.1, request(words("opening", 32), words(name, 800), head=0, at=sim.now))
        sim.run()
    grants = [effect for effect in sim.effects if isinstance(effect, Grant)]
    assert grants[-1].reason is reason
