"""What one slot is believed to hold, and what a look at it changes."""

from __future__ import annotations

import pytest
from schedule_sim import FULL, NO_SNAPSHOT, UNPINNED, facts, words

from prefixproxy.schedule.rates import Rates
from prefixproxy.schedule.slot import NOTHING, Held, Slot, Work, left_over
from prefixproxy.schedule.slots import Upstream
from prefixproxy.types import RootId, SlotState, TicketId

ROOT = words("root", 640)


def held(*names: str, answer: int = 0) -> Held:
    tokens = sum((words(name, 320) for name in names), ROOT)
    return Held(tokens.chain(), len(tokens), len(tokens) + answer)


def upstream(n_slots: int = 2) -> Upstream:
    """All slots idle and empty."""
    made = Upstream(facts(n_slots=n_slots))
    made.open(0.0, {})
    for slot in made.slots:
        made.drained(slot, 0, 0.0)
    return made


def leased(made: Upstream, what: Held, now: float = 1.0) -> Slot:
    slot = made.slots[0]
    made.lease(slot, TicketId("t"), "f", what, what.prompt_tokens, now)
    return slot


def test_tokens_are_spread_evenly_over_the_bytes_of_a_prompt() -> None:
    assert held().tokens_at(0) == 0
    assert held().tokens_at(1) == 16
    assert held("tail").tokens_at(40) == 640


@pytest.mark.parametrize(
    ("n_tokens", "expected"),
    [
        (960, held("tail")),
        (1000, Held(held("tail").chain, 960, 1000)),
        (0, NOTHING),
    ],
)
def test_what_is_left_of_a_request_that_was_cut_off(n_tokens: int, expected: Held) -> None:
    slot = leased(upstream(), held("tail"))
    slot.started = True
    assert left_over(slot, n_tokens) == expected


@pytest.mark.parametrize(("n_tokens", "expected"), [(600, Held(held("tail").chain, 600, 600)), (0, NOTHING)])
def test_of_a_prompt_that_was_answered_all_is_left_whatever_was_estimated(n_tokens: int, expected: Held) -> None:
    slot = leased(upstream(), held("tail"))
    slot.started, slot.first_token_at = True, 2.0
    assert left_over(slot, n_tokens) == expected


def test_a_prefill_cut_off_halfway_left_its_front() -> None:
    slot = leased(upstream(), held("tail"))
    slot.started = True
    left = left_over(slot, 480)
    assert 450 < left.prompt_tokens <= 480
    assert held("tail").chain.extends(left.chain)


def test_a_request_that_never_started_left_what_was_there() -> None:
    made = upstream()
    made.hold(made.slots[0], held("conversation", answer=7))
    slot = leased(made, held("tail"))
    assert left_over(slot, 967) == held("conversation", answer=7)


def test_without_a_count_only_what_both_prompts_share_is_certain() -> None:
    made = upstream()
    made.hold(made.slots[0], held("conversation"))
    slot = leased(made, held("tail"))
    slot.started = True
    assert left_over(slot, None).prompt_tokens == 640


@pytest.mark.parametrize(("n_tokens", "kept"), [(967, True), (900, True), (800, False), (0, False), (None, True)])
def test_an_idle_slot_seen_to_hold_far_less_is_not_believed(n_tokens: int | None, kept: bool) -> None:
    made = upstream()
    slot = made.slots[0]
    made.hold(slot, held("conversation", answer=7))
    made.check(slot, n_tokens)
    assert (slot.held == held("conversation", answer=7)) is kept
    assert slot.dirty is (n_tokens != 0)


@pytest.mark.parametrize(
    ("n_tokens", "found"), [(1280, held("b", "c")), (960, held("a")), (500, NOTHING), (None, NOTHING)]
)
def test_a_slot_in_doubt_holds_what_its_length_says(n_tokens: int | None, found: Held) -> None:
    made = upstream()
    slot = made.slots[0]
    made.hold(slot, held("a"))
    slot.doubt = held("b", "c")
    made.check(slot, n_tokens)
    assert slot.held == found
    made.check(slot, found.tokens)
    assert slot.held == found, "doubted once only"


