"""An upstream's URL that leads back to the proxy is noticed, however it is written and however long the way."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from running_proxy import eventually, proxied_stub, running_proxy

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def test_a_request_of_its_own_is_sent_nowhere() -> None:
    """Its own requests are known by their `via`, whoever passed them on in between."""
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        await client.post(CHAT, json=BODY)
        mark = (stub.generating()[0].header(b"via") or b"").decode()
        before = len(stub.generating())
        for path in (CHAT, "/props"):
            answer = await client.post(path, json=BODY, headers={"via": f"1.1 other, {mark}"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (508, "loop_detected")
        assert len(stub.generating()) == before


async def test_an_upstream_that_is_the_proxy_is_not_ready_and_says_why() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    async with (
        running_proxy(f"http://127.0.0.1:{port}", wait_ready=False, port=port) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        keeper = running.proxy.parts.dispatcher.keepers["local"]
        await eventually(lambda: "leads back" in keeper.state.failure)
        answer = await client.post(CHAT, json=BODY)
    assert answer.status_code == 503
    assert "the url of an upstream leads back here" in answer.json()["error"]["message"]


async def test_one_proxy_behind_another_is_no_loop() -> None:
    async with (
        proxied_stub() as (stub, inner),
        running_proxy(inner.url) as outer,
        httpx.AsyncClient(base_url=outer.url) as client,
    ):
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        passed = [value for name, value in stub.generating()[0].headers if name == b"via"]
    assert len(set(passed)) == 2
