"""What the server's own cache is believed to hold, and what a hit and a miss say about it."""

from __future__ import annotations

from schedule_sim import request, words

from prefixproxy.schedule.ram import HostCache, Loads
from prefixproxy.schedule.slot import Held, Slot, continues
from prefixproxy.schedule.types import Ticket
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


def test_a_prompt_without_an_answer_is_not_looked_for() -> None:
    """A root is copied from its file."""
    cache = HostCache()
    cache.start(talk("x").chain(), Held(talk("a").chain(), 400, 400))
    assert cache.entries
    assert found(cache, "a") is None
