"""Asks everything three times: with reuse, without, and without once more, cut elsewhere and beside other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson

from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import SlotId
from prefixproxy.verify.compare import CUT_TOKENS, TOP, Answer, answer_of, continued
from prefixproxy.verify.judge import Exchange
from prefixproxy.verify.scenarios import Ask, Restore, Save, Scenario, Warm
from prefixproxy.warming import Rendering, root_tokens

PATH, RAW_PATH = "/v1/chat/completions", "/completion"
ANSWER_TOKENS = 16
REQUEST_TIMEOUT_S = 900.0
FILE = "prefixproxy-verify.bin"
"""Overwritten by every run: the server has no way to delete it."""
_HEADERS = [(b"content-type", b"application/json"), (b"x-prefixproxy-stabilise", b"off")]
"""What is compared must be one prompt: a proxy is not to edit it. Servers ignore the header."""

_GREEDY = {"temperature": 0, "seed": 1, "ignore_eos": True, "grammar": r"root ::= [\x20-\x7E\n]*"}
"""To the last token: an answer that ends at once compares nothing. In characters of one byte: of a token that ends
inside one the server tells no log-probabilities. Those that it tells are what the model gives, whatever is allowed."""

Messages = tuple[Mapping[str, str], ...]


@dataclass(slots=True, eq=False)
class _Asked:
    """A prompt of the first arm with its answer."""

    scenario: str
    talk: int
    turn: int
    messages: Messages
    answer: Answer


@dataclass(slots=True, eq=False)
class Suite:
    """One run of the suite. `control`: where the runs without reuse go; `at_once`: so many of them beside each other.
    `tell` is called after every answer."""

    server: LlamaServer
    control: LlamaServer
    at_once: int
    tell: Callable[[str], None]
    exchanges: list[Exchange] = field(default_factory=list)
    """Of the scenarios that were walked to their end."""

    async def run(self, scenarios: Sequence[Scenario]) -> list[Exchange]:
        """Raises ProxyError when the server fails on a request or goes away."""
        for scenario in scenarios:
            if scenario.steps:
                asked = await _Walk(self, scenario).walk()
                # The runs without reuse come last: they leave whole prompts in the slots, which would be reused.
                await self._controls(asked)
        return self.exchanges

    async def _controls(self, asked: Sequence[_Asked]) -> None:
        first = [await self._without(one) for one in asked]
        again: list[Answer] = []
        for start in range(0, len(asked), self.at_once):
            pairs = list(zip(asked, first, strict=True))[start : start + self.at_once]
            async with asyncio.TaskGroup() as group:
                beside = [group.create_task(self._cut_elsewhere(one, control)) for one, control in pairs]
            again += [task.result() for task in beside]
        for one, control, second in zip(asked, first, again, strict=True):
            self.exchanges.append(Exchange(one.scenario, one.talk, one.turn, one.messages, one.answer, control, second))

    async def _without(self, asked: _Asked) -> Answer:
        return await self.ask(self.control, asked.scenario, asked.messages, {"cache_prompt": False})

    async def _cut_elsewhere(self, asked: _Asked, control: Answer) -> Answer:
        """The same prompt and the start of its answer, evaluated whole, and how that goes on."""
        given = min(CUT_TOKENS, len(control.tokens) - 1) if control.complete else 0
        if given < 1:
            return await self._without(asked)
        prompt = await self.control.tokens(PATH, chat_body(asked.messages))
        body = {
            "prompt": [*prompt, *(token.id for token in control.tokens[:given])],
            "n_predict": ANSWER_TOKENS - given,
            "n_probs": TOP,
            "cache_prompt": False,
            **_GREEDY,
        }
        return self._read(
            asked.scenario,
            await self._post(self.control, RAW_PATH, asked.scenario, body),
            lambda value: continued(control, given, value),
        )

    async def ask(self, server: LlamaServer, scenario: str, messages: Messages, more: Mapping[str, Any]) -> Answer:
        return self._read(
            scenario, await self._post(server, PATH, scenario, {**chat_body(messages), **more}), answer_of
        )

    def _read(self, scenario: str, raw: bytes, read: Callable[[Any], Answer]) -> Answer:
        try:
            answer = read(orjson.loads(raw))
        except ValueError as failure:
            raise UpstreamFailed(f"{scenario}: {failure}") from failure
        self.tell(scenario)
        return answer

    async def _post(self, server: LlamaServer, path: str, scenario: str, body: Mapping[str, Any]) -> bytes:
        payload = orjson.dumps(body)
        headers = [*_HEADERS, (b"content-length", str(len(payload)).encode())]
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                response = await server.open("POST", path, headers, payload)
                try:
                    raw = await response.read()
                finally:
                    await response.close()
        except TimeoutError:
            raise UpstreamFailed(f"no answer within {REQUEST_TIMEOUT_S:g} s ({scenario})") from None
        if response.status != HTTPStatus.OK:
            raise UpstreamFailed(f"{scenario}: status {response.status}: {raw[:300].decode(errors='replace')}")
        return raw


def chat_body(messages: Messages) -> dict[str, Any]:
    return {
        "messages": list(messages),
        "max_tokens": ANSWER_TOKENS,
        **_GREEDY,
        "logprobs": True,
        "top_logprobs": TOP,
    }


class _Walk:
    """One scenario with reuse, step by step. A talk's history holds the answers that came in this arm."""

    def __init__(self, suite: Suite, scenario: Scenario) -> None:
        self._suite = suite
        self._scenario = scenario
        self._server = suite.server
        self._histories: list[list[Mapping[str, str]]] = [
            [{"role": "system", "content": talk.system}] for talk in scenario.talks
        ]
        self._turns = [0] * len(scenario.talks)
        self._asked: list[_Asked] = []

    async def walk(self) -> list[_Asked]:
        for step in self._scenario.steps:
            match step:
                case Ask():
                    await self._ask(step)
                case Warm():
                    await self._warm(step)
                case Save():
                    await self._server.save(SlotId("server", step.slot), FILE)
                case Restore():
                    await self._server.restore(SlotId("server", step.slot), FILE)
        return self._asked

    async def _ask(self, step: Ask) -> None:
        if step.slots is not None:
            await self._require_idle()
        slots = step.slots or [None] * len(step.talks)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._turn(t, slot)) for t, slot in zip(step.talks, slots, strict=True)]
        for task in tasks:
            asked = task.result()
            self._asked.append(asked)
            self._histories[asked.talk] = [*asked.messages, {"role": "assistant", "content": asked.answer.text}]
            self._turns[asked.talk] += 1

    async def _turn(self, talk: int, slot: int | None) -> _Asked:
        turn = self._turns[talk]
        messages = self._messages(talk)
        pinned = {} if slot is None else {"id_slot": slot}
        answer = await self._suite.ask(self._server, self._scenario.name, messages, {"cache_prompt": True, **pinned})
        return _Asked(self._scenario.name, talk, turn, messages, answer)

    def _messages(self, talk: int) -> Messages:
        question = self._scenario.talks[talk].turns[self._turns[talk]]
        return (*self._histories[talk], {"role": "user", "content": question})

    async def _warm(self, step: Warm) -> None:
        await self._require_idle()
        lanes = [Rendering(PATH, orjson.dumps(chat_body(self._messages(talk)))) for talk in step.talks]
        root = await root_tokens(self._server, lanes)
        await self._server.warm(SlotId("server", step.slot), root)

    async def _require_idle(self) -> None:
        """A pin to a busy slot would corrupt the answer that runs there (docs/explanation/llama-server.md)."""
        busy = [slot for slot, seen in (await self._server.slots()).items() if seen.busy]
        if busy:
            raise UpstreamFailed(f"slot {busy[0]} is busy: somebody else uses this server, and verify needs it alone")
