"""The scheduler's answers, event by event: effects are compared as whole values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from schedule_sim import FULL, NO_SNAPSHOT, UNPINNED, facts, request, words

from prefixproxy.schedule.roots import file_stem
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import (
    Drop,
    Effect,
    Finish,
    Grant,
    HoldReason,
    Policy,
    Poll,
    Reason,
    Reject,
    RejectReason,
    Restore,
    Save,
    SlotSeen,
    Ticket,
    Warm,
    WarmResult,
)
from prefixproxy.simulate.text import Text
from prefixproxy.types import Capabilities, Priority, RootId, SlotId, SlotState, TicketId, UpstreamFacts

ROOT = words("briefing", 2500)
OTHER = words("another one", 2000)
SHORT = words("short", 60)


def file_of(n_slots: int = 2) -> str:
    """The name of the first snapshot of an upstream with so many slots."""
    return f"{file_stem(facts(n_slots=n_slots))}000.bin"


def ready(n_slots: int = 2, capabilities: Capabilities = FULL, policy: Policy | None = None) -> Scheduler:
    """One upstream "u" whose slots were all seen idle and empty, at time 0."""
    s = Scheduler(replace(policy or Policy(), park=False))
    up(s, facts(n_slots=n_slots, capabilities=capabilities))
    return s


def up(s: Scheduler, upstream: UpstreamFacts, now: float = -1.0) -> list[Effect]:
    return s.upstream_up(upstream, now) + all_idle(s, upstream.name, upstream.n_slots, now + 0.9)


def all_idle(s: Scheduler, name: str, n: int, now: float, n_tokens: int | None = 0) -> list[Effect]:
    return s.slots_seen(name, {i: SlotSeen(False, n_tokens) for i in range(n)}, now, now)


def seen(s: Scheduler, now: float, busy: Sequence[int] = (), n: int = 2, n_tokens: int | None = None) -> list[Effect]:
    return s.slots_seen("u", {i: SlotSeen(i in busy, n_tokens) for i in range(n)}, now, now)


def lane(i: int, root: Text = ROOT, **more: object) -> Ticket:
    """A ticket named "a", "b", ... with its own tail behind the root."""
    ticket = request(root, words(f"lane {i}", 40), **more).ticket  # type: ignore[arg-type]
    return replace(ticket, id=TicketId("abcdefghij"[i]))


def slot(i: int, name: str = "u") -> SlotId:
    return SlotId(name, i)


def granted(effects: Sequence[Effect]) -> list[tuple[str, SlotId | None]]:
    return [(effect.ticket_id, effect.slot) for effect in effects if isinstance(effect, Grant)]


def holds(s: Scheduler, now: float) -> dict[str, HoldReason]:
    return {waiting.id: waiting.hold for waiting in s.snapshot(now).waiting}


def states(s: Scheduler, now: float = 0.0) -> str:
    """The slots' states as letters: i, l, r, d, f."""
    return "".join(row.state[0] for row in s.snapshot(now).slots)


