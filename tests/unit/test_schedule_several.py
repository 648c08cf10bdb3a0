"""Several answers to one prompt (`n`): the server takes a slot for each, and clears those of the further ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from schedule_sim import FULL, NO_SNAPSHOT, Sim, SimServer, facts, lower_bound, request, words

from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slot import Cleared, Slot
from prefixproxy.schedule.types import (
    Decode,
    Effect,
    Finish,
    Grant,
    HoldReason,
    Policy,
    Reason,
    Save,
    SlotSeen,
    Ticket,
    Warm,
    WarmResult,
)
from prefixproxy.simulate.run import Request
from prefixproxy.types import SlotId, SlotState, TicketId

N_CONVERSATIONS, N_ROOTS, N_TURNS = 4, 2, 3


def converse(server: SimServer, n_seqs: int, policy: Policy | None = None) -> list[Request]:
    """Four conversations on two roots take turns, each with so many answers, of which none is quoted."""
    sim, asked = Sim([server], policy), []
    histories = [words(f"root {i % N_ROOTS}", 600) for i in range(N_CONVERSATIONS)]
    for turn in range(N_TURNS):
        for i, history in enumerate(histories):
            one = request(history, words(f"turn {turn} of {i}", 60), head=600, at=sim.now, n_seqs=n_seqs)
            sim.submit(sim.now + 0.1, one)
            sim.run()
            asked.append(one)
            histories[i] = one.prompt + words(f"else {turn} of {i}", 20)
    assert server.violations == []
    assert [one.ends for one in asked] == ["ok"] * len(asked)
    return asked


@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("n_seqs", [2, 3, 4])
def test_what_their_slots_held_is_kept(n_seqs: int, rollback: bool) -> None:
    server = SimServer(facts(capabilities=replace(FULL, host_cache=False, rolls_back=rollback)), rollback=rollback)
    asked = converse(server, n_seqs)
    least = lower_bound([one.prompt for one in asked])
    assert server.evaluated <= (1.1 if rollback else 1.5) * least


def test_without_parking_it_is_lost() -> None:
    server = SimServer(facts(capabilities=replace(FULL, host_cache=False)))
    asked = converse(server, 3, Policy(park=False, fork=False))
    assert server.evaluated > 1.3 * lower_bound([one.prompt for one in asked])


def ready(n_slots: int, *, park: bool = False, rolls_back: bool = True) -> Scheduler:
    s = Scheduler(Policy(park=park))
    s.upstream_up(facts(n_slots=n_slots, capabilities=replace(FULL, rolls_back=rolls_back)), -1.0)
    s.slots_seen("u", {i: SlotSeen(False, 0) for i in range(n_slots)}, -0.1, -0.1)
    return s


def lane(name: str, root: str = "root", n_seqs: int = 1) -> Ticket:
    return replace(request(words(root, 600), words(name, 40)).ticket, id=TicketId(name), n_seqs=n_seqs)


def granted(effects: Sequence[Effect]) -> list[tuple[TicketId, SlotId | None]]:
    return [(effect.ticket_id, effect.slot) for effect in effects if isinstance(effect, Grant)]


def answered(s: Scheduler, name: str, now: float) -> None:
    s.finished(TicketId(name), Finish(True, 0, 640, 10, 5.0), now)


def test_a_slot_that_they_clear_is_saved_first() -> None:
    s = ready(2, park=True)
    s.submit([replace(lane("x", "other"), warmable=False)], 0.0)
    answered(s, "x", 1.0)
    [save] = [
        effect for effect in s.submit([replace(lane("a", n_seqs=2), warmable=False)], 2.0) if isinstance(effect, Save)
    ]
    assert save.slot == SlotId("u", 0)
    assert granted(s.saved(save.root, True, 1000, 0.01, 2.1)) == [("a", None)]


@pytest.mark.parametrize("parent", [0, 1])
def test_the_one_with_the_oldest_task_leaves_the_prompt_in_its_slot(parent: int) -> None:
    s = ready(2)
    s.submit([replace(lane("a", n_seqs=2), warmable=False)], 0.0)
    tasks = {parent: 7, 1 - parent: 8}
    s.slots_seen("u", {i: SlotSeen(True, 640, task=tasks[i]) for i in (0, 1)}, 0.2, 0.1)
    answered(s, "a", 1.0)
    assert [row.tokens > 0 for row in s.snapshot(1.0).slots] == [parent == 0, parent == 1]
    assert granted(s.submit([lane("a")], 2.0)) == [("a", SlotId("u", parent))]


def test_a_prompt_that_no_slot_has_is_not_sent_to_one_that_was_cleared() -> None:
    """A pin to an empty slot bypasses the server's own cache."""
    s = Scheduler(Policy())
    s.upstream_up(facts(n_slots=2, capabilities=replace(NO_SNAPSHOT, host_cache=True)), -1.0)
    s.slots_seen("u", {i: SlotSeen(False, 0) for i in range(2)}, -0.1, -0.1)
    s.submit([lane("x", "other")], 0.0)
    answered(s, "x", 1.0)
    s.submit([lane("a", n_seqs=2)], 2.0)
    s.slots_seen("u", {0: SlotSeen(True, 640, task=8), 1: SlotSeen(True, 640, task=7)}, 2.2, 2.1)
    answered(s, "a", 3.0)
    assert granted(s.submit([lane("x", "other")], 4.0)) == [("x", SlotId("u", 1))]


