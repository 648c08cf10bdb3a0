"""Tokens evaluated over the least possible when conversations take turns on fewer slots: the proxy beside stock.

    make bench-conversations [ARGS="--json"]            forty conversations, eight roots, three turns
    make bench-conversations ARGS="--fuzz 10 --seed 1"  patterns drawn at random: never worse than stock

Tiny random-weight models on the real engine, started anew for every arm, with 4 slots and as many requests at once. The
least possible is each distinct prefix of all prompts once, less what the server itself generated and a later prompt
carries, counted in the server's own tokens. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
from fanout import N_SLOTS, WAYS, Way, counted, serving, tiny_models

from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.demo.wave import PATH

TARGETS = {"llama": 1.10, "mamba": 1.5, "hybrid": 1.5}
MORE_RUNS = 2
SLACK, SLACK_TOKENS = 1.02, 48
"""A fuzzed pattern may cost that much more than stock: prompts are compared in blocks of about 16 tokens, and small
ones are wrong by one now and then."""
BESIDE = {
    Way.PROXY: (Way.STOCK, Way.SAME_FLAGS),
    Way.BEFORE_STOCK: (Way.STOCK,),
    Way.BEFORE_NP: (Way.SAME_FLAGS,),
}
"""What each way through the proxy is compared with."""
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Pattern:
    """`order`: whose turn it is, one conversation after the other. `briefings`: second parts of the root, 0 for none.
    Of the turns a share of `again` asks something else instead of its last question, of `aside` is no turn but a short
    request of its own, as for a title, and of `shorter` goes on from the first question and its answer alone.
    `documents`: texts of which each conversation's first question begins with one, 0 for none. `answers`: asked for at
    once (`n`); the first is gone on with."""

    conversations: int = 40
    roots: int = 8
    root_words: int = 300
    turn_words: int = 25
    at_once: int = N_SLOTS
    order: tuple[int, ...] = ()
    briefings: int = 0
    again: float = 0.0
    aside: float = 0.0
    shorter: float = 0.0
    documents: int = 0
    answer_tokens: int = 12
    answers: int = 1

    def turns(self) -> tuple[int, ...]:
        return self.order or tuple(range(self.conversations)) * 3

    def begin(self, history: Messages, mood: float) -> Messages:
        """What the next question follows; `mood` from 0 to 1 says which kind of turn it is."""
        if mood < self.aside:
            return []
        if mood < self.aside + self.again and len(history) > 2:
            del history[-2:]
        elif mood < self.aside + self.again + self.shorter:
            del history[3:]
        return history


@dataclass(frozen=True)
class Arm:
    model: str
    way: Way
    least_tokens: int
    evaluated_tokens: int
    earlier: tuple[int, ...] = ()
    """What each run evaluated that is summed up here, but for the last."""

    @property
    def ratio(self) -> float:
        return self.evaluated_tokens / self.least_tokens

    @property
    def runs(self) -> tuple[int, ...]:
        return (*self.earlier, self.evaluated_tokens - sum(self.earlier))

    def __add__(self, more: Arm) -> Arm:
        least, evaluated = self.least_tokens + more.least_tokens, self.evaluated_tokens + more.evaluated_tokens
        return replace(self, least_tokens=least, evaluated_tokens=evaluated, earlier=self.runs)

    @property
    def limit(self) -> float:
        """What a proxy may evaluate beside it."""
        runs = self.runs
        return self.evaluated_tokens * SLACK + SLACK_TOKENS * len(runs) + max(runs) - min(runs)


@dataclass
class Trie:
    """Prefixes as chained hashes: those asked for, and those that the server wrote itself."""

    asked: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        state = 0
        for number, token in enumerate([*prompt, *answer[:-1]]):
            state = hash((state, token))
            (self.asked if number < len(prompt) else self.written).add(state)

    @property
    def least(self) -> int:
        return len(self.asked - self.written)


def words(rng: Random, n: int) -> str:
    return " ".join(
        rng.choice("slot cache prefix token server root branch agent memory context".split()) for _ in range(n)
    )


async def converse(url: str, engine_url: str, pattern: Pattern) -> int:
    """Play the pattern; the least tokens it could have cost."""
    trie, rng, gate = Trie(), Random(7), asyncio.Semaphore(pattern.at_once)
    roots = [f"Root {number}. {words(rng, pattern.root_words)}" for number in range(pattern.roots)]
    briefings = [f" Briefing {number}. {words(rng, 120)}" for number in range(pattern.briefings)] or [""]
    histories: list[Messages] = [
        [{"role": "system", "content": roots[number % pattern.roots] + briefings[number % len(briefings)]}]
        for number in range(pattern.conversations)
    ]
    texts = [f"Turn {turn}: {words(rng, pattern.turn_words)}" for turn in range(len(pattern.turns()))]
    moods = [rng.random() for _ in texts]
    documents = [f"Document {number}. {words(rng, 400)}\n\n" for number in range(pattern.documents)] or [""]
    locks = [asyncio.Lock() for _ in histories]
    server = LlamaServer("engine", engine_url)

    async def turn(client: httpx.AsyncClient, number: int, text: str, mood: float) -> None:
        async with locks[number], gate:
            history = pattern.begin(histories[number], mood)
            document = documents[number % len(documents)] if len(history) == 1 else ""
            history.append({"role": "user", "content": document + text})
            answer = await client.post(PATH, json=asking(history, pattern))
            answer.raise_for_status()
            choice = next(each for each in answer.json()["choices"] if each["index"] == 0)
            # an answer that ends before its first token has none
            written = [token["id"] for token in choice.get("logprobs", {"content": ()})["content"]]
            trie.add(await server.tokens(PATH, {"messages": history}), written)
            history.append({"role": "assistant", "content": choice["message"]["content"]})

    try:
        async with httpx.AsyncClient(
            base_url=url, timeout=300, limits=httpx.Limits(max_keepalive_connections=0)
        ) as client:
            async with asyncio.TaskGroup() as group:
                for number, text, mood in zip(pattern.turns(), texts, moods, strict=True):
                    group.create_task(turn(client, number, text, mood))
    finally:
        await server.close()
    return trie.least


def asking(messages: Messages, pattern: Pattern) -> dict[str, Any]:
    limits = {"max_tokens": pattern.answer_tokens, "temperature": 0, "logprobs": True}
    return {"messages": messages, **limits, **({"n": pattern.answers} if pattern.answers > 1 else {})}


async def one_arm(model: Path, kind: str, pattern: Pattern, way: Way) -> Arm:
    async with serving(model, way) as (url, engine_url):
        least, evaluated = await counted(engine_url, converse(url, engine_url, pattern))
    return Arm(kind, way, least, evaluated)


def drawn(rng: Random) -> Pattern:
    """Any pattern: few or many conversations, in turn, in bursts, or as it comes, that share one root, a few, or none,
    or a briefing behind it; some ask again, start over or ask aside, some about the same documents, and answers may be
    long, or several at once."""
    n = rng.choice([2, 4, 5, 8, 12, 20])
    rounds = rng.choice([2, 3, 4])
    match rng.choice(["in turn", "bursts", "any"]):
        case "in turn":
            order = list(range(n)) * rounds
        case "bursts":
            order = [number for number in rng.sample(range(n), n) for _ in range(rounds)]
        case _:
            order = [rng.randrange(n) for _ in range(n * rounds)]
    roots, long = rng.choice([1, 2, n]), rng.choice([20, 150, 400])
    words_each, at_once = rng.choice([5, 25, 120]), rng.choice([1, 2, 4, 8])
    briefings, again, aside, shorter = (rng.choice([0, 0, 1]) for _ in range(4))
    documents, answer_tokens = rng.choice([0, 0, 0, 1, 2]), rng.choice([1, 12, 12, 60])
    return Pattern(
        n,
        roots,
        long,
        words_each,
        at_once,
        tuple(order),
        3 * briefings,
        0.2 * again,
        0.2 * aside,
        0.1 * shorter,
        documents,
        answer_tokens,
        rng.choice([1, 1, 1, 1, 2, 3]),
    )


async def row_of(run: Callable[[Way], Awaitable[Arm]], ways: Sequence[Way], *, again: bool) -> list[Arm]:
    """`again`: a row that is worse than stock is run twice more, and judged by the sum and by how far stock's own runs
    are apart: who comes first where several requests are under way differs from run to run."""
    row = [await run(way) for way in ways]
    for _ in range(MORE_RUNS if again and not no_worse(row) else 0):
        row = [arm + await run(arm.way) for arm in row]
    return row


async def measure(
    folder: Path, kinds: Sequence[str], ways: Sequence[Way], patterns: Sequence[Pattern], fuzz: bool
) -> list[list[Arm]]:
    models, rows = tiny_models(folder, kinds), []
    for pattern in patterns:
        for kind, model in models.items():
            rows.append(await row_of(partial(one_arm, model, kind, pattern), ways, again=fuzz))
            cells = "  ".join(f"{arm.way}: {arm.evaluated_tokens:,} = {arm.ratio:.3f}" for arm in rows[-1])
            print(f"{kind:6} least {rows[-1][0].least_tokens:>7,}  {cells}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TARGETS), help="default %(default)s")
    parser.add_argument(
        "--ways",
        default="",
        help="proxy, stock, same_flags; before_stock, before_np too where patterns are drawn",
    )
    parser.add_argument("--fuzz", type=int, default=0, help="so many random patterns instead of the one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    rng, kinds = Random(given.seed), given.models.split(",")
    patterns = [drawn(rng) for _ in range(given.fuzz)] or [Pattern()]
    ways = [Way[name.strip().upper()] for name in given.ways.split(",") if name] or list(Way if given.fuzz else WAYS)
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(Path(folder), kinds, ways, patterns, fuzz=given.fuzz > 0))
    missed = [row for row in rows if not (no_worse(row) if given.fuzz else on_target(row))]
    if given.json:
        arms = [{**asdict(arm), "ratio": round(arm.ratio, 4)} for row in rows for arm in row]
        print(json.dumps({"targets": TARGETS, "ok": not missed, "arms": arms}, indent=2))
    return 1 if missed else 0


def on_target(row: Sequence[Arm]) -> bool:
    return all(arm.ratio <= TARGETS[arm.model] for arm in row if arm.way is Way.PROXY)


def no_worse(row: Sequence[Arm]) -> bool:
    """Whether each proxy evaluated no more than a server with its flags, the default one no more than either."""
    arms = {arm.way: arm for arm in row}
    pairs = [(arms[way], arms[other]) for way in arms for other in BESIDE.get(way, ()) if other in arms]
    return all(proxy.evaluated_tokens <= stock.limit for proxy, stock in pairs)


if __name__ == "__main__":
    sys.exit(main())
