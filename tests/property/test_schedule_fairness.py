"""Fair shares, played out on virtual servers: no tenant takes more slots than it may, and who is kept waiting is not
kept behind by more than its share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_sim import NO_SNAPSHOT, Sim, SimServer, facts, request, words

from prefixproxy.schedule import place as schedule_place
from prefixproxy.schedule.queue import Queue
from prefixproxy.schedule.turns import Accounts, Turn
from prefixproxy.schedule.types import Policy, Share, Ticket
from prefixproxy.simulate.run import Request
from prefixproxy.simulate.text import EMPTY
from prefixproxy.types import Priority, TicketId

ROOTS = {name: words(name, 120) for name in "pqr"}


class Watched(Sim):
    """A sim that counts, at every grant, the slots of each tenant."""

    def __init__(self, servers: list[SimServer], policy: Policy) -> None:
        super().__init__(servers, policy)
        self.most: Counter[str] = Counter()

    def _grant(self, grant: object) -> None:
        super()._grant(grant)  # type: ignore[arg-type]
        running = [one for one in self.requests.values() if one.ends == "running"]
        held = Counter[str]()
        for one in running:
            held[one.ticket.tenant] += one.ticket.n_seqs
        for tenant, n in held.items():
            self.most[tenant] = max(self.most[tenant], n)


requests = st.builds(
    lambda tenant, root, lane, at, batch, several, gone: (
        request(
            ROOTS[root],
            words(f"lane {lane}", 30),
            at=at,
            tenant=tenant,
            priority=Priority.BATCH if batch else Priority.INTERACTIVE,
            n_seqs=2 if several else 1,
            pinnable=not several,
        ),
        gone,
    ),
    st.sampled_from(["", "a", "a", "b"]),
    st.sampled_from("pqr"),
    st.integers(0, 40),
    st.sampled_from([0.0, 0.0, 0.1, 1.0, 3.0]),
    st.booleans(),
    st.sampled_from([False] * 7 + [True]),
    st.sampled_from([None, None, None, 0.2, 2.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=16),
    st.integers(2, 3),
    st.integers(0, 3),
    st.sampled_from([True, False]),
    st.sampled_from(["cost", "fifo"]),
)
def test_no_tenant_has_more_slots_than_it_may_and_all_are_served(
    wanted: list[tuple[Request, float | None]], limit_a: int, limit_b: int, fork: bool, kind: str
) -> None:
    limit_b = limit_b if limit_b != 1 else 2  # a request for two answers needs two
    shares = {"a": Share(max_slots=limit_a), "b": Share(weight=3.0, max_slots=limit_b)}
    policy = Policy(shares=shares, fork=fork, policy="fifo" if kind == "fifo" else "cost")
    sim = Watched([SimServer(facts(n_slots=4))], policy)
    for one, gone in wanted:
        sim.submit(one.ticket.arrived, one)
        if gone is not None:
            sim.cancel(one.ticket.arrived + gone, one)
    sim.run()
    assert sim.most["a"] <= limit_a
    assert not limit_b or sim.most["b"] <= limit_b
    assert {one.ends for one, gone in wanted if gone is None} <= {"ok"}
    assert all(not server.violations for server in sim.servers.values())


def test_without_the_check_the_property_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_place, "is_over", lambda ticket, servers, policy: False)
    sim = Watched([SimServer(facts(n_slots=4))], Policy(shares={"a": Share(max_slots=2)}))
    sim.submit(0.0, *(request(ROOTS["p"], words(f"lane {i}", 30), tenant="a") for i in range(4)))
    sim.run()
    assert sim.most["a"] == 4


def evaluated(sim: Sim, until: float, by: str) -> Counter[str]:
    """Tokens of all prompts that had their first token by then, less what was cached."""
    out: Counter[str] = Counter()
    for one in sim.requests.values():
        if 0 <= one.first_token_at <= until:
            out[one.ticket.tenant if by == "tenant" else one.ticket.family] += len(one.prompt) - one.cached
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1.0, 2.0, 3.0]),
    st.lists(st.integers(60, 400), min_size=3, max_size=12),
    st.lists(st.integers(60, 400), min_size=3, max_size=12),
    st.integers(1, 3),
)
def test_tenants_share_the_prefill_by_weight(weight: float, a: list[int], b: list[int], n_slots: int) -> None:
    """While both have requests waiting, neither is ahead of its share by more than what each slot has just taken."""
    sim = Sim([SimServer(facts(n_slots=n_slots, capabilities=NO_SNAPSHOT))], Policy(shares={"a": Share(weight=weight)}))
    lines = {"a": a * 4, "b": b * 4}
    for tenant, lengths in lines.items():
        made = [request(EMPTY, words(f"{tenant}{i}", n), tenant=tenant, answer=3) for i, n in enumerate(lengths)]
        sim.submit(0.0, *made)
    sim.run()
    last = {t: max(r.granted_at for r in sim.requests.values() if r.ticket.tenant == t) for t in lines}
    spent = evaluated(sim, min(last.values()), "tenant")
    slack = 2 * (n_slots + 1) * max(a + b)
    assert abs(spent["a"] / weight - spent["b"]) <= slack


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(100, 400), min_size=2, max_size=8), st.integers(3, 30))
def test_a_flood_of_one_family_holds_up_another_by_one_quantum(flood: list[int], n: int) -> None:
    policy = Policy(family_quantum=500)
    sim = Sim([SimServer(facts(n_slots=1, capabilities=NO_SNAPSHOT))], policy)
    lengths = [flood[i % len(flood)] for i in range(n)]
    sim.submit(
        0.0, *(tagged(request(EMPTY, words(f"f{i}", length), answer=3), "flood") for i, length in enumerate(lengths))
    )
    late = tagged(request(EMPTY, words("late", 100), answer=3, at=0.2), "late")
    sim.submit(0.2, late)
    sim.run()
    before = [r for r in sim.requests.values() if r is not late and r.granted_at <= late.granted_at]
    assert sum(len(r.prompt) for r in before) <= 500 + 2 * max(lengths)


def tagged(one: Request, family: str) -> Request:
    one.ticket = replace(one.ticket, family=family)
    return one


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 5))
def test_newcomers_pass_an_old_ticket_only_so_often(rate: int, max_passed: int) -> None:
    """However many new families come, each a little cheaper than what the old one was charged."""
    queue, policy, number = Queue(), Policy(family_quantum=100, max_passed=max_passed), count()
    old = ticket("old", "old")
    queue.add(old)
    queue.add(ticket("first", "first"))
    queue.charge(old, 100_000, policy)
    served = 0
    while queue.get(old.id) is not None:
        for i in range(rate):
            queue.add(ticket(f"new{next(number)}", f"family{served}-{i}"))
        first = queue.ordered(policy)[0].ticket
        queue.granted(first, first.n_tokens, policy)
        served += 1
    assert served == max_passed + 1


def ticket(name: str, family: str, tenant: str = "", n_tokens: int = 50) -> Ticket:
    made = request(EMPTY, words(name, n_tokens), tenant=tenant).ticket
    return replace(made, id=TicketId(name), family=family)


# the order against a plain deficit round robin


def round_robin(tickets: list[Ticket], quantum: int) -> list[TicketId]:
    """Deficit round robin over families as the textbook has it, each visit with a fresh quantum, a debt carried on."""
    lines: dict[str, list[Ticket]] = {}
    for one in tickets:
        lines.setdefault(one.family, []).append(one)
    spent = dict.fromkeys(lines, 0)
    rounds: list[tuple[int, int, TicketId]] = []
    for number, one in enumerate(tickets):
        rounds.append((spent[one.family] // quantum, number, one.id))
        spent[one.family] += one.n_tokens
    out: list[TicketId] = []
    for turn in range(max(r for r, _, _ in rounds) + 1):
        out += [name for r, _, name in sorted(rounds) if r == turn]
    return out


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.integers(1, 90)), min_size=1, max_size=20), st.integers(1, 200))
def test_families_are_served_as_deficit_round_robin_would(wanted: list[tuple[str, int]], quantum: int) -> None:
    tickets = [ticket(f"t{i}", family, n_tokens=n) for i, (family, n) in enumerate(wanted)]
    queue = Queue()
    for one in tickets:
        queue.add(one)
    got = [waiting.ticket.id for waiting in queue.ordered(Policy(family_quantum=quantum))]
    assert got == round_robin(tickets, quantum)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("pq"), st.integers(1, 90)), min_size=1, max_size=20),
    st.sampled_from([1.0, 2.0, 0.5]),
)
def test_the_order_is_fair_at_every_point_of_it(wanted: list[tuple[str, str, int]], weight: float) -> None:
    """Start-time fair queueing: whoever is next stands no further than anybody else who still waits."""
    policy = Policy(shares={"a": Share(weight=weight)})
    queue = Queue()
    for number, (tenant, family, n) in enumerate(wanted):
        queue.add(ticket(f"t{number}", family, tenant, n))
    spent: Counter[str] = Counter()
    line: list[Turn] = list(queue.ordered(policy))
    for place, turn in enumerate(line):
        tenant = turn.ticket.tenant
        share = {t: spent[t] / (weight if t == "a" else 1.0) for t in "abc"}
        assert all(share[tenant] <= share[later.ticket.tenant] + 1e-9 for later in line[place:])
        spent[tenant] += turn.ticket.n_tokens


def test_an_account_nobody_charged_is_at_zero() -> None:
    assert Accounts().order([], Policy()) == []
