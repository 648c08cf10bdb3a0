"""Runs an engine in a thread of its own, for tests of any colour."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from threads import in_thread

from prefixproxy.engine import Engine, EngineFacts, EngineSettings

START_TIMEOUT_S = 60.0
CHILDREN_FILE = Path(f"/proc/self/task/{os.getpid()}/children")
"""What the main thread has started; Linux alone has it."""


@dataclass(frozen=True)
class RunningEngine:
    """An engine that runs in a thread with its own event loop, so plain and async tests can share it."""

    url: str
    facts: EngineFacts
    settings: EngineSettings
    save_dir: Path
    engine: Engine


@asynccontextmanager
async def _ready_engine(settings: EngineSettings) -> AsyncIterator[RunningEngine]:
    async with Engine(settings) as engine:
        facts = await engine.wait_ready(START_TIMEOUT_S)
        assert facts is not None
        yield RunningEngine(engine.url, facts, settings, engine.save_dir, engine)


def running_engine(settings: EngineSettings) -> AbstractContextManager[RunningEngine]:
    """Run the engine until the block ends; raises what its start raised."""
    return in_thread("engine", lambda: _ready_engine(settings))


def engine_pids() -> set[int]:
    """The engines that the main thread runs."""
    children = [int(pid) for pid in CHILDREN_FILE.read_text().split()]
    return {pid for pid in children if b"engine_child" in Path(f"/proc/{pid}/cmdline").read_bytes()}
