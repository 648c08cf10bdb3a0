"""In front of Ollama: bodies as they came, the queue is ours, streams of lines, what was reused, what was cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from running_proxy import RunningProxy, eventually, running_proxy, until_quiet
from scripted_ollama import ScriptedOllama

from prefixproxy.types import CacheSource, Outcome, RequestRecord

pytestmark = pytest.mark.anyio

ROOT = "You plan the work of a small team. " * 60
GENERATE = {"model": "tiny", "prompt": "Why? " * 100, "raw": True, "images": []}


def chat(text: str = "Why?", **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": ROOT}, {"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, **more}


@asynccontextmanager
async def before(
    ollama: ScriptedOllama, *, slots: int = 2, normalise: Sequence[str] = (), **settings: Any
) -> AsyncIterator[RunningProxy]:
    """The proxy in front of `ollama`. At the end: nothing held, nothing waiting, and no pin was ever sent."""
    async with ollama:
        upstream = {"name": "o", "url": ollama.url, "kind": "ollama", "slots": slots, "normalise": [*normalise]}
        async with running_proxy(ollama.url, upstreams=[upstream], **settings) as running:
            yield running
            await until_quiet(running)
            assert ollama.violations == []


def newest(running: RunningProxy) -> RequestRecord:
    return running.proxy.parts.telemetry.journal.newest(1)[0]


async def upstream_shown(running: RunningProxy) -> dict[str, Any]:
    """The upstream as the status shows it."""
    async with httpx.AsyncClient() as client:
        shown = (await client.get(f"{running.url}/prefixproxy/status")).json()["upstreams"][0]
    assert isinstance(shown, dict)
    return shown


async def post(running: RunningProxy, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/api/chat", chat()), ("/api/generate", GENERATE)])
async def test_the_answer_is_ollamas_own_and_measured(path: str, body: dict[str, Any], stream: bool) -> None:
    asked = {**body, "stream": stream}
    async with before(ScriptedOllama()) as running:
        ollama = running.proxy.parts.dispatcher.keepers["o"].state.backend
        async with httpx.AsyncClient(base_url=ollama.url) as straight:
            first = await straight.post(path, json=asked)
            direct = await straight.post(path, json=asked)
        answer = await post(running, path, asked)
        assert (first.status_code, answer.status_code) == (200, 200)
        assert answer.content == direct.content
        assert answer.headers["content-type"] == direct.headers["content-type"]
        record, last = newest(running), orjson.loads(direct.content.splitlines()[-1])
        assert record.cache_source is CacheSource.REPORTED
        assert (record.prompt_tokens, record.cache_n) == (last["prompt_eval_count"], last["prompt_eval_cached_count"])
        assert record.cache_n == (record.prompt_tokens or 0) - 1
        assert (record.slot, record.stream, record.upstream) == (None, stream, "o")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", chat(stream=False, options={"num_ctx": 4096, "seed": 1}, keep_alive=-1)),
        ("/api/generate", {**GENERATE, "context": [1, 2, 3]}),
        ("/v1/chat/completions", chat(stream=True, id_slot_hint=1)),
        ("/v1/chat/completions", chat(cache_prompt=True, n_predict=3)),
        ("/v1/completions", {"model": "tiny", "prompt": "Why?"}),
        ("/v1/responses", {"model": "tiny", "input": "Why?"}),
        ("/v1/messages", chat(max_tokens=5)),
    ],
)
async def test_a_body_goes_upstream_byte_for_byte(path: str, body: dict[str, Any]) -> None:
    """No slot, no progress, no stream that the client did not ask for."""
    raw = orjson.dumps(body, option=orjson.OPT_INDENT_2)
    ollama = ScriptedOllama()
    async with before(ollama) as running, httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post(path, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == 200
        assert [seen.body for seen in ollama.generating()] == [raw]
        assert newest(running).outcome is Outcome.OK


async def test_a_slot_the_client_names_is_not_passed_on() -> None:
    ollama = ScriptedOllama()
    async with before(ollama) as running:
        await post(running, "/v1/chat/completions", chat(id_slot=1))
        assert ollama.generating()[0].json() == chat()


@pytest.mark.parametrize(("path", "stream"), [("/v1/chat/completions", True), ("/v1/messages", True)])
async def test_event_streams_are_measured_where_they_tell(path: str, stream: bool) -> None:
    body = chat(stream=stream, stream_options={"include_usage": True}, max_tokens=5)
    async with before(ScriptedOllama()) as running:
        await post(running, path, body)
        await post(running, path, body)
        record = newest(running)
        assert (record.outcome, record.cache_source) == (Outcome.OK, CacheSource.REPORTED)
        assert record.cache_n == (record.prompt_tokens or 0) - 1


async def test_a_stream_that_tells_no_usage_is_not_guessed_at() -> None:
    async with before(ScriptedOllama()) as running:
        await post(running, "/v1/chat/completions", chat(stream=True))
        record = newest(running)
        assert (record.prompt_tokens, record.cache_n, record.cache_source) == (None, None, CacheSource.UNKNOWN)


async def test_an_old_version_is_inferred_from_the_prompt_that_its_model_was_loaded_for() -> None:
    async with before(ScriptedOllama("0.31.0")) as running:
        await post(running, "/api/chat", chat())
        assert (newest(running).cache_n, newest(running).cache_source) == (0, CacheSource.INFERRED)
        answer = await post(running, "/api/chat", chat("And why not?", stream=False))
        record = newest(running)
        assert record.cache_source is CacheSource.INFERRED
        assert (record.cache_n or 0) > 500
        assert answer.headers["x-prefixproxy-cache-n"] == str(record.cache_n)
        metrics = httpx.Response(200, content=running.proxy.parts.telemetry.metrics.render()[0]).text
        assert 'prefixproxy_cache_measurements_total{cache_source="inferred"} 2.0' in metrics
        assert 'source="cached"} ' not in [line for line in metrics.splitlines() if "prompt_tokens_total" in line]


async def test_old_versions_report_nothing_on_v1_and_nothing_is_made_up() -> None:
    async with before(ScriptedOllama("0.31.0")) as running:
        await post(running, "/v1/chat/completions", chat())
        assert newest(running).cache_source is CacheSource.UNKNOWN
        await post(running, "/v1/responses", {"model": "tiny", "input": "Why? " * 50})
        await post(running, "/v1/responses", {"model": "tiny", "input": "Why? " * 50})
        assert (newest(running).cache_n, newest(running).cache_source) == (None, CacheSource.UNKNOWN)


async def test_our_queue_is_the_bound() -> None:
    """Ollama lets any number wait inside it; they wait here, where they are counted and can be turned away."""
    ollama = ScriptedOllama(num_parallel=2)
    async with before(ollama, slots=2) as running:
        ollama.may_prefill.clear()
        async with asyncio.TaskGroup() as group:
            prompts = [{**GENERATE, "prompt": f"{i}"} for i in range(4)]
            tasks = [group.create_task(post(running, "/api/generate", body)) for body in prompts]
            await eventually(lambda: len(running.proxy.parts.dispatcher.snapshot().waiting) == 2)
            await ollama.arrived(2)
            ollama.may_prefill.set()
        assert [task.result().status_code for task in tasks] == [200] * 4
        assert (ollama.most_at_once, len(ollama.generating())) == (2, 4)


@pytest.mark.parametrize("path", ["/api/embed", "/v1/embeddings"])
async def test_embeddings_wait_in_our_queue_too(path: str) -> None:
    ollama = ScriptedOllama(num_parallel=1)
    async with before(ollama, slots=1) as running:
        ollama.may_prefill.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(post(running, "/api/chat", chat()))
            await ollama.arrived(1)
            embedded = group.create_task(post(running, path, {"model": "tiny", "input": "x"}))
            await eventually(lambda: len(running.proxy.parts.dispatcher.snapshot().waiting) == 1)
            assert not [seen for seen in ollama.requests if seen.path == path]
            ollama.may_prefill.set()
        assert embedded.result().json() == {"embeddings": [[0.0]]}


async def test_who_finds_the_queue_full_is_told_in_ollamas_shape() -> None:
    ollama = ScriptedOllama(num_parallel=1)
    async with before(ollama, slots=1, admission__queue_limit=1) as running:
        ollama.may_prefill.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(post(running, "/api/generate", {**GENERATE, "prompt": "0"}))
            await ollama.arrived(1)
            group.create_task(post(running, "/api/generate", {**GENERATE, "prompt": "1"}))
            await eventually(lambda: len(running.proxy.parts.dispatcher.snapshot().waiting) == 1)
            refused = await post(running, "/api/generate", {**GENERATE, "prompt": "2"})
            ollama.may_prefill.set()
        assert refused.status_code == 429
        assert isinstance(refused.json()["error"], str)
        assert int(refused.headers["retry-after"]) >= 1


async def test_followers_of_a_cold_root_wait_for_their_leaders_first_token() -> None:
    ollama = ScriptedOllama(num_parallel=4)
    async with before(ollama, slots=4) as running:
        ollama.may_prefill.clear()
        async with asyncio.TaskGroup() as group:
            lanes = [group.create_task(post(running, "/api/chat", chat(f"Question {i}"))) for i in range(4)]
            await eventually(lambda: len(running.proxy.parts.dispatcher.snapshot().waiting) == 3)
            await ollama.arrived(1)
            assert len(ollama.generating()) == 1
            assert {held.hold.value for held in running.proxy.parts.dispatcher.snapshot().waiting} == {"leader"}
            ollama.may_prefill.set()
        assert [lane.result().status_code for lane in lanes] == [200] * 4
        records = running.proxy.parts.telemetry.journal.newest(4)
        assert sum((record.cache_n or 0) > 400 for record in records) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_prompt_that_was_cut_is_reported(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    ollama = ScriptedOllama(n_ctx=1024)
    async with before(ollama) as running:
        await post(running, "/api/chat", chat())
        backend = running.proxy.parts.dispatcher.keepers["o"].state.backend
        await backend.health()
        long = chat("Read this. " * 800, stream=stream)
        await post(running, "/api/chat", long)
        record = newest(running)
        assert record.truncated
        assert (record.prompt_tokens, record.outcome) == (1024 - (1024 - 4) // 2, Outcome.OK)
        assert "cut a prompt of tiny" in caplog.text
        assert (await upstream_shown(running))["reported"]["truncated_prompts"] == 1
        await post(running, "/api/chat", chat())
        assert not newest(running).truncated


async def test_old_messages_that_were_dropped_are_reported() -> None:
    ollama = ScriptedOllama(n_ctx=1024)
    turns = [{"role": role, "content": "Talk. " * 60} for _ in range(12) for role in ("user", "assistant")]
    body = {"model": "tiny", "messages": [*turns, {"role": "user", "content": "Why?"}], "options": {"num_ctx": 1024}}
    async with before(ollama) as running:
        await post(running, "/api/chat", body)
        assert newest(running).truncated


async def test_ollamas_errors_pass_as_they_are() -> None:
    async with before(ScriptedOllama()) as running:
        answer = await post(running, "/api/chat", {**chat(), "model": "none"})
        assert (answer.status_code, answer.json()) == (404, {"error": "model 'none' not found"})
        answer = await post(running, "/v1/chat/completions", {**chat(), "model": "none"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        assert newest(running).outcome is Outcome.BAD_REQUEST


async def test_a_busy_server_is_not_taken_for_one_that_loads() -> None:
    """Ollama's own 503 passes, once, and the upstream stays up."""
    ollama = ScriptedOllama()
    busy = {"error": "server busy, please try again.  maximum pending requests exceeded"}
    async with before(ollama) as running:
        ollama.routes["/api/chat"] = lambda exchange: exchange.json(503, busy)
        answer = await post(running, "/api/chat", chat())
        assert (answer.status_code, answer.json()) == (503, busy)
        assert len(ollama.generating()) == 1
        assert running.proxy.parts.dispatcher.fleet.is_up


