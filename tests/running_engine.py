"""Runs an engine in a thread of its own, for tests of any colour."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefixproxy.engine import Engine, EngineFacts, EngineSettings

START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RunningEngine:
    """An engine that runs in a thread with its own event loop, so plain and async tests can share it."""

    url: str
    facts: EngineFacts
    settings: EngineSettings
    save_dir: Path
    engine: Engine


@contextmanager
def running_engine(settings: EngineSettings) -> Iterator[RunningEngine]:
    """Run the engine until the block ends; raises what its start raised."""
    started: list[RunningEngine | BaseException] = []
    settled, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with Engine(settings) as engine:
            facts = await engine.wait_ready(START_TIMEOUT_S)
            assert facts is not None
            started.append(RunningEngine(engine.url, facts, settings, engine.save_dir, engine))
            settled.set()
            await asyncio.to_thread(stop.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - handed to the test below
            started.append(error)
            settled.set()

    thread = threading.Thread(target=run, name="engine")
    thread.start()
    try:
        settled.wait()
        if isinstance(started[0], BaseException):
            raise started[0]
        yield started[0]
    finally:
        stop.set()
        thread.join()