def only(effects: Sequence[Effect], kind: type[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def warm_up(s: Scheduler, tickets: Sequence[Ticket], now: float = 0.0) -> RootId:
    """Submit, let the window pass, warm, save."""
    s.submit(tickets, now)
    warm = s.tick(now + 0.02)[0]
    assert isinstance(warm, Warm)
    s.warmed(warm.root, WarmResult(True, 2500, 12.5, evaluated=2500), now + 12.5)
    return warm.root


# cold roots


def test_a_root_that_is_being_warmed_is_not_warmed_in_another_slot_as_well() -> None:
    """Where a copy takes longer than evaluating it nobody waits for it. But the answer to one warm-up would free the
    slot in which the other still runs."""
    s = ready(n_slots=3, policy=Policy(root_threshold_s=0.0))
    s.submit([lane(9, SHORT, warmable=False)], 0.0)
    s.finished(TicketId("j"), Finish(True, 0, 100_000, 1, 1.0), 1.0)
    server = s._fleet.get("u")
    assert server is not None
    server.slots.rates.restore_s_per_byte, server.slots.rates.bytes_per_token = 1e-6, 20_000.0
    s.submit([lane(0)], 2.0)
    assert [type(effect) for effect in s.tick(2.02)] == [Warm]
    effects = [*s.submit([lane(1)], 2.03), *s.tick(2.06), *s.submit([lane(2)], 2.07), *s.tick(2.1)]
    assert only(effects, Warm) == []
    assert {name for name, _ in granted(effects)} <= {"b", "c"}
    assert granted(effects)


def test_who_waited_for_a_warm_up_waits_for_the_first_save_too() -> None:
    """How long a copy takes is known only then: this root turns out to take longer than that, if not so
    long that it would be warmed."""
    s = ready(n_slots=2)
    s.submit([lane(0), lane(1)], 0.0)
    [warm] = s.tick(0.02)
    assert isinstance(warm, Warm)
    effects = s.warmed(warm.root, WarmResult(True, 2500, 0.05, evaluated=2500), 0.1)
    assert granted(effects) == []
    assert holds(s, 0.1)["b"] is HoldReason.WARMING
    [first, restore] = s.saved(warm.root, True, 1_000_000, 0.001, 0.11)
    assert granted([first]) == [("a", warm.slot)]
    assert isinstance(restore, Restore)


def test_the_answer_to_a_warm_up_is_for_its_own_slot() -> None:
    s = ready(n_slots=2)
    s.submit([lane(0)], 0.0)
    [warm] = s.tick(0.02)
    assert isinstance(warm, Warm)
    other = slot(1 - warm.slot.slot)
    assert s.warmed(warm.root, WarmResult(True, 2500, 12.5, evaluated=2500), 1.0, other) == []
    assert only(s.warmed(warm.root, WarmResult(True, 2500, 12.5, evaluated=2500), 12.5, warm.slot), Save)


def test_lanes_on_a_cold_root_wait_for_one_warm_up_and_get_copies_of_it() -> None:
    s = ready(n_slots=3)
    assert s.submit([lane(0), lane(1), lane(2)], 0.0) == []
    assert s.next_wake() == 0.02
    [warm] = s.tick(0.02)
    assert isinstance(warm, Warm)
    root = warm.root
    assert (warm.slot, warm.tickets) == (slot(0), ("a", "b", "c"))
    assert s.warmed(root, WarmResult(True, 2500, 12.5, evaluated=2500), 12.5) == [Save(root, slot(0), file_of(3))]
    assert s.saved(root, True, 50_000_000, 0.05, 12.6) == [
        Grant(TicketId("a"), slot(0), "u", 2500, False, Reason.WARMED),
        Restore(root, slot(1), file_of(3), source=slot(0), n_bytes=50_000_000),
        Restore(root, slot(2), file_of(3), source=slot(0), n_bytes=50_000_000),
    ]
    assert s.restored(slot(2), root, True, 0.03, 12.7) == [
        Grant(TicketId("c"), slot(2), "u", 2500, True, Reason.FORKED)
    ]
    assert s.restored(slot(1), root, True, 0.03, 12.8) == [
        Grant(TicketId("b"), slot(1), "u", 2500, True, Reason.FORKED)
    ]


def test_one_ticket_on_a_cold_root_has_its_head_warmed() -> None:
    s = ready()
    s.submit([lane(0)], 0.0)
    [warm] = s.tick(0.02)
    assert isinstance(warm, Warm)
    assert warm.tickets == ("a",)


def test_a_root_cheaper_than_the_threshold_is_not_worth_a_warm_up() -> None:
    s = ready()
    assert granted(s.submit([lane(0, SHORT)], 0.0)) == [("a", slot(0))]


def test_the_threshold_can_be_tuned_while_running() -> None:
    s = ready()
    s.set_policy(Policy(root_threshold_s=60.0), 0.0)
    assert granted(s.submit([lane(0)], 0.0)) == [("a", slot(0))]


def test_a_lane_that_arrives_while_its_root_is_warmed_joins() -> None:
    s = ready()
    s.submit([lane(0)], 0.0)
    s.tick(0.02)
    assert s.submit([lane(1)], 5.0) == []
    assert holds(s, 5.0) == {"a": HoldReason.WARMING, "b": HoldReason.WARMING}


def test_never_more_restores_than_tickets_wait() -> None:
    s = ready(n_slots=4)
    root = warm_up(s, [lane(0), lane(1)])
    effects = s.saved(root, True, 50_000_000, 0.05, 12.6)
    assert only(effects, Restore) == [Restore(root, slot(1), file_of(4), source=slot(0), n_bytes=50_000_000)]


def test_a_slot_that_held_the_root_and_a_lane_is_not_restored_for_the_next_lane() -> None:
    s = ready(n_slots=1)
    root = warm_up(s, [lane(0), lane(1)])
    s.saved(root, True, 50_000_000, 0.05, 12.6)
    effects = s.finished(TicketId("a"), Finish(True, 2500, 40, 10, 0.2), 14.0)
    assert [(e.ticket_id, e.reason, e.fork) for e in effects if isinstance(e, Grant)] == [("b", Reason.RESIDENT, False)]
    assert only(effects, Restore) == []


def test_a_root_that_lost_its_slot_comes_back_from_its_snapshot() -> None:
    s = ready(n_slots=1)
    root = warm_up(s, [lane(0)])
    s.saved(root, True, 50_000_000, 0.05, 12.6)
    s.finished(TicketId("a"), Finish(True, 2500, 40, 10, 0.2), 14.0)
    s.submit([lane(1, SHORT)], 15.0)
    s.finished(TicketId("b"), Finish(True, 0, 100, 10, 0.5), 16.0)
    assert s.submit([lane(2)], 17.0) == [Restore(root, slot(0), file_of(1), n_bytes=50_000_000)]
    assert granted(s.restored(slot(0), root, True, 0.03, 17.1)) == [("c", slot(0))]


def warmed_for(effects: Sequence[Effect]) -> list[tuple[TicketId, ...]]:
    return [effect.tickets for effect in effects if isinstance(effect, Warm)]


def test_a_short_root_is_warmed_beside_a_long_one() -> None:
    s = ready(n_slots=3)
    s.submit([lane(0), lane(1, words("short", 500))], 0.0)
    assert warmed_for(s.tick(0.02)) == [("a",), ("b",)]


def test_a_root_that_takes_longer_than_it_should_is_not_waited_for() -> None:
    """2,500 tokens at 200 a second: twice that is 25 s."""
    s = ready(n_slots=3)
    s.submit([lane(0), lane(1, OTHER)], 0.0)
    assert warmed_for(s.tick(0.02)) == [("a",)]
    wake = s.next_wake()
    assert wake is not None
    assert wake <= 25.1
    assert warmed_for(s.tick(25.1)) == [("b",)]


def test_the_same_bytes_sent_again_wait_for_the_slot_their_first_request_left() -> None:
    s = ready(n_slots=2, capabilities=NO_SNAPSHOT)
    (_, where), *_ = granted(s.submit([lane(0)], 0.0))
    assert where is not None
    s.started(TicketId("a"), 0.1)
    s.finished(TicketId("a"), Finish(ok=False, confirmed_idle=False), 9.0)
    again = s.submit([replace(lane(0), id=TicketId("again"), arrived=9.1)], 9.1)
    assert granted(again) == []
    seen = {where.slot: SlotSeen(busy=False, n_tokens=1800), 1 - where.slot: SlotSeen(busy=False, n_tokens=0)}
    [effect] = only(s.slots_seen("u", seen, 9.3, 9.25), Grant)
    assert isinstance(effect, Grant)
    assert effect.slot == where
    assert effect.expected_cached > 1500


def test_two_cold_roots_are_warmed_one_after_the_other() -> None:
    s = ready(n_slots=3)
    s.submit([lane(0), lane(1, OTHER)], 0.0)
    first = s.tick(0.02)
    assert len(first) == 1
    assert holds(s, 0.02) == {"a": HoldReason.WARMING, "b": HoldReason.WARMING}
    assert isinstance(first[0], Warm)
    effects = s.warmed(first[0].root, WarmResult(True, 2500, 12.5, evaluated=2500), 12.5)
    assert only(effects, Warm) == []
    effects = s.saved(first[0].root, True, 50_000_000, 0.05, 12.6)
    assert granted(effects) == [("a", slot(0))]
    [second] = only(effects, Warm)
    assert isinstance(second, Warm)
    assert second.tickets == ("b",)


def test_lanes_that_share_more_than_their_head_warm_all_they_share() -> None:
    s = ready(n_slots=3)
    head, briefing = words("head", 300), words("briefing in the user message", 2000)
    s.submit([lane(i, head + briefing, head=300) for i in range(3)], 0.0)
    [warm] = s.tick(0.02)
    assert isinstance(warm, Warm)
    assert len(s.snapshot(0.02).roots) == 1
    assert s.snapshot(0.02).roots[0].tokens == pytest.approx(2300, rel=0.02)


def test_a_nested_root_is_built_on_a_copy_of_its_head() -> None:
    s = ready(n_slots=2)
    root = warm_up(s, [lane(0)])
    s.saved(root, True, 50_000_000, 0.05, 12.6)
    longer = ROOT + words("briefing", 1500)
    s.submit([lane(1, longer, head=2500), lane(2, longer, head=2500)], 13.0)
    assert s.tick(13.02) == [Restore(root, slot(1), file_of(), source=slot(0), n_bytes=50_000_000)]
    effects = s.restored(slot(1), root, True, 0.03, 13.1)
    [warm] = effects
    assert isinstance(warm, Warm)
    assert (warm.slot, warm.tickets) == (slot(1), ("b", "c"))


def test_an_idle_slot_that_holds_what_several_want_is_saved_as_it_is() -> None:
    s = ready(n_slots=3)
    briefing = words("briefing in the user message", 2000)
    first = s.submit([lane(0, SHORT + briefing, head=60)], 0.0)
    assert granted(first) == [("a", slot(0))]
    s.finished(TicketId("a"), Finish(True, 0, 2100, 10, 10.5), 11.0)
    effects = s.submit([lane(i, SHORT + briefing, head=60) for i in (1, 2, 3)], 12.0)
    [save] = effects
    assert isinstance(save, Save)
    assert save.slot == slot(0)
    effects = s.saved(save.root, True, 42_000_000, 0.05, 12.1)
    assert granted(effects) == [("b", slot(0))]
    assert [r.slot for r in effects if isinstance(r, Restore)] == [slot(1), slot(2)]


def test_a_slot_is_saved_once_though_such_files_have_kept_little() -> None:
    """What a file is expected to keep is less than the slot has: that is no reason to save it again."""
    s = ready(n_slots=3)
    s.servers["u"].slots.rates.file_reuse = 0.3
    briefing = words("briefing in the user message", 2000)
    s.submit([lane(0, SHORT + briefing, head=60)], 0.0)
    s.finished(TicketId("a"), Finish(True, 0, 2100, 10, 10.5), 11.0)
    [save] = s.submit([lane(i, SHORT + briefing, head=60) for i in (1, 2, 3)], 12.0)
    assert isinstance(save, Save)
    effects = s.saved(save.root, True, 42_000_000, 0.05, 12.1)
    assert not any(isinstance(effect, Save) for effect in effects)


def test_side_traffic_is_no_reason_for_a_warm_up() -> None:
    s = ready()
    assert granted(s.submit([lane(0, side=True)], 0.0)) == [("a", slot(0))]


def test_fork_off_leaves_leader_and_followers() -> None:
    s = ready(policy=Policy(fork=False))
    assert granted(s.submit([lane(0), lane(1)], 0.0)) == [("a", slot(1))]
    assert holds(s, 0.0) == {"b": HoldReason.LEADER}


# what goes wrong


def test_when_a_warm_up_fails_its_lanes_go_plainly() -> None:
    s = ready()
    s.submit([lane(0), lane(1)], 0.0)
    [warm] = s.tick(0.02)
    assert isinstance(warm, Warm)
    effects = s.warmed(warm.root, WarmResult(False), 3.0)
    assert only(effects, Poll) == [Poll("u")]
    assert [(e.slot, e.reason) for e in effects if isinstance(e, Grant)] == [(slot(1), Reason.WARM_FAILED)]
    assert states(s) == "dl"
    seen(s, 3.3, busy=[1])
    assert holds(s, 3.3) == {"b": HoldReason.LEADER}


def test_a_warm_up_that_is_never_answered_counts_as_failed() -> None:
    s = ready(policy=Policy(max_warm_s=30.0))
    s.submit([lane(0)], 0.0)
    [warm] = s.tick(0.02)
    assert isinstance(warm, Warm)
    assert s.next_wake() == 30.02
    [grant, poll] = s.tick(30.02)
    assert isinstance(grant, Grant)
    assert (grant.slot, grant.reason, poll) == (slot(1), Reason.HOLD_EXPIRED, Poll("u"))
    assert only(s.warmed(warm.root, WarmResult(True, 2500, 12.5, evaluated=2500), 31.0), Save) == []  # too late
    assert states(s) == "dl"


def test_a_warm_up_outlives_its_client_and_the_retry_joins_it() -> None:
    s = ready()
    s.submit([lane(0)], 0.0)
    [warm] = s.tick(0.02)
    assert isinstance(warm, Warm)
    assert s.cancel(TicketId("a"), 5.0) == []
    assert states(s) == "ri"
    assert s.submit([replace(lane(0), id=TicketId("again"))], 5.1) == []
    s.warmed(warm.root, WarmResult(True, 2500, 12.5, evaluated=2500), 12.5)
    assert granted(s.saved(warm.root, True, 50_000_000, 0.05, 12.6)) == [("again", slot(0))]


def test_a_failed_save_still_gives_the_warmed_slot_to_its_leader() -> None:
    s = ready(n_slots=1)
    root = warm_up(s, [lane(0)])
    assert s.saved(root, False, 0, 0.0, 12.6) == [Poll("u")]
    assert granted(seen(s, 12.9, n=1, n_tokens=2500)) == [("a", slot(0))]


def test_a_failed_restore_drops_the_snapshot_and_the_lane_is_served_anyway() -> None:
    s = ready(n_slots=2)
    root = warm_up(s, [lane(0), lane(1)])
    s.saved(root, True, 50_000_000, 0.05, 12.6)
    effects = s.restored(slot(1), root, False, 0.0, 12.7)
    assert Drop("u", file_of()) in effects
    assert states(s, 12.7) == "ld"
    assert s.snapshot(12.7).roots[0].file is None


def test_snapshots_that_do_not_deliver_twice_in_a_row_are_given_up_visibly() -> None:
    s = ready(n_slots=2)
    root = warm_up(s, [lane(0), lane(1)])
    s.saved(root, True, 50_000_000, 0.05, 12.6)
    s.restored(slot(1), root, True, 0.03, 12.7)
    effects = s.finished(TicketId("b"), Finish(True, 0, 2540, 10, 12.7), 26.0)
    assert Drop("u", file_of()) in effects
    assert s.snapshot(26.0).upstreams[0].snapshots
    s.finished(TicketId("a"), Finish(True, 2500, 40, 10, 0.2), 27.0)
    [_, other] = [s.submit([lane(2, OTHER), lane(3, OTHER)], 28.0), s.tick(28.02)]
    [warm] = only(other, Warm)
    assert isinstance(warm, Warm)
    s.warmed(warm.root, WarmResult(True, 2000, 10.0, evaluated=2000), 38.0)
    [restore] = only(s.saved(warm.root, True, 40_000_000, 0.05, 38.1), Restore)
    assert isinstance(restore, Restore)
    s.restored(restore.slot, warm.root, True, 0.03, 38.2)
    s.finished(TicketId("d"), Finish(True, 0, 2040, 10, 10.0), 50.0)
    view = s.snapshot(50.0).upstreams[0]
    assert (view.snapshots, view.snapshots_off_because) == (False, "restored roots were not reused")


# slots


def test_no_slot_is_idle_before_it_was_seen_idle() -> None:
    s = Scheduler()
    assert s.upstream_up(facts(n_slots=2), 0.0) == [Poll("u")]
    assert s.submit([lane(0, SHORT)], 0.05) == []
    assert granted(s.slots_seen("u", {0: SlotSeen(True), 1: SlotSeen(False, 0)}, 0.2, 0.2)) == [("a", slot(1))]


def test_a_slot_whose_client_left_is_free_when_it_is_seen_idle() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT)], 0.0)
    s.started(TicketId("a"), 0.1)
    assert s.finished(TicketId("a"), Finish(False, confirmed_idle=False), 1.0) == [Poll("u")]
    assert s.submit([lane(1, SHORT)], 1.005) == []
    assert seen(s, 1.2, busy=[0], n=1) == [Poll("u")]
    assert granted(seen(s, 1.4, n=1, n_tokens=50)) == [("b", slot(0))]


