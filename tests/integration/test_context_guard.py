"""Prompts that no slot can take are refused before they wait, with numbers; those that fit never are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import eventually, proxied_stub, proxy_in_thread, running_proxy, until_ready
from stub_upstream import Exchange, StubUpstream

from prefixproxy.schedule.types import HoldReason

CHAT = "/v1/chat/completions"


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def code_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


def counted(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(f"prefixproxy_{name}{{"))


# the real engine


@pytest.fixture
def small(engine_factory: Callable[..., RunningEngine]) -> RunningEngine:
    return engine_factory(parallel=2, ctx=2048)


def n_ctx_slot(engine: RunningEngine) -> int:
    return int(httpx.get(f"{engine.url}/props").json()["default_generation_settings"]["n_ctx"])


@pytest.mark.parametrize("asked", [1, 20, 500])
def test_the_longest_prompt_that_fits_is_answered_in_full_and_one_token_more_is_refused(
    small: RunningEngine, asked: int
) -> None:
    n_ctx = n_ctx_slot(small)
    longest = n_ctx - min(asked, 128)
    with proxy_in_thread(small.url) as proxy:
        for length in (longest - 1, longest, longest + 1):
            ids = [1000 + i % 5000 for i in range(length)]
            body = {"prompt": ids, "n_predict": asked, "ignore_eos": True, "cache_prompt": False}
            answer = post(proxy.url, "/completion", body)
            if length <= longest:
                assert answer.status_code == 200
                assert answer.json()["tokens_evaluated"] == length
                assert answer.json()["tokens_predicted"] == min(asked, n_ctx - length)
            else:
                assert (answer.status_code, code_of(answer)) == (400, "context_length_exceeded")
                assert answer.json()["error"]["n_prompt_tokens"] == length
                assert answer.json()["error"]["n_ctx_slot"] == n_ctx


def chat_of(engine: RunningEngine, n_tokens: int) -> dict[str, Any]:
    """A chat of exactly so many tokens, by the server's own count."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": ""}], "max_tokens": 4}
    words = n_tokens
    while True:
        body["messages"][0]["content"] = " hello" * words
        got = post(engine.url, f"{CHAT}/input_tokens", body).json()["input_tokens"]
        if got == n_tokens:
            return body
        words += n_tokens - got


def test_chats_are_counted_as_the_server_counts_them(small: RunningEngine) -> None:
    n_ctx = n_ctx_slot(small)
    with proxy_in_thread(small.url) as proxy:
        for length, status in ((n_ctx - 5, 200), (n_ctx - 4, 200), (n_ctx - 3, 400)):
            body = chat_of(small, length)
            responses = {"input": body["messages"], "max_output_tokens": 4}
            for path, asked in ((CHAT, body), ("/v1/messages", body), ("/v1/responses", responses)):
                answer = post(proxy.url, path, asked)
                assert answer.status_code == status, (path, length, answer.text)
                if status == 400:
                    assert answer.json()["error"]["code"] == "context_length_exceeded"
                    assert answer.json()["error"]["n_prompt_tokens"] == length
        text = post(proxy.url, "/v1/completions", {"prompt": " hello" * n_ctx, "max_tokens": 4})
        assert code_of(text) == "context_length_exceeded"
        metrics = httpx.get(f"{proxy.url}/metrics").text
        records = httpx.get(f"{proxy.url}/prefixproxy/requests").json()["requests"]
    assert counted(metrics, "context_rejected_total") == 4
    assert [record["context_exceeded"] for record in records] == [True] * 4 + [False] * 6
    assert {(r["outcome"], r["prompt_tokens"], r["slot"]) for r in records[1:4]} == {("rejected", n_ctx - 3, None)}


# a stub: a token is a byte of its /tokenize


