"""What clients of many kinds do, each played to the same server with the proxy and without: prompt tokens evaluated.

    make bench-scenarios [ARGS="--models llama --only rag_documents,client_slots --ways before_np,same_flags"]

Tiny random-weight models on the real engine, started anew for every arm. A scenario that looks worse is played
twice again, and judged as a drawn pattern is (`conversations.no_worse`). Exit code 1 if any is worse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
from conversations import BESIDE, Arm, no_worse, row_of, words
from fanout import Way, counted, serving, tiny_models

MODELS = "llama,mamba,hybrid,swa"
LIMIT_S = 120.0
Messages = list[dict[str, Any]]
SCENARIOS: dict[str, Callable[[Client], Awaitable[None]]] = {}


def scenario(play: Callable[[Client], Awaitable[None]]) -> Callable[[Client], Awaitable[None]]:
    SCENARIOS[play.__name__] = play
    return play


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass
class Client:
    """Sends to the proxy, or straight to the server; answers have few tokens, at temperature 0."""

    http: httpx.AsyncClient
    rng: Random = field(default_factory=lambda: Random(7))

    def words(self, n: int) -> str:
        return words(self.rng, n)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self.http.post(path, json={"temperature": 0, **body})
        answer.raise_for_status()
        return answer.json()

    async def chat(self, messages: Messages, **more: Any) -> str:
        answer = await self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 10, **more})
        return str(answer["choices"][0]["message"]["content"] or "")

    async def turn(self, history: Messages, text: str, **more: Any) -> None:
        """Ask, and go on with the answer."""
        history.append(user(text))
        history.append({"role": "assistant", "content": await self.chat(history, **more)})

    async def complete(self, prompt: str | list[int | str], n: int = 8) -> str:
        answer = await self.post("/completion", {"prompt": prompt, "n_predict": n})
        return str(answer["content"])

    async def tokens(self, text: str) -> list[int | str]:
        return list((await self.post("/tokenize", {"content": text}))["tokens"])

    async def leave(self, messages: Messages, after: int) -> None:
        """Stop a streamed answer after so many events."""
        body = {"messages": messages, "max_tokens": 60, "temperature": 0, "stream": True}
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            async for line in stream.aiter_lines():
                after -= line.startswith("data:")
                if not after:
                    return

    def agents(self, n: int, n_words: int = 150) -> list[Messages]:
        """Histories that share nothing but the template."""
        return [[system(f"Agent {number}. {self.words(n_words)}")] for number in range(n)]

    def tool(self, number: int) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"text": {"type": "string", "description": self.words(10)}}}
        function = {"name": f"tool_{number}", "description": self.words(20), "parameters": schema}
        return {"type": "function", "function": function}


# conversations


@scenario
async def edited_and_asked_again(client: Client) -> None:
    """Forty turns of five conversations; two of five go back to an earlier question first."""
    histories = client.agents(5)
    for _ in range(40):
        history = client.rng.choice(histories)
        if len(history) > 3 and client.rng.random() < 0.4:
            del history[1 + 2 * client.rng.randrange((len(history) - 1) // 2) :]
        await client.turn(history, client.words(30))


@scenario
async def window_of_history(client: Client) -> None:
    """The system text and the last messages alone."""
    head, histories = system(f"Agent. {client.words(100)}"), [Messages() for _ in range(4)]
    for _ in range(7):
        for history in histories:
            history.append(user(client.words(40)))
            history.append({"role": "assistant", "content": await client.chat([head, *history[-5:]])})


@scenario
async def compacted(client: Client) -> None:
    """A history that has grown long is replaced by a summary."""
    for number in range(3):
        history: Messages = [system(f"Agent {number}. {client.words(150)}")]
        for turn in range(9):
            if turn % 4 == 3:
                summary = await client.chat([*history, user("Summarise all this.")])
                history = [history[0], user(f"Summary: {summary} {client.words(20)}")]
                history.append({"role": "assistant", "content": "Good."})
            await client.turn(history, client.words(30))


@scenario
async def titles_beside_turns(client: Client) -> None:
    """The next turn, a title and follow-up questions over the whole history, at the same time."""
    for history in client.agents(3):
        for _ in range(3):
            asides = [user(f"{task} {client.words(5)}") for task in ("Title this:", "Suggest what to ask next:")]
            await asyncio.gather(
                *(client.chat([*history, aside]) for aside in asides), client.turn(history, client.words(25))
            )


@scenario
async def stopped_and_edited(client: Client) -> None:
    """Answers are stopped half-way, and the question asked in other words half a second later."""
    for history in client.agents(4):
        for _ in range(3):
            await client.leave([*history, user(client.words(30))], after=4)
            await asyncio.sleep(0.5)
            await client.turn(history, client.words(30))


@scenario
async def group_chat(client: Client) -> None:
    """Speakers with system texts of their own see one growing dialogue; somebody else picks who speaks."""
    speakers = [system(f"You are speaker {number}. {client.words(80)}") for number in range(3)]
    dialogue: Messages = [user(client.words(30))]
    for turn in range(9):
        await client.chat([system("Who speaks next?"), *dialogue])
        dialogue.append(user(await client.chat([speakers[turn % 3], *dialogue]) + client.words(15)))


# roots


@scenario
async def supervisor_and_workers(client: Client) -> None:
    """A growing conversation sends out four workers at once, who share their instructions."""
    boss, briefing = client.agents(1)[0], f"Worker. {client.words(200)}"
    for _ in range(4):
        await client.turn(boss, client.words(30))
        tasks = [[system(briefing), user(client.words(25))] for _ in range(4)]
        await client.turn(boss, " ".join(await asyncio.gather(*(client.chat(task) for task in tasks))))


@scenario
async def tree_of_thoughts(client: Client) -> None:
    """Three thoughts go on from each of the best two, all of a level at once."""
    best: list[Messages] = [[system(client.words(150)), user(client.words(30))]]
    for _ in range(3):
        open_ = [[*path, user(f"Thought {number}: {client.words(20)}")] for path in best for number in range(3)]
        answers = await asyncio.gather(*(client.chat(path) for path in open_))
        best = [[*open_[n], {"role": "assistant", "content": answers[n]}] for n in (0, len(open_) - 1)]


@scenario
async def few_shots_that_vary(client: Client) -> None:
    """Four examples of ten, drawn anew for each question."""
    head, shots = system(client.words(60)), [f"Example: {client.words(40)}" for _ in range(10)]
    for _ in range(20):
        await client.chat([head, user("\n".join([*client.rng.sample(shots, 4), client.words(10)]))])


@scenario
async def rag_documents(client: Client) -> None:
    """Three documents of eight before each question."""
    head, documents = system(client.words(40)), [f"[{n}] {client.words(120)}" for n in range(8)]
    for _ in range(16):
        await client.chat([head, user("\n".join([*client.rng.sample(documents, 3), client.words(12)]))])


@scenario
async def files_before_the_question(client: Client) -> None:
    """A coding assistant shows the files as they are now before the newest question, so history behind them moves."""
    head, files, history = system(client.words(120)), [client.words(150) for _ in range(3)], Messages()
    for turn in range(12):
        files[client.rng.randrange(3)] += f" {client.words(5)}"
        shown = [user("\n".join(files)), {"role": "assistant", "content": "Ok."}]
        question = user(client.words(12))
        answer = await client.chat([head, *history, *shown, question])
        history += [question, {"role": "assistant", "content": answer}]
        if turn % 3 == 0:
            await client.chat([system("Write a commit message."), user(client.words(40))])


@scenario
async def log_that_slides(client: Client) -> None:
    """The last lines of a log that goes on."""
    head, lines = system(f"Log analyser. {client.words(60)}"), [client.words(15) for _ in range(60)]
    for turn in range(15):
        await client.chat([head, user("\n".join(lines[turn * 2 : turn * 2 + 25]))])


@scenario
async def suite_of_questions(client: Client) -> None:
    """The same twelve prompts three times, each time in another order."""
    prompts = [[system(client.words(80)), user(client.words(60))] for _ in range(12)]
    for _ in range(3):
        for prompt in client.rng.sample(prompts, len(prompts)):
            await client.chat(prompt)


@scenario
async def same_at_once(client: Client) -> None:
    """Three clients send the same request in the same moment."""
    for _ in range(5):
        prompt = [system(client.words(150)), user(client.words(20))]
        await asyncio.gather(*(client.chat(prompt) for _ in range(3)))


@scenario
async def little_beside_long(client: Client) -> None:
    """Short questions without a system text between the turns of a long conversation."""
    history = [system(client.words(900))]
    for _ in range(5):
        await client.turn(history, client.words(30))
        for _ in range(5):
            await client.chat([user(client.words(8))])


# what is sent beside the messages, and otherwise


@scenario
async def tools_in_some_turns(client: Client) -> None:
    """Tools in every other turn; the tiny models' template does not render them."""
    tools = [client.tool(number) for number in range(6)]
    for history in client.agents(3):
        for turn in range(4):
            await client.turn(history, client.words(20), **({} if turn % 2 else {"tools": tools}))