def test_it_is_looked_for_soon_and_then_less_and_less_often() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT)], 0.0)
    s.started(TicketId("a"), 0.1)
    now, waits = 1.0, list[float]()
    assert s.finished(TicketId("a"), Finish(False, confirmed_idle=False), now) == [Poll("u")]
    while len(waits) < 7:
        seen(s, now, busy=[0], n=1)
        wake = s.next_wake()
        assert wake is not None
        waits.append(wake - now)
        now = wake
        assert s.tick(now) == [Poll("u")]
    assert waits == pytest.approx([0.01, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1])


def test_a_look_asked_for_before_the_client_left_proves_nothing() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT)], 0.0)
    s.started(TicketId("a"), 0.1)
    s.finished(TicketId("a"), Finish(False, confirmed_idle=False), 1.0)
    s.slots_seen("u", {0: SlotSeen(False, 0)}, 1.1, asked_at=0.9)
    assert states(s) == "d"


def test_a_request_given_up_before_it_started_may_still_arrive() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT)], 0.0)
    s.finished(TicketId("a"), Finish(False, confirmed_idle=False), 0.01)
    seen(s, 0.1, n=1)
    assert states(s) == "d"
    seen(s, 0.3, n=1)
    assert states(s) == "i"


def test_a_request_cut_off_in_its_prefill_leaves_what_was_evaluated() -> None:
    s = ready(n_slots=2)
    s.submit([lane(0, warmable=False)], 0.0)
    s.started(TicketId("a"), 0.1)
    s.finished(TicketId("a"), Finish(False, confirmed_idle=False), 6.0)
    seen(s, 6.2, n_tokens=1250)
    [grant] = s.submit([lane(0, warmable=False)], 7.0)
    assert isinstance(grant, Grant)
    assert grant.slot == slot(0)
    assert 1150 < grant.expected_cached <= 1250