def test_if_nobody_saw_them_the_prompt_is_where_a_look_shows_as_many_tokens() -> None:
    s = ready(3)
    s.submit([replace(lane("a", n_seqs=2), warmable=False)], 0.0)
    answered(s, "a", 1.0)
    s.slots_seen("u", {0: SlotSeen(False, 0), 1: SlotSeen(False, 649), 2: SlotSeen(False, None)}, 1.1, 1.05)
    assert granted(s.submit([lane("a")], 2.0)) == [("a", SlotId("u", 1))]


def test_the_token_decoded_behind_them_spares_the_slot_that_has_the_prompt() -> None:
    s = ready(2)
    s.submit([replace(lane("a", n_seqs=2), warmable=False)], 0.0)
    effects = s.finished(TicketId("a"), Finish(True, 0, 640, 1, 5.0), 1.0)
    assert not any(isinstance(effect, Decode) for effect in effects), "where the prompt is has to be seen first"
    effects = s.slots_seen("u", {0: SlotSeen(False, 640), 1: SlotSeen(False, 0)}, 1.1, 1.05)
    assert Decode(SlotId("u", 1)) in effects


def test_memory_that_cannot_be_cut_back_is_saved_before_a_single_slot_was_lost() -> None:
    s = ready(4, park=True, rolls_back=False)
    [warm] = [effect for effect in started(s, lane("a", n_seqs=2), 0.0) if isinstance(effect, Warm)]
    effects = s.warmed(warm.root, WarmResult(True, 600, 3.0), 1.0)
    [save] = [effect for effect in effects if isinstance(effect, Save)]
    effects = s.saved(save.root, True, 1000, 0.01, 1.1)
    assert [effect.whole for effect in effects if isinstance(effect, Warm)] == [True]
    assert [row.tokens > 0 for row in s.snapshot(1.1).slots] == [False, False, False, True]


def test_what_was_displaced_unseen_is_looked_for_in_the_servers_own_cache() -> None:
    s = ready(2, rolls_back=False)
    first = request(words("other", 600), words("question", 40), warmable=False)
    s.submit([replace(first.ticket, id=TicketId("x"))], 0.0)
    answered(s, "x", 1.0)
    s.submit([replace(lane("a", n_seqs=2), warmable=False)], 2.0)
    answered(s, "a", 3.0)
    s.slots_seen("u", {0: SlotSeen(False, 0), 1: SlotSeen(False, 649)}, 3.1, 3.05)
    turn = request(first.prompt + words("answer", 9), words("next question", 40), warmable=False).ticket
    [grant] = [effect for effect in s.submit([turn], 4.0) if isinstance(effect, Grant)]
    assert (grant.slot, grant.reason) == (SlotId("u", 1), Reason.HOST_CACHE)
    assert grant.expected_cached >= 600


def test_where_nothing_can_be_saved_the_prompt_is_kept_out_of_the_slots_that_are_cleared_next() -> None:
    s = ready(4, park=True, rolls_back=False)
    [warm] = [effect for effect in started(s, lane("a", n_seqs=3), 0.0) if isinstance(effect, Warm)]
    assert warm.slot == SlotId("u", 3)