async def test_an_error_in_a_stream_is_the_streams_and_counts_as_one() -> None:
    ollama = ScriptedOllama()
    ollama.fails_with = "llama runner process has terminated"
    async with before(ollama) as running:
        answer = await post(running, "/api/chat", chat())
        assert orjson.loads(answer.content.splitlines()[-1]) == {"error": ollama.fails_with}
        assert (newest(running).status, newest(running).outcome) == (200, Outcome.UPSTREAM_ERROR)


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
async def test_a_stream_that_ends_without_its_last_line_is_a_failure(path: str) -> None:
    """The guard against repeated tokens ends it so, with no word to the client."""
    ollama = ScriptedOllama()
    async with before(ollama) as running:
        ollama.silent_end = True
        answer = await post(running, path, chat(stream=True))
        assert answer.status_code == 200
        assert newest(running).outcome is Outcome.UPSTREAM_ERROR


async def test_the_host_header_is_ollamas() -> None:
    """Bound to loopback it answers an unknown host with an empty 403."""
    async with before(ScriptedOllama()) as running, httpx.AsyncClient() as client:
        answer = await client.post(f"{running.url}/api/chat", json=chat(stream=False), headers={"host": "ai.example"})
        assert answer.status_code == 200
        assert (await client.get(running.url, headers={"host": "ai.example"})).text == "Ollama is running"