@scenario
async def slots_named_by_clients(client: Client) -> None:
    """`id_slot` in some turns only, and another one each time."""
    histories = client.agents(5)
    for turn in range(5):
        for number, history in enumerate(histories):
            named = {"id_slot": (turn + number) % 4} if (turn + number) % 3 == 0 else {}
            await client.turn(history, client.words(25), **named)


@scenario
async def without_cache_in_between(client: Client) -> None:
    """One request in three says `cache_prompt: false`."""
    histories = client.agents(4)
    for turn in range(4):
        for number, history in enumerate(histories):
            await client.turn(history, client.words(25), cache_prompt=(turn + number) % 3 > 0)


@scenario
async def several_answers_beside_turns(client: Client) -> None:
    histories = client.agents(4)
    for turn in range(4):
        for number, history in enumerate(histories):
            await client.turn(history, client.words(25), n=3 if (turn + number) % 3 == 0 else 1)


@scenario
async def typing_beside_a_chat(client: Client) -> None:
    """Completion of a file that grows, and a conversation."""
    text, history = client.words(100), client.agents(1)[0]
    for keystroke in range(20):
        text += f" {client.words(3)}"
        await client.complete(text)
        if keystroke % 4 == 0:
            await client.turn(history, client.words(20))


@scenario
async def text_and_tokens(client: Client) -> None:
    """One prompt as text and as tokens in turn."""
    text = client.words(200)
    tokens = await client.tokens(text)
    for turn in range(12):
        question = f" {client.words(12)}"
        await client.complete(tokens + await client.tokens(question) if turn % 2 else text + question)


