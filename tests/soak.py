"""Load with everything that goes wrong: clients that leave at any moment, and others who use the server directly.

Whether an answer was computed from its own context is read from its log-probabilities. Those of a model whose attention
reaches back over its whole prompt depend on every token of it; batching moves them by thousandths, another context by
much more. So each answer has to equal the one of the same request run alone with nothing cached, up to ties.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

import httpx
import orjson

AT_ONCE = 24
N_ROOTS = 5
NOISE = 0.03
"""How far batching and reuse move a log-probability; 0.005 was the most seen."""

Answer = Sequence[tuple[str, Mapping[str, float]]]
"""Each token with the log-probabilities of the likeliest."""


class Way(StrEnum):
    """What its client does with a request."""

    JSON = "json"
    STREAM = "stream"
    LEAVES_EARLY = "leaves_early"  # while it waits, or before its first token
    LEAVES_MIDWAY = "leaves_midway"  # after its first bytes
    SEVERAL = "several"  # wants two answers
    DIRECT = "direct"  # not through the proxy


_LEAVES = (Way.LEAVES_EARLY, Way.LEAVES_MIDWAY)


@dataclass(frozen=True)
class Planned:
    number: int
    way: Way
    patience_s: float
    n_tokens: int = 8
    """What each answer may have."""


@dataclass
class Report:
    """What came of the requests, by number. `statuses`: of those whose client waited for the end."""

    answers: dict[int, Answer] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    ways: Counter[Way] = field(default_factory=Counter)


def plan(n: int, seed: int, *, strangers: bool) -> list[Planned]:
    """Several answers of one token each leave llama-server with a copy between slots to make. A stranger's request that
    gets such a slot before it is made is spoilt, and so is what the server keeps of it; nobody but the stranger could
    wait. So beside strangers (`Way.DIRECT`) several answers have two tokens each."""
    rng = Random(seed)
    ways = [Way.JSON] * 9 + [Way.STREAM] * 5 + [Way.LEAVES_EARLY] * 3 + [Way.LEAVES_MIDWAY] * 2
    ways += [Way.SEVERAL] * 2 + [Way.DIRECT] * strangers
    drawn = [(number, rng.choice(ways), rng.choice([0.002, 0.02, 0.1, 0.4])) for number in range(n)]
    few = 2 if strangers else 1
    return [Planned(*each, few if each[1] is Way.SEVERAL else 400 if each[1] in _LEAVES else 8) for each in drawn]


def payload_of(request: Planned) -> dict[str, Any]:
    """Five roots, and a nonce that only this request has."""
    number, root = request.number, request.number % N_ROOTS
    system = f"You are clerk {root} of the archive. " + f"Rule {root}: name the sheet, the scale and the shelf. " * 12
    user = f"Nonce {number * 7919 % 100003}: what does rule {number % 13} say of sheet {number}?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    limits = {"max_tokens": request.n_tokens, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    return {"messages": messages, **limits, **({"n": 2} if request.way is Way.SEVERAL else {})}


def read(choices: Sequence[Mapping[str, Any]]) -> Answer:
    """The log-probabilities in an answer's choices, or in those of a stream's events."""
    tokens = [token for choice in choices for token in (choice.get("logprobs") or {}).get("content") or ()]
    return [(token["token"], {top["token"]: top["logprob"] for top in token["top_logprobs"]}) for token in tokens]


def shown(answer: Answer) -> Answer:
    """Less the tokens that llama-server's streams show nothing of, its whole answers do: the one that ends the answer,
    which has no text, and those that end inside a character."""
    return [(token, likeliest) for token, likeliest in answer if token and "\ufffd" not in token]


def same_context(answer: Answer, control: Answer) -> bool:
    """Whether both can come of one context: equal up to noise, until a tie sends them apart."""
    answer, control = shown(answer), shown(control)
    if not answer:
        return False
    for (said, ours), (expected, alone) in zip(answer, control, strict=False):
        if any(abs(ours[token] - alone[token]) > NOISE for token in ours.keys() & alone.keys()):
            return False
        if said != expected:
            return said in alone and alone[expected] - alone[said] <= NOISE
    return len(answer) == len(control)


def deviation(answer: Answer, control: Answer) -> str:
    """Where two answers part, in words: a tie has a small gap and moved little before, another context neither."""
    moved = 0.0
    answer, control = shown(answer), shown(control)
    for position, ((said, ours), (expected, alone)) in enumerate(zip(answer, control, strict=False)):
        moved = max([moved, *(abs(ours[token] - alone[token]) for token in ours.keys() & alone.keys())])
        if said != expected or moved > NOISE:
            gap = alone[expected] - alone.get(said, float("-inf"))
            return f"token {position} of {len(answer)}: moved {moved:.4f}, gap {gap:.4f}, {said!r} for {expected!r}"
    return f"{len(answer)} tokens for {len(control)}, moved {moved:.4f}"


async def alone(engine: httpx.AsyncClient, planned: Sequence[Planned]) -> dict[int, Answer]:
    """Each request by itself and with one answer, nothing reused."""
    answers = {}
    for request in planned:
        payload = payload_of(request) | {"cache_prompt": False, "n": 1}
        answer = await engine.post("/v1/chat/completions", json=payload)
        answers[request.number] = read(answer.json()["choices"])
    return answers


async def run(proxy: httpx.AsyncClient, engine: httpx.AsyncClient, planned: Sequence[Planned]) -> Report:
    report, gate = Report(), asyncio.Semaphore(AT_ONCE)

    async def one(request: Planned) -> None:
        async with gate:
            report.ways[request.way] += 1
            await _send(engine if request.way is Way.DIRECT else proxy, request, report)

    async with asyncio.TaskGroup() as group:
        for request in planned:
            group.create_task(one(request))
    return report


async def _send(client: httpx.AsyncClient, request: Planned, report: Report) -> None:
    payload = payload_of(request)
    if request.way in (Way.STREAM, Way.LEAVES_MIDWAY):
        await _stream(client, request, payload | {"stream": True}, report)
    elif request.way is Way.LEAVES_EARLY:
        try:
            async with asyncio.timeout(request.patience_s):
                await client.post("/v1/chat/completions", json=payload)
        except TimeoutError:
            return
    else:
        answer = await client.post("/v1/chat/completions", json=payload)
        report.statuses[answer.status_code] += 1
        report.answers[request.number] = read(answer.json().get("choices", ())[:1])


async def _stream(client: httpx.AsyncClient, request: Planned, payload: dict[str, Any], report: Report) -> None:
    choices: list[Mapping[str, Any]] = []
    async with client.stream("POST", "/v1/chat/completions", json=payload) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choices += orjson.loads(line[6:])["choices"]
                if request.way is Way.LEAVES_MIDWAY:
                    return
    report.statuses[answer.status_code] += 1
    report.answers[request.number] = read(choices)