def test_overwriting_something_else_is_an_eviction_extending_it_is_none() -> None:
    made = upstream()
    leased(made, held("a"))
    assert not made.evicted
    made.lease(made.slots[0], TicketId("u"), "f", held("a", "b"), 0, 2.0)
    assert not made.evicted
    made.lease(made.slots[0], TicketId("v"), "f", held("c"), 0, 3.0)
    assert made.evicted


def test_what_another_slot_has_too_is_no_loss() -> None:
    made = upstream()
    one, other = made.slots
    made.hold(one, held("a"))
    assert made.lost_s(one, 0, 100.0, 0.0) == pytest.approx(4.8)
    made.hold(other, held("b"))
    assert made.lost_s(one, 0, 100.0, 0.0) == pytest.approx(1.6)
    assert made.lost_s(one, 60, 100.0, 0.0) == 0.0


def test_what_lies_idle_is_worth_less() -> None:
    made = upstream()
    made.hold(made.slots[0], held())
    assert made.lost_s(made.slots[0], 0, 100.0, 300.0) == pytest.approx(made.lost_s(made.slots[0], 0, 100.0, 0.0) / 2)


def test_a_running_request_is_expected_to_end_after_its_prefill_and_a_usual_answer() -> None:
    made = upstream()
    slot = leased(made, held("a"), now=0.0)
    made.rates.answer_s = 4.0
    assert made.remaining_s(slot, 100.0, 5.0) == pytest.approx(9.6 - 5.0 + 4.0)
    slot.first_token_at = 10.0
    assert made.remaining_s(slot, 100.0, 11.0) == 3.0
    assert made.remaining_s(slot, 100.0, 60.0) == 1.0


def test_pins_are_confirmed_when_all_of_ours_have_started() -> None:
    made = upstream()
    slot = leased(made, held())
    assert not made.pins_confirmed(2.0)
    slot.started = True
    assert made.pins_confirmed(2.0)
    made.reserve(made.slots[1], Work.RESTORE, RootId("r"), 9.0, 2.0)
    made.slots[1].started = True
    assert not made.pins_confirmed(2.0)  # a restore is not seen as busy: only its answer tells
    made.reserve(made.slots[1], Work.WARM, RootId("r"), 9.0, 2.0)
    made.slots[1].started = True
    assert made.pins_confirmed(2.0)


def test_a_pin_given_up_on_its_way_counts_until_it_must_have_arrived() -> None:
    made = upstream()
    made.drain(leased(made, held()), 2.0)
    assert not made.pins_confirmed(2.1)
    assert made.pins_confirmed(2.3)


@pytest.mark.parametrize(
    ("capabilities", "because"),
    [(FULL, ""), (NO_SNAPSHOT, ""), (UNPINNED, "the server takes no id_slot")],
)
def test_why_nothing_is_pinned(capabilities: object, because: str) -> None:
    made = Upstream(facts(capabilities=capabilities))  # type: ignore[arg-type]
    assert made.unpinned_because(0.0) == because
    assert made.observed is (not because)


def test_slots_that_cannot_be_seen_are_idle_from_the_start() -> None:
    made = Upstream(facts(capabilities=UNPINNED))
    made.open(0.0, {})
    assert {slot.state for slot in made.slots} == {SlotState.IDLE}


def test_rates_are_learned_from_prompts_long_enough_to_tell() -> None:
    rates = Rates()
    rates.learn_prefill(10, 1.0)
    assert rates.prefill is None
    rates.learn_prefill(1000, 10.0)
    rates.learn_prefill(1000, 5.0)
    assert rates.prefill == pytest.approx(100 + 0.3 * 100)


def test_a_count_that_is_gone_says_that_the_server_forgot_its_slots() -> None:
    """llama-server shows a count for every slot that ever ran something; after a restart, or after sleep, none."""
    made = upstream()
    slot = made.slots[0]
    made.hold(slot, held("tail"))
    made.evicted = True
    made.check(slot, 960)
    assert (slot.held, slot.dirty) == (held("tail"), True)
    made.check(slot, None)
    assert (slot.held, slot.dirty, made.evicted) == (NOTHING, False, False)


def test_a_slot_that_was_only_ever_restored_into_has_no_count_yet() -> None:
    made = Upstream(facts(n_slots=1))
    made.open(0.0, {})
    [slot] = made.slots
    made.drained(slot, None, 0.0)
    made.hold(slot, held("tail"))
    made.check(slot, None)
    assert slot.held == held("tail")
