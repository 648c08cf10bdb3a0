"""What an upstream of no named kind is found to be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from scripted_ollama import ScriptedOllama
from stub_upstream import NOT_FOUND, Exchange, StubUpstream

from prefixproxy.app import backend_of
from prefixproxy.backends.auto import AutoUpstream
from prefixproxy.errors import ProxyError, UpstreamFailed, UpstreamLoading, UpstreamUnavailable
from prefixproxy.settings import Upstream
from prefixproxy.types import SlotId

pytestmark = pytest.mark.anyio


class Answers(StubUpstream):
    """Answers the given paths with these statuses and bodies, all others with 404."""

    def __init__(self, answers: dict[str, tuple[int, Any]]) -> None:
        super().__init__()
        self.answers = answers

    async def _plain(self, exchange: Exchange) -> None:
        await exchange.json(*self.answers.get(exchange.request.path, (404, NOT_FOUND)))


async def kind_of(stub: StubUpstream) -> str:
    async with stub:
        backend = backend_of(Upstream(name="u", url=stub.url))
        assert isinstance(backend, AutoUpstream)
        try:
            return (await backend.probe()).kind
        finally:
            await backend.close()


MODELS = (200, {"data": [{"id": "m"}]})
UNEXPECTED = (200, {"error": "Unexpected endpoint or method."})
ROUTER = (200, {"role": "router"})


@pytest.mark.parametrize(
    ("stub", "kind"),
    [
        (lambda: StubUpstream(), "llama-server"),
        (lambda: ScriptedOllama(), "ollama"),
        (lambda: ScriptedOllama("0.12.0"), "ollama"),
        (lambda: Answers({"/v1/models": MODELS}), "openai"),
        (lambda: Answers({"/props": UNEXPECTED, "/api/version": UNEXPECTED, "/v1/models": MODELS}), "openai"),
        (lambda: Answers({"/props": ROUTER, "/v1/models": MODELS}), "openai"),
    ],
)
async def test_each_kind_is_known_by_its_answers(stub: Any, kind: str) -> None:
    assert await kind_of(stub()) == kind


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({}, UpstreamUnavailable),
        ({"/props": (401, NOT_FOUND), "/v1/models": MODELS}, UpstreamUnavailable),
        ({"/props": (503, NOT_FOUND), "/v1/models": MODELS}, UpstreamLoading),
        ({"/props": (500, NOT_FOUND), "/v1/models": MODELS}, UpstreamFailed),
    ],
)
async def test_what_cannot_be_told_is_not_guessed(answers: dict[str, Any], error: type[ProxyError]) -> None:
    """A llama-server that wants a key, loads or stumbles is not taken for something else."""
    with pytest.raises(error):
        await kind_of(Answers(answers))


async def test_a_server_that_breaks_off_is_not_taken_for_another_kind() -> None:
    stub = Answers({"/v1/models": MODELS})

    async def cut(exchange: Exchange) -> None:
        exchange.reset()

    stub.routes["/props"] = cut
    with pytest.raises(UpstreamFailed, match="broke off"):
        await kind_of(stub)


async def test_a_named_kind_is_taken_as_named() -> None:
    for kind in ("llama-server", "ollama", "openai"):
        backend = backend_of(Upstream.model_validate({"name": "u", "url": "http://127.0.0.1:1", "kind": kind}))
        assert not isinstance(backend, AutoUpstream)
        await backend.close()


async def test_what_has_no_slots_says_so() -> None:
    backend = backend_of(Upstream(name="u", url="http://127.0.0.1:1", kind="openai"))
    slot = SlotId("u", 0)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: backend.slots(),
        lambda: backend.tokens("/v1/chat/completions", {}),
        lambda: backend.warm(slot, [1]),
        lambda: backend.save(slot, "f"),
        lambda: backend.restore(slot, "f"),
    ]
    for call in calls:
        with pytest.raises(UpstreamFailed, match="upstream u cannot"):
            await call()
    await backend.close()