async def test_the_last_line_is_read_behind_a_long_context() -> None:
    ollama = ScriptedOllama(n_ctx=1 << 20)
    async with before(ollama) as running:
        answer = await post(running, "/api/generate", {"model": "tiny", "prompt": "Why? " * 40_000})
        last = orjson.loads(answer.content.splitlines()[-1])
        assert len(last["context"]) == 50_000
        assert (newest(running).prompt_tokens, newest(running).outcome) == (50_000, Outcome.OK)


async def test_the_status_shows_what_runs() -> None:
    ollama = ScriptedOllama(models={"tiny:latest": "llama", "hybrid:latest": "qwen35"})
    async with before(ollama, slots=0) as running:
        await post(running, "/api/chat", {**chat(stream=False), "model": "hybrid"})
        await running.proxy.parts.dispatcher.keepers["o"].state.backend.health()
        upstream = await upstream_shown(running)
        assert (upstream["kind"], upstream["build"], len(upstream["slots"])) == ("ollama", "0.33.3", 1)
        assert set(upstream["models"]) == {"tiny:latest", "tiny", "hybrid:latest", "hybrid"}
        assert upstream["reported"]["running"] == [
            {"name": "hybrid:latest", "family": "qwen35", "n_ctx": 4096, "one_slot": True}
        ]
        assert [able for able, yes in upstream["capabilities"].items() if yes] == ["reports_cached"]
        assert not upstream["scheduler"]["pinning"]


