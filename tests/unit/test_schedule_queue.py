"""Who is served first."""

from __future__ import annotations

from dataclasses import replace

from schedule_sim import request, words

from prefixproxy.schedule_queue import Queue
from prefixproxy.schedule_types import Ticket
from prefixproxy.types import Priority, TicketId


def ticket(name: str, tenant: str = "", n_tokens: int = 100, priority: Priority = Priority.INTERACTIVE) -> Ticket:
    made = request(words("root", 50), words(name, 50), tenant=tenant, priority=priority).ticket
    return replace(made, id=TicketId(name), n_tokens=n_tokens)


def queue(*tickets: Ticket) -> Queue:
    made = Queue()
    for one in tickets:
        made.add(one)
    return made


def order(made: Queue, fifo: bool = False) -> list[str]:
    return [waiting.ticket.id for waiting in made.ordered(fifo)]


def test_one_tenant_is_served_by_arrival() -> None:
    assert order(queue(ticket("b"), ticket("a"), ticket("c"))) == ["b", "a", "c"]


def test_batch_comes_last() -> None:
    assert order(queue(ticket("a", priority=Priority.BATCH), ticket("b"))) == ["b", "a"]


def test_tenants_take_turns_by_tokens() -> None:
    made = queue(ticket("a1", "a", 300), ticket("a2", "a", 300), ticket("b1", "b", 100), ticket("b2", "b", 100))
    assert order(made) == ["a1", "b1", "b2", "a2"]
    assert order(made, fifo=True) == ["a1", "a2", "b1", "b2"]


def test_a_tenant_pays_for_what_was_really_evaluated() -> None:
    made = queue(ticket("a1", "a"), ticket("b1", "b"))
    made.charge("a", 500)
    assert order(made) == ["b1", "a1"]
    made.charge("b", 501)
    assert order(made) == ["a1", "b1"]


def test_idleness_saves_nothing_up() -> None:
    made = queue(ticket("a1", "a"), ticket("b1", "b"))
    made.charge("a", 10_000)
    made.charge("b", 10_000)
    made.add(ticket("c1", "c", 1000))
    made.add(ticket("c2", "c"))
    assert order(made) == ["a1", "b1", "c1", "c2"]


def test_nobody_is_remembered_while_nobody_waits() -> None:
    made = queue(ticket("a1", "a"))
    made.charge("a", 500)
    made.pop(TicketId("a1"))
    made.charge("a", 500)
    made.add(ticket("a2", "a"))
    made.add(ticket("b2", "b"))
    assert order(made) == ["a2", "b2"]


def test_a_changed_prompt_keeps_its_place() -> None:
    made = queue(ticket("a"), ticket("b"))
    made.replace(replace(ticket("a"), n_tokens=7))
    assert order(made) == ["a", "b"]
    waiting = made.get(TicketId("a"))
    assert waiting is not None
    assert waiting.ticket.n_tokens == 7


def test_what_waiting_prompts_share_is_counted() -> None:
    made = queue(ticket("a"), ticket("b"))
    chain = ticket("a").chain
    assert made.counts.deepest(chain, holders=2) == 3  # 50 tokens of 4 bytes: three whole blocks
    made.pop(TicketId("a"))
    made.pop(TicketId("b"))
    assert len(made.counts) == 0


def test_the_newest_batch_ticket_is_turned_away_first() -> None:
    made = queue(ticket("a", priority=Priority.BATCH), ticket("b", priority=Priority.BATCH), ticket("c"))
    assert made.newest().ticket.id == "b"
    assert queue(ticket("a"), ticket("b")).newest().ticket.id == "b"
