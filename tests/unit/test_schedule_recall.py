"""What slots held before a restart of the proxy is believed only where the server shows as much."""

from __future__ import annotations

import pytest

from prefixproxy.prefix import chain_of
from prefixproxy.schedule import Scheduler
from prefixproxy.schedule_slots import NOTHING, Held
from prefixproxy.schedule_types import Effect, Grant, Reason, SlotSeen, Ticket
from prefixproxy.types import Capabilities, SlotId, TicketId, UpstreamFacts

ALL = Capabilities(pin=True, observe=True, snapshot=True, warm=True, reports_cached=True, tokenize=True, template=True)
FACTS = UpstreamFacts(name="local", kind="llama-server", n_slots=2, model="m", build="b1", capabilities=ALL)
PROMPT = b"rules of the archive " * 40
N_TOKENS = len(PROMPT) // 4
HELD = Held(chain_of([PROMPT]), N_TOKENS, N_TOKENS + 7)


def mark() -> str:
    """The mark a scheduler gives to what it holds on this upstream."""
    s = Scheduler()
    s.upstream_up(FACTS, 0.0)
    return next(mark for _, mark, _ in s.residency())


def granted(seen_tokens: int, recalled_mark: str) -> Grant:
    """Where a prompt that extends what slot 1 held goes, if slot 1 is now seen to hold `seen_tokens`."""
    s = Scheduler()
    s.recall("local", recalled_mark, {1: HELD})
    s.upstream_up(FACTS, 0.0)
    s.slots_seen("local", {0: SlotSeen(False, 900), 1: SlotSeen(False, seen_tokens)}, 1.0)
    ticket = Ticket(TicketId("t"), chain_of([PROMPT, b"next"]), 0, "f", N_TOKENS, 2.0, 99.0, warmable=False)
    effects: list[Effect] = s.submit([ticket], 2.0)
    (grant,) = [effect for effect in effects if isinstance(effect, Grant)]
    return grant


def test_a_slot_that_still_holds_as_much_is_found_again() -> None:
    grant = granted(HELD.tokens, mark())
    assert (grant.slot, grant.reason) == (SlotId("local", 1), Reason.RESIDENT)
    assert grant.expected_cached > 0.9 * N_TOKENS


@pytest.mark.parametrize(("seen", "recalled_mark"), [(HELD.tokens + 300, None), (20, None), (HELD.tokens, "another")])
def test_another_count_or_another_server_makes_it_unknown(seen: int, recalled_mark: str | None) -> None:
    assert granted(seen, recalled_mark or mark()).expected_cached == 0


def test_what_is_written_down_is_what_is_believed() -> None:
    s = Scheduler()
    s.recall("local", mark(), {1: HELD})
    s.upstream_up(FACTS, 0.0)
    assert [held for _, _, held in s.residency()] == [NOTHING, NOTHING], "nothing is certain before a look"
    s.slots_seen("local", {0: SlotSeen(False, 0), 1: SlotSeen(False, HELD.tokens)}, 1.0)
    assert [(slot.slot, held) for slot, _, held in s.residency()] == [(0, NOTHING), (1, HELD)]
