"""Around the limit: whoever fits is let through, whoever is refused was counted by the server."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixproxy.backends import Backend
from prefixproxy.body import Body
from prefixproxy.chat import canonical, parse_prompt
from prefixproxy.context import ContextLimits
from prefixproxy.errors import ContextLengthExceeded, UpstreamFailed
from prefixproxy.exchange import Exchange, Hints, Times
from prefixproxy.fleet import Fleet
from prefixproxy.guard import ContextGuard, TenantLimits
from prefixproxy.plan import Plan
from prefixproxy.prefix import chain_of
from prefixproxy.types import Api, TicketId, UpstreamFacts
from prefixproxy.upkeep import Health, Upkeep, UpstreamState

LETTERS = "ab \ua66e\n1{"


class Tokenizer:
    """An upstream whose tokenizer makes a token of every `size` characters, and which may refuse to count."""

    def __init__(self, size: int, counts: bool) -> None:
        self.size, self.counts = size, counts

    def length(self, text: str) -> int:
        return 3 + len(text.encode()) // self.size

    async def count_tokens(self, api: Api, body: dict[str, Any], sent: bytes) -> int:
        if not self.counts:
            raise UpstreamFailed("no such endpoint")
        return self.length(body["messages"][0]["content"])


def exchange_of(text: str, asked: int | None) -> Exchange:
    data: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if asked is not None:
        data["max_tokens"] = asked
    body = Body.parse(orjson.dumps(data))
    prompt = parse_prompt(Api.CHAT, body)
    assert prompt is not None
    form = canonical(prompt)
    plan = Plan(Api.CHAT, body, prompt, (), (), "", "", form, chain_of(form.parts), 0)
    return Exchange(TicketId("t"), "", Api.CHAT, Hints(), "team", 0.0, Times(0.0), plan=plan)


def guard_of(upstream: Tokenizer, n_ctx_slot: int | None, minimum: int, max_context: int) -> ContextGuard:
    state = UpstreamState(cast(Backend, upstream), Health.UP, UpstreamFacts("u", "llama-server", 2, n_ctx_slot))
    keeper = cast(Upkeep, type("Keeper", (), {"state": state}))
    return ContextGuard(
        Fleet({"u": keeper}), ContextLimits(min_generation=minimum), {"team": TenantLimits(0, max_context)}
    )


def refusal(guard: ContextGuard, exchange: Exchange) -> ContextLengthExceeded | None:
    try:
        asyncio.run(guard.check(exchange))
    except ContextLengthExceeded as refused:
        return refused
    return None


texts = st.builds(
    lambda unit, times, end: unit * times + end,
    st.text(LETTERS, min_size=1, max_size=6),
    st.integers(1, 600),
    st.text(LETTERS, max_size=20),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(texts, st.one_of(st.none(), st.integers(0, 200))), min_size=1, max_size=4),
    st.integers(1, 9),
    st.booleans(),
    st.one_of(st.none(), st.integers(-2, 2).map(lambda near: ("near", near)), st.integers(64, 4000)),
    st.sampled_from([0, 1, 128]),
    st.sampled_from([0, 0, 500]),
)
@example([("a " * 500, 100)], 2, True, ("near", 0), 128, 0)
@example([("a " * 500, 100)], 2, True, ("near", -1), 128, 0)
def test_a_request_that_fits_is_never_refused(
    requests: list[tuple[str, int | None]],
    size: int,
    counts: bool,
    context: tuple[str, int] | int | None,
    minimum: int,
    max_context: int,
) -> None:
    upstream = Tokenizer(size, counts)
    if isinstance(context, tuple):
        # so that the first request fits to the token, or is one or two beside
        text, asked = requests[0]
        context = upstream.length(text) + ContextLimits(min_generation=minimum).generation(asked) + context[1]
    guard = guard_of(upstream, context, minimum, max_context)
    for text, asked in requests:
        exchange, length = exchange_of(text, asked), upstream.length(text)
        needed = ContextLimits(min_generation=minimum).generation(asked)
        in_slot = context is None or length + needed <= context
        in_share = not max_context or length + (asked or 0) <= max_context
        refused = refusal(guard, exchange)
        if refused is not None:
            assert counts
            assert not (in_slot and in_share)
            assert refused.details["n_prompt_tokens"] == length
            assert exchange.measured.exceeded == ("slot" if in_share else "tenant")
        else:
            # what was let through although it does not fit was an estimate's mistake, never a count's
            assert exchange.measured.exact is None or (in_slot and in_share)
