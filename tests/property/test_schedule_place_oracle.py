"""Where one ticket goes, against every place it could go, priced by hand from plain bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from math import exp2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixproxy.prefix import BLOCK_ENDS, blocks_within, chain_of
from prefixproxy.schedule.fleet import Fleet
from prefixproxy.schedule.place import Placement
from prefixproxy.schedule.plan import Hold, Place, Server
from prefixproxy.schedule.queue import Queue
from prefixproxy.schedule.roots import Root, RootState, root_id
from prefixproxy.schedule.slot import NOTHING, Held
from prefixproxy.schedule.slots import REUSE_CHANCE, REUSE_HALF_LIFE_S
from prefixproxy.schedule.types import HoldReason, Policy, Reason, Ticket
from prefixproxy.schedule.work import recount
from prefixproxy.types import Capabilities, TicketId, UpstreamFacts

FULL = Capabilities(pin=True, observe=True, snapshot=True, warm=True)
PIECES = [b"a" * 640, b"b" * 640, b"a" * 2560, b"c" * 1280]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=4).map(b"".join)
NOW = 1000.0
RESTORE_S = 0.1


@dataclass(frozen=True)
class Row:
    text: bytes
    answer: int
    idle: bool
    age_s: float


ROWS = st.builds(
    Row, TEXTS, st.integers(0, 300), st.sampled_from([True, True, False]), st.sampled_from([0.0, 60.0, 900.0])
)


@dataclass(frozen=True)
class Case:
    """One upstream: its slots, the texts it has snapshots of, its prefill rate, and whether it keeps in its own memory
    what loses its slot."""

    rows: list[Row]
    saved: list[bytes]
    rate: float
    keeps: bool


CASES = st.lists(
    st.builds(
        Case,
        st.lists(ROWS, min_size=1, max_size=3),
        st.lists(TEXTS.filter(len), max_size=2),
        st.sampled_from([50.0, 400.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=2,
)


def blocks(a: bytes, b: bytes) -> int:
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    return blocks_within(shared)


def tokens(n_blocks: int) -> int:
    return (BLOCK_ENDS[n_blocks - 1] if n_blocks else 0) // 4


def price(case: Case, row: Row, prompt: bytes, copy: bytes | None) -> float:
    """Seconds: evaluate what is not there, copy, and what is overwritten and is nowhere else."""
    cached = tokens(blocks(prompt, row.text if copy is None else copy))
    cost_s = (len(prompt) // 4 - cached) / case.rate + (0.0 if copy is None else RESTORE_S)
    stays = blocks(prompt, row.text)
    next_turn = stays == blocks_within(len(row.text)) and len(prompt) >= len(row.text) + 2 * row.answer
    if (copy is None and next_turn) or (row.text in case.saved and not row.answer):
        return cost_s
    if copy is None and case.keeps and tokens(stays) < (len(row.text) // 4 + row.answer) / 2:
        return cost_s
    elsewhere = [other.text for other in case.rows if other is not row] + case.saved
    kept = max([stays] + [blocks(row.text, text) for text in elsewhere])
    lost = max(0, len(row.text) // 4 + row.answer - tokens(kept)) if row.text else 0
    return cost_s + lost / case.rate * REUSE_CHANCE * exp2(-row.age_s / REUSE_HALF_LIFE_S)


def cheapest(cases: list[Case], prompt: bytes) -> float | None:
    prices = [
        price(case, row, prompt, copy)
        for case in cases
        for row in case.rows
        if row.idle
        for copy in [None, *case.saved]
    ]
    return min(prices, default=None)


def held(text: bytes, answer: int = 0) -> Held:
    return Held(chain_of([text]), len(text) // 4, len(text) // 4 + answer) if text else NOTHING


def join(fleet: Fleet, number: int, case: Case) -> Server:
    ram_mib = 8192 if case.keeps else 0
    facts = UpstreamFacts(f"u{number}", "llama-server", len(case.rows), capabilities=FULL, ram_mib=ram_mib)
    built = fleet.obtain(facts)
    built.slots.open(0.0, {})
    fleet.changed()
    built.slots.rates.prefill = case.rate
    for slot, row in zip(built.slots.slots, case.rows, strict=True):
        built.slots.hold(slot, held(row.text, row.answer))
        if row.idle:
            built.slots.free(slot, 0.0)
        slot.last_used = NOW - row.age_s
    for text in case.saved:
        chain = chain_of([text])
        name = root_id(chain, facts.name)
        built.roots.add(Root(name, chain, "f", len(text) // 4, RootState.READY, "file", 1, held(text)))
    recount(built)
    return built


def decide(cases: list[Case], prompt: bytes) -> Place | Hold:
    """The decision for a ticket that waits for nothing: every hold has run out for it."""
    queue = Queue()
    n_tokens = len(prompt) // 4
    queue.add(Ticket(TicketId("t"), chain_of([prompt]), 0, "f", n_tokens, NOW, NOW + 60))
    [waiting] = queue
    waiting.plain = Reason.HOLD_EXPIRED
    fleet = Fleet()
    for i, case in enumerate(cases):
        join(fleet, i, case)
    decision = Placement(fleet, [waiting], queue.counts, Policy(), NOW, 0).decide(waiting)
    assert isinstance(decision, Place | Hold)
    return decision


@settings(max_examples=400, deadline=None)
@given(CASES, TEXTS.filter(len))
def test_the_cheapest_place_is_taken(cases: list[Case], prompt: bytes) -> None:
    decision, least_s = decide(cases, prompt), cheapest(cases, prompt)
    if least_s is None:
        assert decision == Hold(HoldReason.NO_SLOT)
    else:
        assert isinstance(decision, Place)
        assert decision.slot.idle
        assert decision.cost_s == pytest.approx(least_s, abs=0.02)