def tokens(n: int) -> str:
    """Text of `n` of the stub's tokens, which the estimate takes for about as many."""
    return "\ua66e" * (n // 3) + "x" * (n % 3)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "stub", "messages": [{"role": "user", "content": text}], **more}


@pytest.mark.anyio
async def test_warn_sends_what_does_not_fit_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async with proxied_stub(StubUpstream(n_ctx_slot=1000), context__on_exceed="warn") as (stub, proxy):
        async with httpx.AsyncClient() as client:
            answer = await client.post(proxy.url + CHAT, json=chat(tokens(990)))
            records = (await client.get(f"{proxy.url}/prefixproxy/requests")).json()["requests"]
        assert answer.status_code == 200
        assert len(stub.generating()) == 1
    assert [record["context_exceeded"] for record in records] == [True]
    assert "does not fit" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("case", ["unknown context", "image", "cannot be counted", "several prompts"])
async def test_what_cannot_be_judged_is_never_refused(case: str) -> None:
    upstream = StubUpstream(n_ctx_slot=100)
    path, body = CHAT, chat("word " * 500)

    async def no(exchange: Exchange) -> None:
        await exchange.json(500, {"error": {"message": "no"}})

    if case == "unknown context":
        upstream.n_ctx_slot = None  # type: ignore[assignment]
    elif case == "image":
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body["messages"][0]["content"] = [{"type": "text", "text": "word " * 500}, image]
    elif case == "cannot be counted":
        upstream.routes["/apply-template"] = no
    else:
        path, body = "/completion", {"prompt": ["word " * 500, "word"]}
    async with proxied_stub(upstream) as (stub, proxy), httpx.AsyncClient() as client:
        await client.post(proxy.url + path, json=body)
        assert len(stub.generating()) == 1


@pytest.mark.anyio
async def test_a_short_prompt_is_not_counted_at_all() -> None:
    async with proxied_stub() as (stub, proxy), httpx.AsyncClient() as client:
        assert (await client.post(proxy.url + CHAT, json=chat("word " * 100))).status_code == 200
        assert not [seen for seen in stub.requests if seen.path in ("/tokenize", f"{CHAT}/input_tokens")]


TENANTS = [
    {"name": "small", "api_key": "s", "max_context": 600},
    {"name": "free", "api_key": "f"},
]


@pytest.mark.anyio
async def test_a_tenant_has_a_limit_of_its_own_for_prompt_and_asked_answer() -> None:
    async with proxied_stub(tenants=TENANTS) as (stub, proxy), httpx.AsyncClient() as client:

        async def ask(key: str, n_tokens: int, asked: int) -> httpx.Response:
            body = chat(tokens(n_tokens), max_tokens=asked)
            return await client.post(proxy.url + CHAT, json=body, headers={"x-api-key": key})

        assert (await ask("s", 500, 100)).status_code == 200
        refused = await ask("s", 501, 100)
        assert (refused.status_code, code_of(refused)) == (400, "context_length_exceeded")
        assert refused.json()["error"]["max_context"] == 600
        assert "small" in refused.json()["error"]["message"]
        assert (await ask("f", 501, 100)).status_code == 200
        metrics = (await client.get(f"{proxy.url}/metrics")).text
        assert len(stub.generating()) == 2
    assert 'admission_rejected_total{reason="tenant_limit"} 1.0' in metrics
    assert counted(metrics, "context_rejected_total") == 0


# slots below the minimum


@pytest.mark.anyio
async def test_an_upstream_with_too_small_slots_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"context__min_n_ctx_slot": 8192, "wait_ready": False}
    async with StubUpstream(n_ctx_slot=1365) as stub, running_proxy(stub.url, **settings) as proxy:
        keeper = proxy.proxy.parts.dispatcher.keepers["local"]
        await eventually(lambda: keeper.state.failure)
        async with httpx.AsyncClient() as client:
            answer = await client.post(proxy.url + CHAT, json=chat("hello"))
            assert (answer.status_code, code_of(answer)) == (503, "upstream_unavailable")
            upstream = (await client.get(f"{proxy.url}/prefixproxy/status")).json()["upstreams"][0]
            assert not upstream["up"]
            assert "1365" in upstream["failure"]
            assert "context.min_n_ctx_slot" in answer.json()["error"]["message"]
            assert (await client.get(f"{proxy.url}/readyz")).status_code == 503
            stub.n_ctx_slot = 8192  # restarted with a larger context
            keeper.state.probe_now.set()
            await until_ready(proxy.url)
            assert (await client.post(proxy.url + CHAT, json=chat("hello"))).status_code == 200
    assert caplog.text.count("context.min_n_ctx_slot asks") == 1


@pytest.mark.anyio
async def test_with_warn_it_serves_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"context__min_n_ctx_slot": 8192, "context__on_exceed": "warn"}
    async with proxied_stub(StubUpstream(n_ctx_slot=1365), **settings) as (_stub, proxy):
        async with httpx.AsyncClient() as client:
            assert (await client.post(proxy.url + CHAT, json=chat("hello"))).status_code == 200
            upstream = (await client.get(f"{proxy.url}/prefixproxy/status")).json()["upstreams"][0]
    assert "context.min_n_ctx_slot asks for 8192" in upstream["warning"]
    assert caplog.text.count("context.min_n_ctx_slot asks") == 1


# slots of a tenant


@pytest.mark.anyio
async def test_a_tenant_runs_in_no_more_slots_than_it_may_and_the_others_get_the_rest() -> None:
    tenants = [{"name": "two", "api_key": "2", "max_slots": 2}, {"name": "free", "api_key": "f"}]
    go = asyncio.Event()

    async def held(exchange: Exchange) -> None:
        await go.wait()
        await exchange.json(200, {"choices": []})

    async with proxied_stub(StubUpstream(n_slots=4), tenants=tenants) as (stub, proxy):
        stub.next_answers.extend([held] * 4)
        async with httpx.AsyncClient(timeout=60) as client, asyncio.TaskGroup() as group:

            def ask(key: str, text: str, **more: Any) -> asyncio.Task[httpx.Response]:
                body, headers = chat(text, **more), {"x-api-key": key}
                return group.create_task(client.post(proxy.url + CHAT, json=body, headers=headers))

            refused = await ask("2", "many", n=3)
            assert (refused.status_code, code_of(refused)) == (400, "tenant_limit")
            first = [ask("2", f"lane {i}") for i in range(3)]
            await stub.arrived(2)
            await eventually(lambda: len(proxy.proxy.parts.dispatcher.snapshot().waiting) == 1)
            others = [ask("f", f"other {i}") for i in range(2)]
            await stub.arrived(4)
            waiting = proxy.proxy.parts.dispatcher.snapshot().waiting
            assert [one.hold for one in waiting] == [HoldReason.TENANT_SLOTS]
            go.set()
            assert {(await each).status_code for each in first + others} == {200}
            metrics = (await client.get(f"{proxy.url}/metrics")).text
    assert 'admission_rejected_total{reason="tenant_limit"} 1.0' in metrics