def test_a_slot_that_was_emptied_is_not_believed_to_hold_anything() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT)], 0.0)
    s.finished(TicketId("a"), Finish(True, 0, 100, 10, 0.5), 1.0)
    assert s.snapshot(1.0).slots[0].tokens == 109
    seen(s, 2.0, n=1, n_tokens=0)
    assert s.snapshot(2.0).slots[0].tokens == 0


def test_a_conversation_goes_back_to_the_slot_that_holds_it() -> None:
    s = ready(n_slots=3)
    s.submit([lane(0, SHORT), lane(1, OTHER.head(50)), lane(2, words("the third", 40))], 0.0)
    for name in "abc":
        s.finished(TicketId(name), Finish(True, 0, 100, 10, 0.5), 1.0)
    turn = request(SHORT, words("lane 1", 40) + words("and so on", 30)).ticket
    held = request(OTHER.head(50), words("lane 1", 40) + words("and so on", 30)).ticket
    assert granted(s.submit([held], 2.0)) == [(held.id, slot(1))]
    assert [name for name, _ in granted(s.submit([turn], 3.0))] == [turn.id]


def test_a_client_that_names_a_slot_waits_for_that_slot() -> None:
    s = ready(n_slots=2)
    s.submit([lane(0, SHORT)], 0.0)
    assert s.submit([lane(1, SHORT, wanted_slot=0)], 0.1) == []
    assert holds(s, 0.1) == {"b": HoldReason.CLIENT_SLOT}
    assert granted(s.submit([lane(2, SHORT, wanted_slot=3)], 0.2)) == [("c", slot(1))]  # wraps as the server does
    effects = s.finished(TicketId("a"), Finish(True, 0, 100, 10, 0.5), 1.0)
    assert [(e.slot, e.reason) for e in effects if isinstance(e, Grant)] == [(slot(0), Reason.CLIENT_SLOT)]


