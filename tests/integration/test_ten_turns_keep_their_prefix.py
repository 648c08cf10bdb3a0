"""Three agents take turns, each with a clock first, tools in another order every time: each turn finds the last one.

The second test kills the proxy (no chance to tidy up) between any two rounds and starts it again.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from running_engine import RunningEngine
from stub_upstream import Exchange, StubUpstream, event
from threads import in_thread

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

N_LANES, N_TURNS = 3, 10
RULES = " ".join(f"Rule {n}: sheet {n} lies in drawer {n * 7 % 23}, scale one to {n}000." for n in range(40))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"look_{name}",
            "description": f"Looks up a {name} in the catalogue of the archive.",
            "parameters": {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]},
        },
    }
    for name in ("sheet", "drawer", "scale", "shelf", "loan")
]


@dataclass
class Lane:
    """One agent: its own clock, its own shuffle, its history as its client keeps it."""

    number: int
    history: list[dict[str, Any]] = field(default_factory=list)
    expected: int = 0

    def next_body(self, turn: int) -> dict[str, Any]:
        self.history.append({"role": "user", "content": f"Lane {self.number}, turn {turn}: where is sheet {turn * 3}?"})
        clock = f"Current time: 2026-11-29 10:{turn:02d}:{self.number * 7:02d}"
        system = {"role": "system", "content": f"{clock}\nYou are the clerk of a map archive. {RULES}"}
        tools = random.Random(turn * 10 + self.number).sample(TOOLS, len(TOOLS))
        return {"messages": [system, *self.history], "tools": tools, "max_tokens": 2, "temperature": 0}

    def check(self, turn: int, answer: dict[str, Any]) -> None:
        timings = answer["timings"]
        assert timings["cache_n"] >= 0.98 * self.expected, f"lane {self.number}, turn {turn}: {timings}"
        self.expected = timings["cache_n"] + timings["prompt_n"] + timings["predicted_n"] - 1
        self.history.append(answer["choices"][0]["message"])


def take_turn(url: str, lanes: list[Lane], turn: int) -> None:
    for lane in lanes:
        answer = httpx.post(f"{url}/v1/chat/completions", json=lane.next_body(turn), timeout=60)
        assert answer.status_code == 200, answer.text
        lane.check(turn, answer.json())


@contextmanager
def proxy(upstream: str, state: Path) -> Iterator[str]:
    """The proxy as a process of its own, killed without warning at the end."""
    command = [sys.executable, "-m", "prefixproxy", "serve", "--upstream", upstream, "--port", "0"]
    environment = {**os.environ, "PREFIXPROXY_STATE__PATH": str(state)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "listens on" in line)
            url = line.rsplit(" ", 1)[1].strip()
            until_ready(url)
            yield url
        finally:
            process.send_signal(signal.SIGKILL)


def until_ready(url: str) -> None:
    deadline = time.monotonic() + 60
    while httpx.get(f"{url}/readyz").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def until_kept(state: Path) -> None:
    """Until the state file has stopped changing: no answer waits for what is written behind it."""
    seen: tuple[int, ...] = ()
    files = (state, state.with_name(state.name + "-wal"))
    for _ in range(100):
        time.sleep(0.3)
        now = tuple(file.stat().st_mtime_ns for file in files if file.exists())
        if now == seen:
            return
        seen = now


def test_every_turn_extends_the_last(engine_factory: Callable[..., RunningEngine], tmp_path: Path) -> None:
    engine, lanes = engine_factory(), [Lane(number) for number in range(N_LANES)]
    with proxy(engine.url, tmp_path / "state.db") as url:
        for turn in range(N_TURNS):
            take_turn(url, lanes, turn)


def test_also_when_the_proxy_is_killed_between_turns(
    engine_factory: Callable[..., RunningEngine], tmp_path: Path
) -> None:
    engine, lanes, state = engine_factory(), [Lane(number) for number in range(N_LANES)], tmp_path / "state.db"
    for first in range(0, N_TURNS, 2):
        with proxy(engine.url, state) as url:
            for turn in (first, first + 1):
                take_turn(url, lanes, turn)
            until_kept(state)


HEAD = "Current time: 2026-03-14 10:00:{:02d}\nYou are the clerk of a map archive.\nBe brief."


def test_a_kill_straight_after_an_answer_loses_no_note_that_went_before_it(tmp_path: Path) -> None:
    """Nothing but the answer comes between the note's writing and the kill."""
    state, may_answer = tmp_path / "state.db", threading.Event()

    async def held(exchange: Exchange) -> None:
        await asyncio.to_thread(may_answer.wait, 60)
        await exchange.stream_head()
        said = {"index": 0, "delta": {"content": "Fine."}, "finish_reason": "stop"}
        await exchange.send(event({"choices": [said]}) + b"data: [DONE]\n\n")

    def ask(url: str, second: int, *turns: dict[str, str]) -> httpx.Response:
        messages = [{"role": "system", "content": HEAD.format(second)}, *turns]
        return httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "stream": True}, timeout=60)

    first, answer, more = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Fine."}, "And now?"
    with in_thread("stub", StubUpstream) as stub, ThreadPoolExecutor(1) as client:
        stub.next_answers += [held, held]
        with proxy(stub.url, state) as url:
            asked = client.submit(ask, url, 1, first)
            until_noted(state)
            may_answer.set()
            assert asked.result().status_code == 200
        with proxy(stub.url, state) as url:
            assert ask(url, 2, first, answer, {"role": "user", "content": more}).status_code == 200
        before, after = (orjson.loads(seen.body)["messages"] for seen in stub.generating())
    assert "10:00:01" in before[-1]["content"]
    assert after[:3] == [*before, answer]


def until_noted(state: Path) -> None:
    """Until a conversation is in the state file."""
    deadline = time.monotonic() + 60
    with closing(sqlite3.connect(f"{state.as_uri()}?mode=ro", uri=True)) as opened:
        query = "SELECT count(*) FROM state WHERE name LIKE 'stabilise/conversations/%'"
        while opened.execute(query).fetchone() == (0,):
            assert time.monotonic() < deadline
            time.sleep(0.01)