def test_with_fewer_files_than_slots_saving_comes_to_an_end() -> None:
    """Saving one slot takes the file of the other."""
    s = ready(3, park=True)
    s.set_policy(Policy(max_snapshots=1), 0.0)
    names = "xyz"
    s.submit([replace(lane(name, root=name), warmable=False) for name in names], 0.1)
    for name in names:
        answered(s, name, 1.0)
    effects, n_saves = s.submit([replace(lane("a", n_seqs=3), warmable=False)], 2.0), 0
    while saves := [effect for effect in effects if isinstance(effect, Save)]:
        n_saves += len(saves)
        assert n_saves <= 3
        effects = s.saved(saves[0].root, True, 1000, 0.01, 2.0 + n_saves)
    assert n_saves == 3
    assert granted(effects) == [("a", None)]


def started(s: Scheduler, ticket: Ticket, now: float) -> list[Effect]:
    """What its submission leads to once nobody else has come."""
    return [*s.submit([ticket], now), *s.tick(now + 0.5)]


def test_those_that_broke_off_leave_nothing_behind() -> None:
    s = ready(2)
    s.submit([replace(lane("a", n_seqs=2), warmable=False)], 0.0)
    s.slots_seen("u", {i: SlotSeen(True, 640, task=i) for i in (0, 1)}, 0.2, 0.1)
    s.finished(TicketId("a"), Finish(False), 1.0)
    assert [row.tokens for row in s.snapshot(1.0).slots] == [0, 0]


def crowded(n_seqs: Mapping[str, int]) -> Scheduler:
    """Four slots busy with "x", and who waits for so many of them."""
    s = ready(4)
    s.submit([replace(lane("x", n_seqs=4), warmable=False)], 0.0)
    s.slots_seen("u", {i: SlotSeen(True, 640, task=i) for i in range(4)}, 0.2, 0.1)
    for name, n in n_seqs.items():
        assert not granted(s.submit([replace(lane(name, n_seqs=n), warmable=False)], 0.3))
    return s


def test_slots_that_are_ready_for_who_cannot_go_are_given_up() -> None:
    """Else each of two could wait for what was prepared for the other."""
    s = crowded({"a": 3, "b": 4})
    s.set_policy(Policy(park=False, fork=False), 0.5)
    slots = s.servers["u"].slots
    for number, name in ((0, "a"), (2, "b"), (3, "b")):
        slots.census.promise(slots.slots[number], TicketId(name))
    effects = s.finished(TicketId("x"), Finish(True, 0, 640, 10, 5.0), 1.0)
    assert granted(effects) == [("a", None)]


def test_idle_slots_are_kept_for_who_was_overtaken_often() -> None:
    s = ready(2)
    s.set_policy(Policy(park=False, max_overtaken=2, max_kept_s=9.0), 0.0)
    one = {name: replace(lane(name, root=name), warmable=False) for name in "vwxyz"}
    assert granted(s.submit([one["v"], one["w"]], 0.1)) == [("v", SlotId("u", 0)), ("w", SlotId("u", 1))]
    s.submit([replace(lane("a", n_seqs=2), warmable=False)], 0.2)
    for done, comes, now in (("v", "x", 1.0), ("w", "y", 1.1)):
        answered(s, done, now)
        assert [ticket for ticket, _ in granted(s.submit([one[comes]], now))] == [comes]
    answered(s, "x", 2.0)
    assert s.submit([one["z"]], 2.1) == []
    assert {each.id: each.hold for each in s.snapshot(2.1).waiting} == {
        "a": HoldReason.NO_SLOT,
        "z": HoldReason.SEVERAL,
    }
    assert granted(s.finished(TicketId("y"), Finish(True, 0, 640, 10, 5.0), 3.0)) == [("a", None)]


def test_they_are_kept_while_another_is_saved_but_not_while_a_root_is_warmed() -> None:
    s = ready(4, park=True)
    s.submit([replace(lane("x", "other"), warmable=False)], 0.0)
    answered(s, "x", 1.0)
    single = [replace(lane(name, root=name), warmable=False) for name in "yz"]
    [warm] = [effect for effect in started(s, lane("a", n_seqs=4), 2.0) if isinstance(effect, Warm)]
    assert [ticket for ticket, _ in granted(s.submit([single[0]], 2.6))] == ["y"]
    answered(s, "y", 2.7)
    effects = s.warmed(warm.root, WarmResult(True, 600, 3.0), 5.0)
    [save] = [effect for effect in effects if isinstance(effect, Save)]
    assert granted(s.submit([single[1]], 5.1)) == []
    assert s.snapshot(5.1).waiting[-1].hold is HoldReason.SEVERAL
    effects = s.saved(save.root, True, 1000, 0.01, 5.2)
    while saves := [effect for effect in effects if isinstance(effect, Save)]:
        effects = s.saved(saves[0].root, True, 1000, 0.01, 5.3)
    assert granted(effects) == [("a", None)]