def test_a_negative_slot_is_no_slot() -> None:
    s = ready(n_slots=1)
    assert granted(s.submit([lane(0, SHORT, wanted_slot=-1)], 0.0)) == [("a", slot(0))]


def test_equal_places_are_taken_in_turn() -> None:
    s = ready(n_slots=3)
    taken = []
    for i in range(6):
        effects = s.submit([replace(lane(0, words(f"unique {i}", 30)), id=TicketId(f"t{i}"))], float(i))
        taken += [where.slot for _, where in granted(effects) if where]
        s.finished(TicketId(f"t{i}"), Finish(True, 0, 70, 1, 0.3), i + 0.5)
    assert sorted(taken[:3]) == sorted(taken[3:]) == [0, 1, 2]


@pytest.mark.parametrize(("host_cache", "displaced"), [(None, 0), (False, 1)])
def test_what_was_displaced_goes_to_a_slot_that_is_not_empty(host_cache: bool | None, displaced: int) -> None:
    """A pin to an empty slot bypasses the server's RAM cache, where it may be; what nobody saw before is not there."""
    for name, where in (("unique 0", displaced), ("unique 2", 1)):
        s = ready(n_slots=2, capabilities=replace(NO_SNAPSHOT, host_cache=host_cache))
        for i in range(2):
            s.submit([replace(lane(0, words(f"unique {i}", 60), wanted_slot=0), id=TicketId(f"t{i}"))], float(i))
            s.finished(TicketId(f"t{i}"), Finish(True, 0, 100, 1, 0.3), i + 0.5)
        assert granted(s.submit([lane(2, words(name, 60))], 3.0)) == [("c", slot(where))]


# requests that cannot be pinned


def test_an_unpinned_request_lets_nothing_be_pinned_until_its_slot_is_known() -> None:
    s = ready(n_slots=3)
    effects = s.submit([lane(0, SHORT, pinnable=False), lane(1, SHORT)], 0.0)
    assert effects == [Grant(TicketId("a"), None, "u", 0, False, Reason.UNPINNED), Poll("u")]
    assert holds(s, 0.0) == {"b": HoldReason.SETTLING}
    assert granted(seen(s, 0.1, busy=[2], n=3)) == [("b", slot(0))]
    assert states(s) == "lil"


def test_an_unpinned_request_waits_until_the_pins_on_their_way_have_started() -> None:
    s = ready(n_slots=3)
    s.submit([lane(0, SHORT)], 0.0)
    assert s.submit([lane(1, SHORT, pinnable=False), lane(2, SHORT)], 0.1) == [Poll("u")]
    assert set(holds(s, 0.1).values()) == {HoldReason.UNCONFIRMED_PINS}
    assert granted(s.started(TicketId("a"), 0.2)) == [("b", None)]


def test_an_unpinned_request_that_nobody_found_leaves_every_idle_slot_in_doubt() -> None:
    s = ready(n_slots=2)
    s.submit([lane(0, SHORT, pinnable=False)], 0.0)
    assert s.finished(TicketId("a"), Finish(False, confirmed_idle=False), 0.1) == [Poll("u")]
    assert states(s) == "dd"


def test_an_unpinned_request_that_ended_unseen_is_found_by_its_length() -> None:
    s = ready(n_slots=2)
    s.submit([lane(0, SHORT, pinnable=False)], 0.0)
    s.finished(TicketId("a"), Finish(True, 0, 100, 10, 0.5), 1.0)
    s.slots_seen("u", {0: SlotSeen(False, 0), 1: SlotSeen(False, 109)}, 1.1, 1.05)
    assert granted(s.submit([lane(0, SHORT)], 2.0)) == [("a", slot(1))]