async def test_a_client_that_leaves_frees_its_place() -> None:
    ollama = ScriptedOllama(num_parallel=1)
    async with before(ollama, slots=1) as running:
        ollama.may_prefill.clear()
        with pytest.raises(httpx.ReadTimeout):
            async with httpx.AsyncClient() as client:
                await client.post(f"{running.url}/api/chat", json=chat(), timeout=httpx.Timeout(5, read=0.2))
        await until_quiet(running)
        assert newest(running).outcome is Outcome.CLIENT_GONE
        async with asyncio.timeout(10):
            await ollama.generating()[0].connection_gone.wait()


async def test_a_lost_ollama_is_noticed_and_found_again() -> None:
    ollama = ScriptedOllama()
    async with before(ollama) as running:
        down = [False]
        gone = asyncio.Event()

        async def version(exchange: Any) -> None:
            if down[0]:
                gone.set()
                exchange.reset()
            else:
                await exchange.json(200, {"version": "0.33.3"})

        async def models(exchange: Any) -> None:
            if down[0]:
                exchange.reset()
            else:
                await exchange.json(200, {"models": []})

        ollama.routes |= {"/api/version": version, "/api/ps": models}
        down[0] = True
        async with asyncio.timeout(30):
            await gone.wait()
        assert not running.proxy.parts.dispatcher.fleet.is_up
        down[0] = False
        await eventually(lambda: running.proxy.parts.dispatcher.fleet.is_up)
        assert (await post(running, "/api/chat", chat(stream=False))).status_code == 200


async def three_clients(running: RunningProxy) -> None:
    """Three clients in turn, each with a context of its own; one of them twice."""
    for n_ctx in (8192, 4096, 2048, 8192):
        body = chat(stream=False, options={"num_ctx": n_ctx, "seed": 1}, keep_alive=f"{n_ctx}s")
        assert (await post(running, "/api/chat", body)).status_code == 200


