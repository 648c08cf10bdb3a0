"""What agents ask before their first prompt is answered as the upstream would answer it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import proxy_in_thread, running_proxy
from scripted_ollama import ScriptedOllama

LIMIT_S = 60.0
PROBES = [
    ("HEAD", "/"),  # Claude Code, once for each process
    ("GET", "/"),
    ("GET", "/v1/models"),
    ("GET", "/models"),
    ("GET", "/api/version"),  # Codex --oss wants an Ollama
    ("GET", "/api/tags"),
    ("GET", "/health"),
    ("GET", "/props"),
    ("OPTIONS", "/v1/messages"),
    ("GET", "/v1/messages"),
    ("HEAD", "/v1/chat/completions"),
]
POSTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages/count_tokens?beta=true", {"messages": [{"role": "user", "content": "How long am I?"}]}),
    ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "How long am I?"}]}),
    ("/api/show", {"model": "tiny"}),
    ("/v1/messages/batches", {}),
]
MEANT_FOR_ONE_CONNECTION = {"keep-alive", "connection", "date", "transfer-encoding"}


def shown(answer: httpx.Response) -> tuple[int, bytes, dict[str, str]]:
    headers = {name: value for name, value in answer.headers.items() if name not in MEANT_FOR_ONE_CONNECTION}
    return answer.status_code, answer.content, headers


@pytest.mark.engine
def test_llama_servers_answers_to_probes(engine: RunningEngine) -> None:
    with proxy_in_thread(engine.url) as proxy:
        for method, target in PROBES:
            direct = httpx.request(method, engine.url + target, timeout=LIMIT_S)
            through = httpx.request(method, proxy.url + target, timeout=LIMIT_S)
            if target == "/props":  # tells the seed of its last request
                assert through.json()["total_slots"] == direct.json()["total_slots"]
            elif target in ("/v1/models", "/models"):  # tells the time
                assert through.json()["data"][0]["id"] == direct.json()["data"][0]["id"]
            else:
                assert shown(through) == shown(direct), f"{method} {target}"
        for target, body in POSTS:
            direct = httpx.post(engine.url + target, json=body, timeout=LIMIT_S)
            assert shown(httpx.post(proxy.url + target, json=body, timeout=LIMIT_S)) == shown(direct), target


@pytest.mark.engine
def test_the_beta_query_of_messages_changes_nothing(engine: RunningEngine) -> None:
    """Claude Code puts it behind every path."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    with proxy_in_thread(engine.url) as proxy:
        answers = [
            httpx.post(f"{url}/v1/messages?beta=true", json=body, timeout=LIMIT_S).json()
            for url in (engine.url, proxy.url)
        ]
    assert answers[0]["content"] == answers[1]["content"] != []
    assert answers[0]["type"] == answers[1]["type"] == "message"


@pytest.mark.anyio
async def test_ollamas_answers_to_probes() -> None:
    async with ScriptedOllama("0.34.1") as ollama:
        upstream = {"name": "o", "url": ollama.url, "kind": "ollama", "slots": 1}
        async with (
            running_proxy(ollama.url, upstreams=[upstream]) as running,
            httpx.AsyncClient(timeout=LIMIT_S) as client,
        ):
            for method, target in PROBES[:6]:
                direct = await client.request(method, ollama.url + target)
                through = await client.request(method, running.url + target)
                assert shown(through) == shown(direct), f"{method} {target}"
            assert (await client.get(f"{running.url}/api/version")).json() == {"version": "0.34.1"}
            assert (await client.head(running.url)).status_code == 200