def test_several_answers_at_once_need_as_many_idle_slots_and_leave_nothing_behind() -> None:
    s = ready(n_slots=2)
    s.submit([lane(0, SHORT)], 0.0)
    s.started(TicketId("a"), 0.1)
    assert s.submit([lane(1, SHORT, n_seqs=2)], 0.2) == []
    effects = s.finished(TicketId("a"), Finish(True, 0, 100, 10, 0.5), 1.0)
    assert [(e.slot, e.reason) for e in effects if isinstance(e, Grant)] == [(None, Reason.SEVERAL_SEQUENCES)]
    seen(s, 1.1, busy=[0, 1])
    assert states(s) == "ll"
    s.finished(TicketId("b"), Finish(True, 0, 100, 10, 0.5), 2.0)
    assert [row.tokens for row in s.snapshot(2.0).slots] == [0, 0]


def test_more_answers_than_slots_are_the_servers_to_refuse() -> None:
    s = ready(n_slots=2)
    [grant] = [effect for effect in s.submit([lane(0, SHORT, n_seqs=5)], 0.0) if isinstance(effect, Grant)]
    assert (grant.slot, grant.reason) == (None, Reason.SEVERAL_SEQUENCES)


def test_foreign_traffic_stops_pinning_until_it_is_quiet() -> None:
    s = ready(n_slots=3)
    assert seen(s, 1.0, busy=[1], n=3) == [Poll("u")]
    assert s.snapshot(1.0).upstreams[0].unpinned_because == "another client uses this upstream"
    effects = s.submit([lane(0, SHORT), lane(1, SHORT, wanted_slot=0)], 1.1)
    assert [(e.slot, e.reason) for e in effects if isinstance(e, Grant)] == [(None, Reason.FOREIGN)]
    seen(s, 1.2, busy=[0], n=3)
    s.finished(TicketId("a"), Finish(True, 0, 100, 10, 0.5), 2.0)
    s.finished(TicketId("b"), Finish(True, 0, 100, 10, 0.5), 3.0)
    seen(s, 3.1, n=3)
    assert states(s) == "iii"
    assert s.snapshot(11.1).upstreams[0].pinning
    assert granted(s.submit([lane(2, SHORT)], 11.1))[0][1] is not None


def test_where_nothing_can_be_pinned_slots_are_only_counted() -> None:
    s = Scheduler()
    s.upstream_up(facts(n_slots=2, capabilities=UNPINNED), 0.0)
    effects = s.submit([lane(0, SHORT), lane(1, SHORT), lane(2, SHORT)], 0.1)
    assert granted(effects) == [("a", None), ("b", None)]
    assert granted(s.finished(TicketId("a"), Finish(False, confirmed_idle=False), 1.0)) == [("c", None)]


# without snapshots


def test_followers_wait_for_the_first_token_and_then_for_the_slot_if_that_is_cheaper() -> None:
    s = ready(n_slots=2, capabilities=NO_SNAPSHOT)
    assert granted(s.submit([lane(0), lane(1)], 0.0)) == [("a", slot(1))]
    assert holds(s, 0.0) == {"b": HoldReason.LEADER}
    assert s.first_token(TicketId("a"), 12.5) == []
    assert holds(s, 12.5) == {"b": HoldReason.SLOT_WAIT}
    assert granted(s.finished(TicketId("a"), Finish(True, 0, 2540, 10, 12.5), 13.0)) == [("b", slot(1))]


def test_a_wait_for_a_busy_slot_ends_when_it_took_twice_what_was_expected() -> None:
    s = ready(n_slots=2, capabilities=NO_SNAPSHOT)
    s.submit([lane(0), lane(1)], 0.0)
    s.first_token(TicketId("a"), 12.5)
    assert s.next_wake() == 22.5
    assert granted(s.tick(22.5)) == [("b", slot(0))]


def test_a_cold_prefill_elsewhere_beats_a_long_answer() -> None:
    s = ready(n_slots=2, capabilities=NO_SNAPSHOT)
    s.submit([lane(0, SHORT)], 0.0)
    s.first_token(TicketId("a"), 1.0)
    s.finished(TicketId("a"), Finish(True, 0, 100, 900, 0.5), 101.0)  # answers take 100 s here
    s.submit([lane(1), lane(2)], 102.0)
    assert granted(s.first_token(TicketId("b"), 115.0)) == [("c", slot(1))]


# the queue


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    s = ready(n_slots=1, policy=Policy(queue_limit=1))
    effects = s.submit([lane(0, SHORT), lane(1, SHORT), lane(2, SHORT)], 0.0)
    assert granted(effects) == [("a", slot(0))]
    assert only(effects, Reject) == [Reject(TicketId("c"), RejectReason.QUEUE_FULL, 10.0)]
    assert s.snapshot(0.0).rejected == {RejectReason.QUEUE_FULL: 1}


def test_batch_is_turned_away_before_interactive() -> None:
    s = ready(n_slots=1, policy=Policy(queue_limit=1))
    s.submit([lane(0, SHORT), lane(1, SHORT, priority=Priority.BATCH)], 0.0)
    [reject] = s.submit([lane(2, SHORT)], 1.0)
    assert isinstance(reject, Reject)
    assert reject.ticket_id == "b"


def test_who_waited_too_long_is_told_so() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT), lane(1, SHORT, timeout=3.0)], 0.0)
    assert s.next_wake() == 3.0
    [reject] = s.tick(3.0)
    assert isinstance(reject, Reject)
    assert (reject.ticket_id, reject.reason) == ("b", RejectReason.QUEUE_TIMEOUT)


def test_interactive_goes_before_batch_and_first_come_first_served_within() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT)], 0.0)
    s.submit([lane(1, SHORT, priority=Priority.BATCH), lane(2, SHORT), lane(3, SHORT)], 0.1)
    order = []
    for name in "acdb":
        order += [name for name, _ in granted(s.finished(TicketId(name), Finish(True, 0, 100, 1, 0.5), 1.0))]
    assert order == ["c", "d", "b"]


def test_a_held_ticket_blocks_nobody() -> None:
    s = ready(n_slots=2)
    s.submit([lane(0)], 0.0)
    assert granted(s.submit([lane(1, SHORT)], 0.001)) == [("b", slot(0))]