async def test_options_made_the_same_for_all_keep_a_model_loaded() -> None:
    ollama = ScriptedOllama()
    async with before(ollama, normalise=["num_ctx", "keep_alive"]) as running:
        await three_clients(running)
        await post(running, "/api/chat", chat(stream=False))
        assert ollama.loads == [("tiny:latest", 8192)]
        sent = [seen.json() for seen in ollama.generating()]
        assert [each["options"] for each in sent[:4]] == [{"num_ctx": 8192, "seed": 1}] * 4
        assert [each.get("keep_alive") for each in sent] == ["8192s"] * 4 + [None]
        shown = (await upstream_shown(running))["reported"]["normalised"]
        assert shown == {"num_ctx": {"tiny:latest": 8192}, "keep_alive": "8192s"}


async def test_nothing_is_made_the_same_unless_it_was_asked_for() -> None:
    ollama = ScriptedOllama()
    async with before(ollama) as running:
        await three_clients(running)
        assert [n_ctx for _, n_ctx in ollama.loads] == [8192, 4096, 2048, 8192]
        assert [seen.json()["options"]["num_ctx"] for seen in ollama.generating()] == [8192, 4096, 2048, 8192]
        assert (await upstream_shown(running))["reported"]["normalised"] == {}


async def test_a_context_too_large_for_the_machine_hurts_nobody_else() -> None:
    ollama = ScriptedOllama()
    ollama.max_n_ctx = 16384
    async with before(ollama, normalise=["num_ctx"]) as running:
        statuses = []
        for n_ctx in (8192, 1_000_000, 4096, 1_000_000, 4096):
            answer = await post(running, "/api/chat", chat(stream=False, options={"num_ctx": n_ctx}))
            statuses.append(answer.status_code)
        assert statuses == [200, 500, 200, 500, 200]
        assert ollama.loads == [("tiny:latest", 8192)]


async def test_a_command_to_unload_is_passed_on() -> None:
    ollama = ScriptedOllama()
    async with before(ollama, normalise=["num_ctx", "keep_alive"]) as running:
        await three_clients(running)
        unload = {"model": "tiny", "keep_alive": 0}
        await post(running, "/api/generate", unload)
        assert ollama.generating()[-1].json() == unload


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
async def test_models_in_the_cloud_wait_for_nothing_here(path: str) -> None:
    ollama = ScriptedOllama(models={"tiny:latest": "llama", "big:120b-cloud": "", "big:cloud": ""})
    async with before(ollama, slots=1) as running, asyncio.TaskGroup() as group:
        ollama.may_prefill.clear()
        here = group.create_task(post(running, "/api/chat", chat()))
        async with asyncio.timeout(60):
            await ollama.arrived(1)
        ollama.routes[path] = lambda exchange: exchange.json(200, {"from": "the cloud"})
        for model in ("big:120b-cloud", "big:cloud"):
            raw = orjson.dumps({**chat(), "model": model}, option=orjson.OPT_INDENT_2)
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                answer = await client.post(path, content=raw)
            assert answer.json() == {"from": "the cloud"}
            assert ollama.requests[-1].body == raw
        assert not here.done()
        ollama.may_prefill.set()
        await here
        assert len(running.proxy.parts.telemetry.journal.newest(10)) == 1


async def test_a_prompt_that_only_speaks_of_clouds_stays_here() -> None:
    ollama = ScriptedOllama()
    async with before(ollama) as running:
        assert (await post(running, "/api/chat", chat("Why is a cloud white? :cloud"))).status_code == 200
        assert newest(running).outcome is Outcome.OK


async def test_a_cloud_that_breaks_off_is_told() -> None:
    ollama = ScriptedOllama(models={"big:cloud": ""})

    async def broken(exchange: Any) -> None:
        exchange.reset()

    async with before(ollama) as running:
        ollama.routes["/api/chat"] = broken
        answer = await post(running, "/api/chat", {**chat(), "model": "big:cloud"})
        assert (answer.status_code, answer.json()["code"]) == (502, "upstream_error")
