"""A llama-server for clients that act on what they are told: the real engine evaluates every prompt, in the slot that
was asked for, and a script has the words. A model small enough for a test could not call tools.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import orjson
from speaking import Counts, Words, counts_in, stream, whole
from stub_upstream import Exchange, Seen, StubUpstream

from prefixproxy.body import Body
from prefixproxy.chat import canonical, parse_prompt
from prefixproxy.prompt import Prompt, Role, Text
from prefixproxy.types import API_OF_PATH, Api

SPOKEN = (Api.CHAT, Api.RESPONSES, Api.MESSAGES)
LIMITS = {"max_tokens": 1, "max_output_tokens": 1}
UNWANTED = frozenset({"stream", "stream_options", "max_completion_tokens", "return_progress", "timings_per_token"})
"""Of a body, when only its prompt is to be evaluated."""
EVALUATING_S = 600.0


@dataclass(frozen=True)
class Asked:
    """One prompt as it came, and what it cost. `number` is what `Recorder` wrote on it, if it came by way of one."""

    api: Api
    body: bytes
    prompt: Prompt
    counts: Counts
    words: Words
    number: int | None = None

    @property
    def rendered(self) -> bytes:
        return rendered(self.api, self.body)


def rendered(api: Api, body: bytes) -> bytes:
    """The prompt in the order templates have it."""
    return b"".join(canonical(prompt_of(api, body)).parts)


def prompt_of(api: Api, body: bytes) -> Prompt:
    """The prompt of a body that is one."""
    prompt = parse_prompt(api, Body.parse(body))
    assert prompt is not None, body[:300]
    return prompt


@dataclass(frozen=True)
class Script:
    """Each question is answered by a call of the first tool of `calls` that the client has, and its result by a text.
    A client without one of them gets a text, and one that wants JSON gets a title."""

    calls: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def words(self, number: int, prompt: Prompt, body: dict[str, Any]) -> Words:
        said = [m for m in prompt.messages if m.role is Role.ASSISTANT]
        called = bool(said) and any(not isinstance(p, Text) and p.kind == "call" for p in said[-1].parts)
        offered = {tool.name for tool in prompt.tools}
        tool = next((name for name in self.calls if name in offered), "")
        if tool and not called:
            return Words(number, tool=tool, arguments=orjson.dumps(self.calls[tool]).decode())
        if _wants_json(body):
            return Words(number, text='{"title": "The drawer of a sheet"}')
        return Words(number, text=answer_text(len(said)))


def _wants_json(body: dict[str, Any]) -> bool:
    places = (body, body.get("text") or {}, body.get("output_config") or {})
    return any(place.get(key) for place, key in zip(places, ("response_format", "format", "format"), strict=True))


def answer_text(said: int) -> str:
    """The text of an answer that has as many assistant messages before it."""
    return f"Answer {said}: drawer 7, “Größe” 1:1000 ✓ and no more."


class ActedEngine(StubUpstream):
    """`asked`: the prompts that came, oldest first; `warmed`: tokens that each warm-up evaluated."""

    def __init__(self, engine: str, script: Script) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self.warmed: list[int] = []
        self._engine = engine
        self._script = script

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(base_url=self._engine, timeout=EVALUATING_S)
        return await super().__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await self._http.aclose()

    async def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        api = API_OF_PATH.get(request.path)
        if request.method == "POST" and api in SPOKEN:
            return await self._act(exchange, api)
        answer = await self._forwarded(request, request.body)
        if api is Api.COMPLETION and answer.status_code == 200:
            self.warmed.append(answer.json()["timings"]["prompt_n"])
        await self._hand_over(exchange, answer)

    async def _forwarded(self, request: Seen, body: bytes) -> httpx.Response:
        headers = {"content-type": "application/json"} if body else {}
        return await self._http.request(request.method, request.target, content=body, headers=headers)

    async def _hand_over(self, exchange: Exchange, answer: httpx.Response) -> None:
        kind = answer.headers.get("content-type", "text/plain").encode()
        await exchange.whole(answer.status_code, answer.content, [(b"Content-Type", kind)])

    async def _act(self, exchange: Exchange, api: Api) -> None:
        request, body = exchange.request, exchange.request.json()
        only_prompt = {key: value for key, value in body.items() if key not in UNWANTED} | LIMITS
        started = time.monotonic()
        answer = await self._forwarded(request, orjson.dumps(only_prompt))
        took_ms = (time.monotonic() - started) * 1000
        if answer.status_code != 200:
            return await self._hand_over(exchange, answer)
        prompt, counts = prompt_of(api, request.body), counts_in(api, answer.json(), took_ms)
        words = self._script.words(len(self.asked), prompt, body)
        number = request.header(NUMBER)
        self.asked.append(Asked(api, request.body, prompt, counts, words, int(number) if number else None))
        if not body.get("stream"):
            return await exchange.json(200, whole(api, words, counts))
        await exchange.stream_head()
        for event in stream(api, words, counts, body):
            await exchange.send(event)
        await exchange.end()


NUMBER = b"x-asked-number"
"""A header that goes through the proxy as every unknown one does: which of the client's requests this was."""