def test_tenants_take_turns_by_the_tokens_they_made_the_servers_evaluate() -> None:
    s = ready(n_slots=1)
    tickets = [lane(i, SHORT, tenant="greedy") for i in range(4)] + [lane(4, SHORT, tenant="modest")]
    s.submit(tickets, 0.0)
    effects = s.finished(TicketId("a"), Finish(True, 0, 100, 1, 0.5), 1.0)
    assert [name for name, _ in granted(effects)] == ["e"]


def test_fifo_serves_by_arrival_alone() -> None:
    s = ready(n_slots=1, policy=Policy(policy="fifo"))
    tickets = [lane(i, SHORT, tenant="greedy") for i in range(2)] + [lane(2, SHORT, tenant="modest")]
    s.submit(tickets, 0.0)
    effects = s.finished(TicketId("a"), Finish(True, 0, 100, 1, 0.5), 1.0)
    assert [name for name, _ in granted(effects)] == ["b"]


def test_a_later_ticket_goes_first_where_a_slot_holds_its_root_but_not_for_ever() -> None:
    s = ready(n_slots=1, capabilities=NO_SNAPSHOT, policy=Policy(max_overtaken=2))
    s.submit([lane(0)], 0.0)
    s.submit([lane(1, OTHER), lane(2), lane(3), lane(4)], 0.1)
    order = []
    for name in "acdb":
        finish = Finish(True, 2500, 40, 1, 0.2) if name in "cd" else Finish(True, 0, 2540, 1, 12.5)
        order += [name for name, _ in granted(s.finished(TicketId(name), finish, 20.0))]
    assert order == ["c", "d", "b", "e"]


def test_no_more_run_than_the_policy_allows() -> None:
    s = ready(n_slots=3, policy=Policy(max_concurrency=1))
    assert granted(s.submit([lane(0, SHORT), lane(1, SHORT)], 0.0)) == [("a", slot(0))]
    assert holds(s, 0.0) == {"b": HoldReason.CONCURRENCY}
    assert [name for name, _ in granted(s.set_policy(Policy(), 1.0))] == ["b"]


def test_slots_kept_for_side_traffic_serve_nothing_else() -> None:
    s = ready(n_slots=2, policy=Policy(side_slots=1))
    assert granted(s.submit([lane(0, SHORT), lane(1, SHORT)], 0.0)) == [("a", slot(0))]
    assert granted(s.submit([lane(2, SHORT, side=True)], 0.1)) == [("c", slot(1))]


def test_a_waiting_prompt_may_change() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT), lane(1, OTHER)], 0.0)
    s.rekey(replace(lane(0, SHORT), id=TicketId("b")), 0.1)
    [grant] = s.finished(TicketId("a"), Finish(True, 0, 100, 10, 0.5), 1.0)
    assert isinstance(grant, Grant)
    assert (grant.ticket_id, grant.expected_cached) == ("b", 96)  # the whole blocks of 100 tokens


# upstreams


def test_without_any_upstream_tickets_are_refused_at_once() -> None:
    [reject] = Scheduler().submit([lane(0)], 0.0)
    assert isinstance(reject, Reject)
    assert reject.reason is RejectReason.UPSTREAM_UNAVAILABLE


def test_tickets_wait_a_while_for_a_lost_upstream() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT)], 0.0)
    s.upstream_lost("u", 1.0)
    assert s.submit([lane(1, SHORT)], 2.0) == []
    assert holds(s, 2.0) == {"b": HoldReason.NO_UPSTREAM}
    assert s.finished(TicketId("a"), Finish(False), 2.1) == []
    assert s.next_wake() == 31.0
    assert [e.reason for e in s.tick(31.0) if isinstance(e, Reject)] == [RejectReason.UPSTREAM_UNAVAILABLE]


def test_who_waits_for_a_lost_upstream_goes_on_waiting_while_it_loads() -> None:
    s = ready(n_slots=1)
    s.upstream_lost("u", 1.0)
    s.submit([lane(0, SHORT)], 2.0)
    for now in (20.0, 40.0, 60.0):
        assert s.upstream_lost("u", now) == []
    assert s.tick(89.0) == []
    assert granted(up(s, facts("u", 1), 89.5)) == [("a", slot(0))]


def test_a_model_that_only_a_lost_upstream_has_waits_for_it_and_for_no_other() -> None:
    s = Scheduler()
    up(s, replace(facts("u", 1), models=("small",)))
    up(s, replace(facts("v", 1), models=("large",)))
    s.upstream_lost("u", 1.0)
    assert granted(s.submit([lane(0, SHORT, model="small"), lane(1, SHORT, model="large")], 2.0)) == [
        ("b", slot(0, "v")),
    ]
    assert holds(s, 2.0) == {"a": HoldReason.NO_UPSTREAM}
    assert [e.reason for e in s.tick(31.0) if isinstance(e, Reject)] == [RejectReason.UPSTREAM_UNAVAILABLE]


def test_who_waits_moves_to_another_upstream_when_one_is_lost() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT), lane(1, SHORT)], 0.0)
    up(s, facts("v", 1), 1.0)
    assert states(s) == "ll"
    s.submit([lane(2, SHORT)], 3.0)
    s.upstream_lost("u", 4.0)
    assert granted(s.finished(TicketId("b"), Finish(True, 0, 100, 1, 0.5), 5.0)) == [("c", slot(0, "v"))]


def test_models_go_where_they_are_served() -> None:
    s = Scheduler()
    up(s, replace(facts("u", 1), models=("small",)))
    up(s, facts("v", 1))
    assert granted(s.submit([lane(0, SHORT, model="small"), lane(1, SHORT, model="large")], 0.0)) == [
        ("a", slot(0, "u")),
        ("b", slot(0, "v")),
    ]
    assert s.submit([lane(2, SHORT, model="small")], 0.1) == []


