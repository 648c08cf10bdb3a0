"""What `/prefixproxy/requests/{id}` tells about a request that went through, and what the status suggests."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from running_proxy import RunningProxy, proxied_stub

from prefixproxy.journal import RECORD_FIELDS

pytestmark = pytest.mark.anyio

BRIEFING = "You are one of several agents.\n" + "".join(
    f"Rule {n}: check section {n} of the report.\n" for n in range(40)
)


def body(system: str, *texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}, *messages]}


async def explained(running: RunningProxy, sent: dict[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=sent)
        assert answer.status_code == 200, answer.text
        record = await client.get(f"/prefixproxy/requests/{answer.headers['x-prefixproxy-request-id']}")
        out: dict[str, Any] = record.json()
        return out


async def test_the_strip_and_the_rule_that_acted_stand_beside_the_record() -> None:
    async with proxied_stub() as (_, running):
        record = await explained(
            running, body(f"Current time: 2026-11-29 15:35:46\n{BRIEFING}", "One?", "Yes.", "Two?")
        )
    explain = record["explain"]
    assert set(record) == {*RECORD_FIELDS, "explain"}
    assert [(s["segment"], s["part"]) for s in explain["strip"]] == [
        ("system[0]", "root"),
        ("user[1]", "history"),
        ("assistant[2]", "history"),
        ("user[3]", "tail"),
    ]
    assert sum(s["tokens"] for s in explain["strip"]) == record["prompt_tokens"]
    assert [(m["rule"], m["segments"], m["done"]) for m in explain["moved"]] == [("clock", ["system[0]"], True)]
    assert "clock" in explain["moved"][0]["advice"]
    assert explain["cost"]["seconds_are"] == "reported"
    assert "agents" not in str(record), "no text, unless it is asked for"


async def test_a_changed_root_is_found_and_with_text_it_is_shown() -> None:
    async with proxied_stub(journal__store_text=True) as (_, running):
        first = await explained(running, body(BRIEFING, "One?"))
        second = await explained(running, body(BRIEFING.replace("several", "some"), "One?"))
    difference = second["explain"]["first_difference"]
    assert second["miss_reason"] == "root_changed"
    assert (difference["segment"], difference["compared_with"], difference["exact"]) == ("system[0]", first["id"], True)
    assert difference["common"].endswith("You are one of s")
    assert difference["before"].startswith("everal agents")
    assert difference["now"].startswith("ome agents")
    assert second["explain"]["strip"][1]["text"] == "One?"
    assert "suggested rule" in second["explain"]["advice"]


async def test_observing_says_what_would_have_been_moved() -> None:
    async with proxied_stub(stabilise__mode="observe") as (_, running):
        record = await explained(running, body(f"Current time: 2026-11-29 15:35:46\n{BRIEFING}", "One?"))
    assert [(m["rule"], m["done"]) for m in record["explain"]["moved"]] == [("clock", False)]


async def test_a_long_conversation_is_told_what_compacting_would_cost_and_what_it_did() -> None:
    turns = ["One? " * 200, "Yes. " * 200, "Two? " * 200, "Yes. " * 200, "Three? " * 200]
    async with proxied_stub() as (_, running):
        for n in (1, 3):
            assert (await explained(running, body(BRIEFING * 3, *turns[:n])))["explain"]["re_evaluated_tokens"] is None
        third = await explained(running, body(BRIEFING * 3, *turns))
        compacted = await explained(running, body(BRIEFING * 3, "So far: two answers.", turns[3], turns[4]))
    price = third["explain"]["compaction"]
    assert price["turns_seen"] == 3
    assert price["carry_on"]["next_turn"] == price["growth_tokens"]
    assert price["root_tokens"] + price["history_tokens"] == third["prompt_tokens"]
    assert compacted["kind"] == "compaction"
    assert compacted["explain"]["re_evaluated_tokens"] == compacted["prompt_n"]


async def test_the_status_suggests_rules_and_the_trend_counts() -> None:
    async with proxied_stub() as (_, running), httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        records = [await explained(running, body(f"{BRIEFING}Build {n}7f ready to check.", "One?")) for n in "abc"]
        status = (await client.get("/prefixproxy/status")).json()
        trend = (await client.get("/prefixproxy/trend")).json()
        listed = (await client.get("/prefixproxy/requests")).json()
    (suggestion,) = status["suggestions"]
    assert (suggestion["segment"], suggestion["line"], suggestion["values"]) == ("system[0]", 42, 3)
    assert suggestion["toml"].startswith("[[rule]]")
    assert suggestion["seconds_ago"] >= 0
    assert trend["total"]["requests"] == listed["last"] == 3
    evaluated = sum(r["prompt_n"] for r in records) + sum(w["tokens"] or 0 for w in trend["warmups"])
    assert trend["total"]["evaluated"] == sum(step["evaluated"] for step in trend["steps"]) == evaluated