def test_they_are_not_kept_for_ever() -> None:
    s = ready(2)
    s.set_policy(Policy(park=False, max_overtaken=0, max_kept_s=9.0), 0.0)
    s.submit([replace(lane("v"), warmable=False)], 0.1)
    s.submit([replace(lane("a", n_seqs=2), warmable=False)], 0.2)
    later = replace(lane("z", root="z"), warmable=False)
    assert s.submit([later], 0.3) == []
    assert s.next_wake() == 9.2
    assert granted(s.tick(9.2)) == [("z", SlotId("u", 1))]


def test_a_root_they_share_with_others_is_copied_for_them() -> None:
    sim = Sim([SimServer(facts())])
    lanes = [request(words("root", 900), words(f"lane {i}", 30), head=900, n_seqs=n) for i, n in enumerate([1, 1, 2])]
    for one in lanes:
        sim.submit(0.0, one)
    sim.run()
    assert [one.ends for one in lanes] == ["ok"] * 3
    assert sim.servers["u"].evaluated <= 1.1 * lower_bound([one.prompt for one in lanes])
    grants = [one.grant for one in lanes if one.grant is not None]
    [several] = [grant for grant in grants if grant.reason is Reason.SEVERAL_SEQUENCES]
    assert several.expected_cached > 850


def spread_over(s: Scheduler, name: str, tasks: Mapping[int, int], now: float) -> None:
    """A short one is granted, and the server is seen to take these slots for it."""
    ticket = replace(request(words(name, 100), words("question", 40)).ticket, id=TicketId(name), n_seqs=len(tasks))
    s.submit([ticket], now)
    s.slots_seen("u", {i: SlotSeen(True, 140, task=task) for i, task in tasks.items()}, now + 0.2, now + 0.1)
    s.finished(TicketId(name), Finish(True, 0, 140, 10, 5.0), now + 1.0)


@pytest.mark.parametrize("policy", [Policy(fork=False), Policy()])
def test_where_nothing_can_be_saved_the_last_slot_comes_first(policy: Policy) -> None:
    """The server would clear the first one for a second answer to somebody else's prompt."""
    s = Scheduler(policy)
    s.upstream_up(facts(capabilities=NO_SNAPSHOT), -1.0)
    s.slots_seen("u", {i: SlotSeen(False, 0) for i in range(4)}, -0.1, -0.1)
    assert granted(s.submit([lane("x", "other")], 0.0)) == [("x", SlotId("u", 3))]


def test_what_the_next_several_answers_would_clear_is_put_elsewhere() -> None:
    s = Scheduler(Policy(fork=False))
    s.upstream_up(facts(capabilities=NO_SNAPSHOT), -1.0)
    s.slots_seen("u", {i: SlotSeen(False, 0) for i in range(4)}, -0.1, -0.1)
    spread_over(s, "a", {2: 7, 0: 8, 1: 9}, 0.0)
    spread = s.snapshot(2.0).slots
    assert [row.tokens > 0 for row in spread] == [False, False, True, False]
    s.submit([lane("x", "x"), lane("y", "y")], 2.0)
    assert {row.id.slot for row in s.snapshot(2.0).slots if row.state is SlotState.LEASED} == {2, 3}


def test_that_they_come_again_is_less_likely_with_time() -> None:
    cleared = Cleared()
    first, last = (Slot(SlotId("u", i), SlotState.IDLE, 0.0) for i in (0, 3))
    assert cleared.chance(first, 300.0, 0.0) == 0.0
    cleared.note(2, 10.0)
    cleared.note(1, 20.0)
    assert [cleared.chance(first, 300.0, now) for now in (20.0, 320.0)] == [1.0, 0.5]
    assert cleared.chance(replace(first, id=SlotId("u", 1)), 300.0, 20.0) == 1.0
    assert cleared.chance(last, 300.0, 20.0) == 0.0
