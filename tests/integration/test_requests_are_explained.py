"""What `/prefixproxy/requests/{id}` tells about a request that went through, and what the status suggests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from running_proxy import RunningProxy, proxied_stub
from starlette.types import Message
from stub_upstream import Exchange, StubUpstream

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


async def test_a_record_can_be_asked_for_as_soon_as_the_answer_is_there() -> None:
    """The record is made when the last byte has left: whoever asks in that moment waits for it."""
    found: list[asyncio.Task[httpx.Response]] = []
    seen: dict[str, str] = {}

    async with (
        proxied_stub() as (_, running),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=running.proxy.app), base_url="http://proxy") as client,
        asyncio.TaskGroup() as group,
    ):
        raw = json.dumps(body(BRIEFING, "One?")).encode()
        came: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            if not came:
                await asyncio.Event().wait()
            return came.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.update((name.decode(), value.decode()) for name, value in message["headers"])
            elif not message.get("more_body"):
                found.append(group.create_task(client.get(f"/prefixproxy/requests/{seen['x-prefixproxy-request-id']}")))
                for _ in range(100):
                    await asyncio.sleep(0)

        path = "/v1/chat/completions"
        head = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        await running.proxy.app({**head, "http_version": "1.1", "scheme": "http", "headers": []}, receive, send)
    (answer,) = [task.result() for task in found]
    assert (answer.status_code, answer.json()["outcome"]) == (200, "ok")


async def test_a_request_that_still_runs_has_no_record_yet_and_is_told_so() -> None:
    stub, go_on, begun = StubUpstream(), asyncio.Event(), asyncio.Event()

    async def held(exchange: Exchange) -> None:
        await exchange.stream_head()
        begun.set()
        await go_on.wait()
        await exchange.end()

    stub.next_answers.append(held)
    async with (
        proxied_stub(stub) as (_, running),
        httpx.AsyncClient(base_url=running.url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json={**body(BRIEFING, "One?"), "stream": True}) as answer,
    ):
        await begun.wait()
        url = f"{running.url}/prefixproxy/requests/{answer.headers['x-prefixproxy-request-id']}"
        async with httpx.AsyncClient(timeout=60) as other:
            early = await other.get(url)
        go_on.set()
        await answer.aread()
    assert early.status_code == 404
    assert "still runs" in early.json()["error"]["message"]


async def test_clients_that_name_the_only_model_differently_share_its_root() -> None:
    async with proxied_stub(journal__store_text=True) as (_, running):
        first = await explained(running, {**body(BRIEFING, "One?"), "model": "gpt-4o"})
        again = await explained(running, {**body(BRIEFING, "One?"), "model": "local"})
        lane = await explained(running, body(BRIEFING, "Two?"))
    assert (first["kind"], again["kind"], lane["kind"]) == ("root", "continuation", "fork")
    assert again["explain"]["first_difference"] is None
    assert lane["first_difference"]["segment"] == "user[1]"


async def test_requests_that_failed_are_no_misses_of_their_family() -> None:
    async def failing(exchange: Exchange) -> None:
        await exchange.json(500, {"error": {"message": "no", "type": "server_error", "code": 500}})

    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        first = await explained(running, body(BRIEFING, "One?"))
        stub.next_answers += [failing, failing]
        for text in ("Two?", "Three?"):
            assert (await client.post("/v1/chat/completions", json=body(BRIEFING, text))).status_code == 500
        (family,) = (await client.get("/prefixproxy/status")).json()["families"]
    assert (family["requests"], family["top_miss_reason"]) == (3, first["miss_reason"])


async def test_an_export_can_be_limited_to_the_newest() -> None:
    async with proxied_stub() as (_, running), httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        records = [await explained(running, body(BRIEFING, f"Question {n}?")) for n in range(3)]
        lines = (await client.get("/prefixproxy/requests?format=jsonl&limit=2")).text.splitlines()
        refused = await client.get("/prefixproxy/requests?format=jsonl&limit=none")
    assert [json.loads(line)["id"] for line in lines] == [record["id"] for record in records[1:]]
    assert refused.status_code == 400
