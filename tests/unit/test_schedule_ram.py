"""What the server's own cache is believed to hold, and what a hit and a miss say about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_sim import NO_SNAPSHOT, facts, request, words

from prefixproxy.schedule.ram import MAX_ENTRIES, MIN_FOUND_TOKENS, MOST_MISSES, HostCache, Loads
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slot import Held, Slot, continues
from prefixproxy.schedule.types import Finish, Grant, Policy, SlotSeen, Ticket
from prefixproxy.simulate.text import Text
from prefixproxy.types import SlotId, SlotState, TicketId


def talk(name: str, n: int = 400) -> Text:
    return words(name, n)


def held(name: str, n: int = 400, answer: int = 20) -> Held:
    """A conversation with its answer."""
    return Held(talk(name, n).chain(), n, n + answer)


def turn(name: str) -> Ticket:
    """The next one of it."""
    return request(talk(name), words(f"{name}, next", 60)).ticket


def found(cache: HostCache, name: str) -> Held | None:
    """What the next turn would find."""
    ticket = turn(name)
    loads = cache.find(ticket.chain, lambda held: 400 if continues(ticket, held, len(held.chain.hashes)) else 0)
    return None if loads is None else loads.held


def displaced(*names: str) -> HostCache:
    """These lost their slot, one to the other."""
    cache = HostCache()
    for name in names:
        cache.start(talk("something else").chain(), held(name))
    return cache


def test_a_conversation_is_found_and_moves_out() -> None:
    cache = displaced("a", "b")
    assert found(cache, "a") == held("a")
    assert found(cache, "c") is None
    cache.start(turn("a").chain, held("c"))
    assert found(cache, "a") is None
    assert found(cache, "c") == held("c")


def test_a_slot_that_keeps_half_is_cut_back_in_place() -> None:
    cache = displaced("a")
    cache.start(request(talk("b", 300), words("other question", 60)).ticket.chain, held("b"))
    assert cache.entries == [held("a")]


def test_what_a_restore_overwrites_is_there_if_a_prompt_started_since_it_came_free() -> None:
    cache = HostCache()
    slot = Slot(SlotId("u", 0), SlotState.IDLE, 0.0, held("a"))
    cache.displace(slot)
    assert found(cache, "a") is None
    cache.start(talk("x").chain(), Held(talk("y").chain(), 400, 400))
    cache.displace(slot)
    assert found(cache, "a") == held("a")


def test_one_prompt_finds_out_whether_there_is_such_a_cache() -> None:
    cache = displaced("a", "b")
    cache.count_on(Loads(held("a"), 400), TicketId("first"))
    assert found(cache, "b") is None
    cache.learn(TicketId("first"), 396)
    assert found(cache, "b") == held("b")


def test_one_that_was_given_up_does_not_keep_others_from_it() -> None:
    cache = displaced("a", "b")
    cache.count_on(Loads(held("a"), 400), TicketId("first"))
    cache.learn(TicketId("first"), None)
    assert found(cache, "b") == held("b")


def test_the_first_miss_switches_it_off() -> None:
    cache = displaced("a", "b")
    cache.count_on(Loads(held("b"), 400), TicketId("first"))
    cache.learn(TicketId("first"), 0)
    assert found(cache, "a") is None
    assert found(cache, "b") is None


def test_a_later_miss_says_how_many_fit() -> None:
    cache = displaced("a", "b", "c")
    cache.count_on(Loads(held("c"), 400), TicketId("first"))
    cache.learn(TicketId("first"), 396)
    cache.count_on(Loads(held("b"), 400), TicketId("second"))
    cache.learn(TicketId("second"), 0)
    assert found(cache, "a") is found(cache, "b") is None
    assert found(cache, "c") == held("c")


def test_one_that_is_known_is_not_given_up_for_a_wrong_estimate() -> None:
    """The newest entry is there, as nothing has displaced it. But not for ever."""
    cache = displaced("a", "b", "c")
    cache.proven = True
    for number in range(MOST_MISSES + 1):
        assert found(cache, "c") == held("c")
        cache.count_on(Loads(held("c"), 400), TicketId(f"{number}"))
        cache.learn(TicketId(f"{number}"), 100)
    assert found(cache, "c") is None


def test_a_prompt_without_an_answer_is_not_looked_for() -> None:
    """A root is copied from its file."""
    cache = HostCache()
    cache.start(talk("x").chain(), Held(talk("a").chain(), 400, 400))
    assert cache.entries
    assert found(cache, "a") is None


def test_so_few_tokens_are_not_looked_for_as_a_miss_of_them_says_nothing() -> None:
    cache = displaced("a")
    ticket = turn("a")
    assert cache.find(ticket.chain, lambda held: MIN_FOUND_TOKENS) is not None
    assert cache.find(ticket.chain, lambda held: MIN_FOUND_TOKENS - 1) is None


@pytest.mark.parametrize(
    ("mib", "bytes_per_token", "there"),
    [
        (0, 1024, False),
        (-1, 1e9, True),
        (8192, None, True),
        (8192, 1024, True),
        (8192, 8192 / 8 * 2**20 / 420, True),
        (8192, 8192 / 8 * 2**20 / 419, False),
        (400, None, False),
    ],
)
def test_what_is_displaced_stays_there_if_many_of_its_size_have_room(
    mib: int, bytes_per_token: float | None, there: bool
) -> None:
    assert HostCache(mib=mib).has_room_for(held("a"), bytes_per_token) is there


def three_slots(ram_mib: int = 0) -> Scheduler:
    """A short request ran after a long one and before another."""
    s = Scheduler(Policy(fork=False))
    s.upstream_up(facts(n_slots=3, capabilities=replace(NO_SNAPSHOT, rolls_back=True), ram_mib=ram_mib), -1.0)
    s.slots_seen("u", {i: SlotSeen(False, 0) for i in range(3)}, -0.1, -0.1)
    for i, n in enumerate((600, 60, 600)):
        assert ask(s, f"talk {i}", n, float(i)) == 2 - i
    return s


def ask(s: Scheduler, name: str, n: int, now: float, cached: int = 0) -> int:
    """The slot in which it ran."""
    ticket = replace(request(talk(name, n), words("question", 20)).ticket, id=TicketId(f"{name} {now}"))
    [grant] = [effect for effect in s.submit([ticket], now) if isinstance(effect, Grant)]
    s.finished(ticket.id, Finish(True, cached, n + 20 - cached, 10, 0.5), now + 0.5)
    assert grant.slot is not None
    return grant.slot.slot


def test_where_the_server_keeps_what_is_displaced_the_slot_left_alone_for_longest_is_taken() -> None:
    assert ask(three_slots(ram_mib=8192), "new", 300, 10.0) == 2
    assert ask(three_slots(), "new", 300, 10.0) == 1, "else the one whose loss costs least"


def test_that_it_keeps_them_is_known_once_more_was_reused_than_a_slot_had() -> None:
    s = three_slots()
    assert ask(s, "talk 0", 600, 10.0, cached=600) == 2
    assert ask(s, "new", 300, 11.0) == 1
    assert ask(s, "few", 40, 12.0, cached=40) == 1, "so little may be the template's own words"
    assert ask(s, "other", 700, 13.0) == 1
    s = three_slots()
    assert ask(s, "new", 300, 10.0) == 1
    assert ask(s, "talk 1", 600, 11.0, cached=600) == 1
    assert ask(s, "newer", 300, 12.0) == 2


@pytest.mark.parametrize(("limit", "found"), [(MAX_ENTRIES, True), (0, False)])
def test_what_is_known_to_be_switched_off_is_not_found_out(limit: int, found: bool) -> None:
    cache = HostCache(limit=limit)
    cache.note_reuse(held("a"), 0, 400)
    assert bool(cache.mib) is found
