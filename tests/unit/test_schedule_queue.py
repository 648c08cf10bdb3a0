"""Who is served first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schedule_sim import request, words

from prefixproxy.schedule.queue import Queue
from prefixproxy.schedule.turns import MAX_FAMILIES, Accounts
from prefixproxy.schedule.types import Policy, Share, Ticket
from prefixproxy.types import Priority, TicketId


def ticket(
    name: str,
    tenant: str = "",
    n_tokens: int = 100,
    priority: Priority = Priority.INTERACTIVE,
    family: str = "f",
) -> Ticket:
    made = request(words("root", 50), words(name, 50), tenant=tenant, priority=priority).ticket
    return replace(made, id=TicketId(name), n_tokens=n_tokens, family=family)


def queue(*tickets: Ticket) -> Queue:
    made = Queue()
    for one in tickets:
        made.add(one)
    return made


def order(made: Queue, fifo: bool = False, **policy: Any) -> list[str]:
    return [waiting.ticket.id for waiting in made.ordered(Policy(policy="fifo" if fifo else "cost", **policy))]


def charge(made: Queue, tenant: str, tokens: int, **policy: Any) -> None:
    made.charge(ticket("", tenant), tokens, Policy(**policy))


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
    charge(made, "a", 500)
    assert order(made) == ["b1", "a1"]
    charge(made, "b", 501)
    assert order(made) == ["a1", "b1"]


def test_idleness_saves_nothing_up() -> None:
    made = queue(ticket("a1", "a"), ticket("b1", "b"))
    charge(made, "a", 10_000)
    charge(made, "b", 10_000)
    made.add(ticket("c1", "c", 1000))
    made.add(ticket("c2", "c"))
    assert order(made) == ["a1", "b1", "c1", "c2"]


def test_nobody_is_remembered_while_nobody_waits() -> None:
    made = queue(ticket("a1", "a"))
    charge(made, "a", 500)
    made.pop(TicketId("a1"))
    charge(made, "a", 500)
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
    assert made.surplus(Policy()).ticket.id == "b"
    assert queue(ticket("a"), ticket("b")).surplus(Policy()).ticket.id == "b"


def test_a_tenant_of_twice_the_weight_gets_twice_the_tokens() -> None:
    made = queue(*(ticket(f"{tenant}{i}", tenant) for i in range(4) for tenant in "ab"))
    assert order(made, shares={"a": Share(weight=2.0)}) == ["a0", "b0", "a1", "a2", "b1", "a3", "b2", "b3"]


def test_families_of_one_tenant_take_turns_by_the_quantum() -> None:
    made = queue(*(ticket(f"a{i}", family="a") for i in range(4)), ticket("b0", family="b"), ticket("b1", family="b"))
    assert order(made, family_quantum=1000) == ["a0", "a1", "a2", "a3", "b0", "b1"]
    # 100 tokens for the first of a family, with its head; 100 less what the head has for the others
    assert order(made, family_quantum=100) == ["a0", "b0", "a1", "a2", "b1", "a3"]


def test_a_family_pays_for_what_was_really_evaluated() -> None:
    made = queue(ticket("a1", family="a"), ticket("b1", family="b"))
    granted = made.granted(ticket("a0", family="a"), 90, Policy())
    made.settle(ticket("a0", family="a"), granted, 500, Policy())
    assert order(made, family_quantum=500) == ["b1", "a1"]
    made.settle(ticket("a0", family="a"), granted, 0, Policy())
    assert order(made, family_quantum=500) == ["a1", "b1"]


def test_what_was_charged_before_everybody_was_served_is_not_given_back_later() -> None:
    made = queue(ticket("a1", "a"), ticket("a2", "a"))
    charged = made.granted(ticket("a1", "a"), 500, Policy())
    made.granted(ticket("a2", "a"), 500, Policy())
    made.add(ticket("b3", "b"))
    made.add(ticket("a3", "a"))
    made.settle(ticket("a1", "a"), charged, 0, Policy())
    assert order(made) == ["b3", "a3"]


def test_whoever_was_passed_often_enough_goes_first() -> None:
    made = queue(ticket("big", family="a"))
    made.charge(ticket("", family="a"), 10_000, Policy())
    for number in range(3):
        made.add(replace(ticket(f"b{number}", family=f"b{number}")))
    assert order(made, family_quantum=500)[0] == "big"  # newcomers start where those who wait stand
    made.charge(ticket("", family="a"), 10_000, Policy())
    assert order(made, family_quantum=500)[-1] == "big"
    made.granted(ticket("b0", family="b0"), 1, Policy())
    made.granted(ticket("b1", family="b1"), 1, Policy())
    assert order(made, family_quantum=500, max_passed=3) == ["b2", "big"]
    assert order(made, family_quantum=500, max_passed=2) == ["big", "b2"]


def test_batch_waits_for_all_that_is_interactive_whatever_its_tenant_was_charged() -> None:
    made = queue(ticket("b", "b", priority=Priority.BATCH), ticket("a1", "a"), ticket("a2", "a"))
    charge(made, "a", 10_000)
    assert order(made) == ["a1", "a2", "b"]


def test_the_tenant_with_most_waiting_for_its_weight_is_turned_away_first() -> None:
    made = queue(ticket("a0", "a"), ticket("a1", "a"), ticket("a2", "a"), ticket("b0", "b"), ticket("b1", "b"))
    assert made.surplus(Policy()).ticket.id == "a2"
    assert made.surplus(Policy(shares={"a": Share(weight=3.0)})).ticket.id == "b1"


def test_accounts_of_families_are_bounded() -> None:
    accounts = Accounts()
    for number in range(MAX_FAMILIES + 2):
        one = ticket("x", family=str(number))
        accounts.join(one, [ticket("y", family="0")])
        accounts.charge(one, 1, Policy())
    assert len(accounts._families) < 10