def test_the_faster_of_two_idle_upstreams_takes_a_cold_prompt() -> None:
    s = Scheduler(Policy(park=False))
    for name in "uv":
        up(s, facts(name, 1))
    s.submit([lane(0, SHORT), lane(1, SHORT)], 0.0)
    s.finished(TicketId("a"), Finish(True, 0, 1000, 1, 10.0), 10.0)
    s.finished(TicketId("b"), Finish(True, 0, 1000, 1, 1.0), 10.0)
    assert granted(s.submit([lane(2, OTHER, warmable=False)], 11.0)) == [("c", slot(0, "v"))]


def test_an_upstream_that_comes_back_has_its_roots_restored_before_traffic() -> None:
    s = ready(n_slots=2)
    root = warm_up(s, [lane(0)])
    s.saved(root, True, 50_000_000, 0.05, 12.6)
    s.upstream_lost("u", 13.0)
    effects = up(s, facts(n_slots=2), 20.0)
    assert only(effects, Restore) == [Restore(root, slot(0), file_of(), n_bytes=50_000_000)]
    s.restored(slot(0), root, True, 0.03, 21.0)
    [grant] = s.submit([lane(1)], 22.0)
    assert isinstance(grant, Grant)
    assert (grant.slot, grant.expected_cached, grant.fork) == (slot(0), 2500, True)


def test_another_model_behind_the_same_name_makes_snapshots_worthless() -> None:
    s = ready(n_slots=2)
    root = warm_up(s, [lane(0)])
    s.saved(root, True, 50_000_000, 0.05, 12.6)
    s.upstream_lost("u", 13.0)
    effects = up(s, facts(n_slots=2, model="another"), 20.0)
    assert only(effects, Drop) == [Drop("u", file_of())]
    assert s.snapshot(21.0).roots == ()


def test_a_probe_that_found_nothing_new_changes_nothing() -> None:
    s = ready(n_slots=1)
    s.submit([lane(0, SHORT)], 0.0)
    assert s.upstream_up(facts(n_slots=1), 1.0) == []
    assert (states(s), s.snapshot(1.0).running) == ("l", 1)


def test_a_server_found_empty_while_others_wait_is_refilled_when_nobody_does() -> None:
    s = ready(policy=Policy(max_concurrency=1))
    root = warm_up(s, [lane(0), lane(1)])
    assert granted(s.saved(root, True, 1_000_000, 0.1, 12.6)) == [("a", slot(0))]
    s.cancel(TicketId("b"), 12.7)
    s.started(TicketId("a"), 12.75)
    seen(s, 12.8, busy=[0], n_tokens=2500)
    s.submit([lane(2)], 12.9)
    assert (holds(s, 12.9), states(s, 12.9)) == ({"c": HoldReason.CONCURRENCY}, "li")
    assert seen(s, 13.0, busy=[0], n_tokens=None) == []
    assert s.tick(14.0) == []
    assert s.cancel(TicketId("c"), 15.0) == [Restore(root, slot(1), file_of(), slot(0), 1_000_000)]


def test_what_a_server_without_reuse_holds_spares_a_ticket_nothing() -> None:
    s = ready()
    s.submit([lane(0, warmable=False)], 0.0)
    s.finished(TicketId("a"), Finish(True, 0, 2540, 1, 1.0), 1.0)
    fleet, ticket = s._fleet, lane(1)
    assert fleet.uncached_tokens(ticket, Policy()) < 100
    s.upstream_up(replace(facts(n_slots=2, capabilities=FULL), reuse_off="switched off"), 2.0)
    assert fleet.uncached_tokens(ticket, Policy()) == ticket.n_tokens


# views


def test_the_state_line_and_the_snapshot_say_who_has_what() -> None:
    s = ready(n_slots=3)
    s.submit([lane(0, SHORT), lane(1)], 0.0)
    s.tick(0.02)
    assert repr(s) == "<Scheduler u[LR.] waiting=1 running=1>"
    view = s.snapshot(0.02)
    assert [row.state for row in view.slots] == [SlotState.LEASED, SlotState.RESERVED, SlotState.IDLE]
    assert [row.ticket for row in view.slots] == ["a", "b", None]
    assert view.queue_depth == {Priority.INTERACTIVE: 1, Priority.BATCH: 0}
    assert (view.roots[0].state, view.roots[0].file) == ("warming", None)


def test_what_a_server_had_of_a_root_elsewhere_is_no_sign_of_its_speed() -> None:
    """Its RAM cache may have nearly all of it, of which no slot shows anything."""
    s = ready()
    s.submit([lane(0), lane(1)], 0.0)
    (warm,) = only(s.tick(0.02), Warm)
    assert isinstance(warm, Warm)
    s.warmed(warm.root, WarmResult(True, 2500, 0.2, evaluated=20), 0.3)
    assert s.snapshot(0.3).upstreams[0].prefill_tokens_per_s is None


def test_rates_are_unknown_until_measured() -> None:
    s = ready(n_slots=1)
    view = s.snapshot(0.0).upstreams[0]
    assert (view.prefill_tokens_per_s, view.kv_bytes_per_token, view.answer_s) == (None, None, None)
    root = warm_up(s, [lane(0)])
    s.saved(root, True, 50_000_000, 0.05, 12.6)
    s.first_token(TicketId("a"), 13.0)
    s.finished(TicketId("a"), Finish(True, 2500, 40, 10, 0.2), 15.0)
    view = s.snapshot(15.0).upstreams[0]
    assert (view.prefill_tokens_per_s, view.kv_bytes_per_token, view.answer_s) == (200.0, 20_000.0, 2.0)
