"""Whose turn it is: found by history, kept apart by lane, bounded, and taken back when a request was never sent."""

from __future__ import annotations

from dataclasses import replace

from prefixproxy.conversations import (
    MAX_STEPS,
    Conversation,
    Conversations,
    Lane,
    Note,
    Place,
    Step,
    extended,
    told,
)

KEY, NEXT = b"key1", b"key2"


def conversation(ident: bytes, lane: Lane | None = None, note: str = "10:00", key: bytes = KEY) -> Conversation:
    return Conversation(ident, "label", lane or Lane(), (Step(key, 0, 1),), (Note(0, 0, note),))


def store(*conversations: Conversation, entries: int = 100, n_bytes: int = 1 << 20) -> Conversations:
    out = Conversations(entries, n_bytes)
    for one in conversations:
        out.put(one)
    return out


def found(conversations: Conversations, lane: Lane | None = None, *keys: bytes) -> bytes | None:
    place = conversations.find([(key, False) for key in keys or (KEY,)], lane or Lane())
    return place.conversation.id if place else None


def strict(value: str) -> Lane:
    return Lane(strict=(("lane", value),))


def test_the_longest_known_history_wins() -> None:
    known = store(conversation(b"short"), conversation(b"long", key=NEXT))
    assert found(known, None, NEXT, KEY) == b"long"
    assert found(known, None, b"unknown", KEY) == b"short"
    assert found(known, None, b"unknown") is None


def test_lanes_with_equal_histories_are_kept_apart_by_their_ids() -> None:
    known = store(conversation(b"red", strict("red")), conversation(b"blue", strict("blue")))
    assert found(known, strict("red")) == b"red"
    assert found(known, strict("blue")) == b"blue"
    assert found(known, strict("green")) is None
    assert found(known, Lane()) is None


def test_a_lane_is_nobody_elses_even_if_it_is_the_only_one() -> None:
    assert found(store(conversation(b"red", strict("red"))), strict("blue")) is None


def test_the_clients_own_name_for_a_lane_counts_first() -> None:
    known = store(conversation(b"one", Lane("x")), conversation(b"two", Lane("y")), conversation(b"none"))
    assert found(known, Lane("x")) == b"one"
    assert found(known, Lane("z")) == b"none"


def test_a_name_that_the_client_gives_somebody_else_only_prefers() -> None:
    known = store(conversation(b"one", Lane(client="x")), conversation(b"two", Lane(client="y")))
    assert found(known, Lane(client="x")) == b"one"
    assert found(known, Lane(client="y")) == b"two"
    newest = found(known, Lane())
    assert newest is not None
    assert found(known, Lane(client="new session, same history")) == newest


def test_a_run_id_may_change_only_where_a_session_agrees_and_nobody_else_is_meant() -> None:
    one = Lane(strict=(("session", "s"),), weak=(("run", "1"),))
    two = replace(one, weak=(("run", "2"),))
    assert found(store(conversation(b"one", one)), two) == b"one"
    assert (
        found(store(conversation(b"one", one), conversation(b"two", two)), replace(one, weak=(("run", "3"),))) is None
    )
    alone = Lane(weak=(("run", "1"),))
    assert found(store(conversation(b"one", alone)), Lane(weak=(("run", "2"),))) is None


def test_a_field_in_which_candidates_differ_must_be_equal() -> None:
    a, b, c = (Lane(fields=((0, value),)) for value in (b"a", b"b", b"c"))
    known = store(conversation(b"a", a), conversation(b"b", b))
    assert found(known, a) == b"a"
    assert found(known, b) == b"b"
    assert found(known, c) is None
    assert found(store(conversation(b"a", a)), c) == b"a"


def test_of_equal_candidates_the_newest_that_was_not_gone_on_from_is_meant() -> None:
    first, second = conversation(b"first"), conversation(b"second")
    known = store(first, second)
    assert found(known) == b"second"
    gone_on = extended(second, 0, b"second", Step(NEXT, 2, 0), [])
    known.put(gone_on)
    assert found(known) == b"first"


def test_an_answer_that_is_only_begun_goes_on_from_a_request_not_from_another_prefill() -> None:
    prefilled = replace(conversation(b"p"), steps=(Step(KEY, 0, 1, prefill=True),))
    known = store(prefilled)
    assert known.find([(KEY, True)], Lane()) is None
    assert known.find([(KEY, False)], Lane()) is not None
    known.put(conversation(b"asked"))
    place = known.find([(KEY, True)], Lane())
    assert place is not None
    assert place.conversation.id == b"asked"


def test_going_on_keeps_what_stood_before_and_forgets_large_texts_of_older_steps() -> None:
    one = replace(conversation(b"one"), steps=(Step(KEY, 0, 1, ((5, "large"),)), Step(b"x", 2, 1)))
    two = extended(one, 0, b"two", Step(NEXT, 2, 0, ((5, "larger"),)), [Note(2, 0, "10:01")])
    assert [step.key for step in two.steps] == [KEY, NEXT]
    assert [dict(step.large) for step in two.steps] == [{}, {5: "larger"}]
    assert Place(two, 0).notes == (Note(0, 0, "10:00"),)
    assert told(Place(two, 1).notes) == {0: "10:01"}


def test_steps_are_bounded() -> None:
    one = conversation(b"one")
    for i in range(2 * MAX_STEPS):
        one = extended(one, len(one.steps) - 1, b"one", Step(b"%d" % i, i, 0), [])
    assert len(one.steps) <= MAX_STEPS + 1
    assert Place(one, len(one.steps) - 1).notes == (Note(0, 0, "10:00"),)


def test_the_conversation_not_seen_for_longest_is_dropped() -> None:
    known = store(conversation(b"a"), conversation(b"b"), conversation(b"a"), conversation(b"c"), entries=2)
    assert {c.id for c in known.values()} == {b"a", b"c"}
    assert found(known, None, NEXT) is None


def test_bytes_are_bounded() -> None:
    big = [conversation(b"%d" % i, note="x" * 1000, key=b"%d" % i) for i in range(20)]
    known = store(*big, n_bytes=5_000)
    assert 0 < len(known) < 5
    assert known.n_bytes == sum(c.n_bytes for c in known.values()) <= 5_000
    too_big = store(conversation(b"a", note="x" * 10_000), n_bytes=5_000)
    assert len(too_big) == too_big.n_bytes == 0


def test_undoing_brings_back_what_was_replaced() -> None:
    known = store(conversation(b"a"))
    before = known.values()
    change = known.put(extended(conversation(b"a"), 0, b"a", Step(NEXT, 2, 0), []))
    assert found(known, None, NEXT) == b"a"
    known.undo(change)
    assert known.values() == before
    assert found(known, None, NEXT) is None
    assert found(known) == b"a"


def test_undoing_a_new_conversation_forgets_it_and_doing_so_twice_is_harmless() -> None:
    known = store()
    change = known.put(conversation(b"a"))
    known.undo(change)
    known.undo(change)
    assert len(known) == known.n_bytes == 0


def test_what_somebody_went_on_from_is_not_undone() -> None:
    known = store()
    change = known.put(conversation(b"a"))
    known.put(extended(conversation(b"a"), 0, b"a", Step(NEXT, 2, 0), []))
    known.undo(change)
    assert found(known, None, NEXT) == b"a"
