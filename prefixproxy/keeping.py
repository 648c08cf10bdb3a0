"""Keeps memories over a restart: loads them at start, writes what changed soon after it did.

A change is written at once if nothing was written lately, so what one turn taught is on disk before the next one
comes, also when the process is killed. Exports run on the event loop (their owners are not for threads); the pause
between two grows with what one takes, so that they never cost more than a few percent of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prefixproxy.state import StateFile

SHORTEST_PAUSE_S = 0.25
PAUSE_PER_EXPORT = 25.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """One memory. `revision` changes with its content; `load` raises ValueError, KeyError or TypeError for data that
    it cannot read."""

    export: Callable[[], Any]
    load: Callable[[Any], None]
    revision: Callable[[], int]


class Keeping:
    """Writes `memories` to `state` while `run` runs; `changed` wakes it."""

    def __init__(self, state: StateFile, memories: Mapping[str, Kept], clock: Callable[[], float]) -> None:
        self._state = state
        self._memories = dict(memories)
        self._written = {name: kept.revision() for name, kept in self._memories.items()}
        self._clock = clock
        self._changed = asyncio.Event()

    def load(self) -> None:
        """Take over what an earlier process left; what cannot be read is left out, with a warning."""
        for name, kept in self._memories.items():
            value = self._state.load(name)
            if value is None:
                continue
            try:
                kept.load(value)
            except (ValueError, KeyError, TypeError) as failure:
                log.warning("state %r cannot be used and starts empty: %s", name, failure)
            self._written[name] = kept.revision()

    def changed(self) -> None:
        """Something may have changed; cheap, and may be called at any time."""
        if self._state.persistent:
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled; then what is still unwritten is written."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                seconds = await self._write()
                await asyncio.sleep(max(SHORTEST_PAUSE_S, PAUSE_PER_EXPORT * seconds))
        finally:
            await asyncio.shield(self._write())

    async def _write(self) -> float:
        """Write what has changed; the seconds the exports took on the loop."""
        spent_s = 0.0
        for name, kept in self._memories.items():
            revision = kept.revision()
            if revision == self._written[name]:
                continue
            started = self._clock()
            value = kept.export()
            spent_s += self._clock() - started
            if await asyncio.to_thread(self._state.store, name, value):
                self._written[name] = revision
        return spent_s