@scenario
async def rendered_by_the_client(client: Client) -> None:
    """Turns as chats, and as prompts that the server's own template rendered."""
    histories = client.agents(4)
    for turn in range(4):
        for number, history in enumerate(histories):
            if (turn + number) % 2 == 0:
                await client.turn(history, client.words(25))
                continue
            history.append(user(client.words(25)))
            rendered = await client.post("/apply-template", {"messages": history})
            history.append({"role": "assistant", "content": await client.complete(rendered["prompt"])})


@scenario
async def anthropic_messages(client: Client) -> None:
    for head in (client.words(150) for _ in range(5)):
        history = Messages()
        for _ in range(3):
            history.append(user(client.words(25)))
            answer = await client.post("/v1/messages", {"system": head, "messages": history, "max_tokens": 10})
            text = "".join(part.get("text", "") for part in answer["content"])
            history.append({"role": "assistant", "content": text})


# measuring


async def one_arm(model: Path, kind: str, name: str, way: Way) -> Arm:
    async with serving(model, way) as (url, engine_url), httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        async with asyncio.timeout(LIMIT_S):
            _, evaluated = await counted(engine_url, SCENARIOS[name](Client(http)))
    return Arm(kind, way, 0, evaluated)


async def measure(folder: Path, kinds: Iterable[str], ways: Sequence[Way], names: Iterable[str]) -> list[list[Arm]]:
    models, rows = tiny_models(folder, kinds), []
    for name in names:
        for kind, model in models.items():
            rows.append(await row_of(partial(one_arm, model, kind, name), ways, again=True))
            print(line(name, rows[-1]), file=sys.stderr, flush=True)
    return rows


def line(name: str, row: Sequence[Arm]) -> str:
    """Each proxy over the least of the servers it is compared with."""
    arms = {arm.way: arm.evaluated_tokens for arm in row}
    cells = [f"{name:30} {row[0].model:6} {'' if no_worse(row) else 'WORSE':5}"]
    for way, tokens in arms.items():
        others = [arms[other] for other in BESIDE.get(way, ()) if other in arms]
        cells.append(f"{way}: {tokens:,}" + (f" = {tokens / max(1, min(others)):.3f}" if others else ""))
    return "  ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS, help="default %(default)s")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="some scenarios, comma-separated")
    parser.add_argument("--ways", default=",".join(way.name.lower() for way in Way), help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    ways, names = [Way[name.strip().upper()] for name in given.ways.split(",")], given.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(Path(folder), given.models.split(","), ways, names))
    worse = [row for row in rows if not no_worse(row)]
    if given.json:
        arms = [
            {"model": arm.model, "way": arm.way, "evaluated_tokens": arm.evaluated_tokens} for r in rows for arm in r
        ]
        print(json.dumps({"ok": not worse, "arms": arms}, indent=2))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
