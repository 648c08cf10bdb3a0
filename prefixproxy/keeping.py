"""Keeps memories over a restart: loads them at start, writes what changed soon after it did.

A change is written at once; what changes while that runs, and in a pause behind it that is `PAUSE_RATIO` times as
long, is written together next. So writing takes a fifth of the time at the most. No answer waits for it: a kill loses
what the last moment taught, which is the writing under way and the pause behind one (milliseconds; `PAUSE_S` where
writing is slow). What is lost costs the conversation one evaluation. Only changed entries are written. Reading them
out runs on the event loop (their owners are not for threads), writing in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from prefixproxy.answers import AnswerMemory
from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.memory import Recalled, Snapshot, residency, snapshots
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.slot import Held
from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.state import StateFile
from prefixproxy.tools import ToolMemory
from prefixproxy.verdicts import ROWS, Verdicts

PAUSE_S = 0.25
PAUSE_RATIO = 4.0
READ_S = 5.0
"""How soon a running proxy hears of a verdict that another process wrote."""

Rows = dict[str, Any]
"""JSON values by name; None: the entry is gone."""

PARTS = {"families": "of seen prompts", "conversations": "of conversations", "suggestions": "of suggested rules"}
"""What the stabiliser keeps, and what an entry is of."""

log = logging.getLogger(__name__)


class Kept(Protocol):
    """One memory, seen as rows whose names start with `prefix`."""

    prefix: str

    def changes(self) -> Rows:
        """What changed since the last call."""
        ...

    def load(self, rows: Rows) -> None:
        """Take back what an earlier process wrote. Raises ValueError, KeyError or TypeError for what it cannot read."""
        ...


class StabiliserRows:
    """A row for each family, each conversation and each suggested rule."""

    prefix = "stabilise/"

    def __init__(self, stabiliser: Stabiliser) -> None:
        self._stabiliser = stabiliser
        self._refused: list[str] = []
        """Rows that could not be read. They are taken out, so that they are told of once."""

    def changes(self) -> Rows:
        changed = self._stabiliser.changes()
        rows: Rows = dict.fromkeys(self._refused)
        self._refused.clear()
        rows |= {f"{self.prefix}{part}/{key}": entry for part in PARTS for key, entry in changed[part].items()}
        return {**rows, f"{self.prefix}format": changed["format"]} if rows else {}

    def load(self, rows: Rows) -> None:
        state: dict[str, Any] = {"families": {}, "conversations": {}, "suggestions": {}}
        state["format"] = rows.get(f"{self.prefix}format")
        for name, entry in rows.items():
            part, _, key = name.removeprefix(self.prefix).partition("/")
            if key and part in PARTS:
                state[part][key] = entry
            elif key:
                self._refused.append(name)
        refused = self._stabiliser.load(state)
        self._refused += [f"{self.prefix}{part}/{key}" for part, key in refused]
        if self._refused:
            log.warning("state: %s", _loss(Counter(row.split("/")[1] for row in self._refused)))


def _loss(refused: Counter[str]) -> str:
    """What it means that so many entries of each part are gone."""
    counts = ", ".join(f"{refused[part]} {what}" for part, what in PARTS.items() if refused[part])
    others = sum(n for part, n in refused.items() if part not in PARTS)
    counts = ", ".join(filter(None, (counts, f"{others} others" if others else "")))
    return (
        f"{sum(refused.values())} entries were written by another version and are dropped ({counts}): "
        "the next turn of such a conversation may be evaluated anew once; everything else was taken over"
    )


class SlotRows:
    """A row for each slot and each snapshot: what it holds. An upstream outlives the proxy, and with it what is in its
    slots and files."""

    prefix = "slots/"

    def __init__(self, scheduler: Scheduler, upstreams: Collection[str]) -> None:
        """`upstreams`: those that outlive this process."""
        self._scheduler = scheduler
        self._upstreams = upstreams
        self._written: dict[str, Held] = {}
        self._files: dict[str, Held] = {}

    def changes(self) -> Rows:
        rows: Rows = {}
        for slot, mark, held in residency(self._scheduler.servers.values()):
            name = f"{self.prefix}{slot.upstream}/{slot.slot}"
            if slot.upstream in self._upstreams and self._written.get(name) is not held:
                self._written[name] = held
                rows[name] = _held_row(mark, held) if held.tokens else None
        for upstream, mark, found in snapshots(self._scheduler.servers.values()):
            if upstream in self._upstreams:
                rows |= self._changed_files(f"{self.prefix}{upstream}/", mark, found)
        return rows

    def _changed_files(self, prefix: str, mark: str, snapshots: Sequence[Snapshot]) -> Rows:
        found = {prefix + snapshot.file: snapshot for snapshot in snapshots}
        gone = [name for name in self._files if name.startswith(prefix) and name not in found]
        rows: Rows = dict.fromkeys(gone)
        for name in gone:
            del self._files[name]
        for name, snapshot in found.items():
            if self._files.get(name) is not snapshot.held:
                self._files[name] = snapshot.held
                rows[name] = _snapshot_row(mark, snapshot)
        return rows

    def load(self, rows: Rows) -> None:
        slots: dict[tuple[str, str], dict[int, Held]] = {}
        files: dict[tuple[str, str], list[Snapshot]] = {}
        for name, row in rows.items():
            upstream, _, last = name.removeprefix(self.prefix).rpartition("/")
            chain = PrefixChain(tuple(int(h, 16) for h in row["hashes"]), int(row["bytes"]), int(row["digest"], 16))
            held, place = Held(chain, int(row["prompt_tokens"]), int(row["tokens"])), (upstream, str(row["mark"]))
            if "file_bytes" in row:
                files.setdefault(place, []).append(_snapshot_of(last, held, row))
                self._files[name] = held
            else:
                slots.setdefault(place, {})[int(last)] = held
        for upstream, mark in sorted(slots.keys() | files.keys()):
            recalled = Recalled(mark, slots.get((upstream, mark), {}), files.get((upstream, mark), []))
            self._scheduler.recall(upstream, recalled)


def _held_row(mark: str, held: Held) -> dict[str, Any]:
    """Hashes in hexadecimal: JSON readers elsewhere keep 53 bits of a number, and these have 64."""
    return {
        "mark": mark,
        "tokens": held.tokens,
        "prompt_tokens": held.prompt_tokens,
        "bytes": held.chain.n_bytes,
        "digest": f"{held.chain.digest:x}",
        "hashes": [f"{block:x}" for block in held.chain.hashes],
    }


def _snapshot_row(mark: str, snapshot: Snapshot) -> dict[str, Any]:
    return {
        **_held_row(mark, snapshot.held),
        "file_bytes": snapshot.n_bytes,
        "blocks": snapshot.blocks,
        "family": snapshot.family,
        "forks": snapshot.forks,
        "parked": snapshot.parked,
    }


def _snapshot_of(file: str, held: Held, row: dict[str, Any]) -> Snapshot:
    return Snapshot(
        file,
        int(row["file_bytes"]),
        held,
        int(row["blocks"]),
        str(row["family"]),
        int(row["forks"]),
        bool(row["parked"]),
    )


@dataclass(slots=True)
class WholeRow:
    """A small memory in one row, written whole when its `revision` has moved."""

    prefix: str
    memory: ToolMemory | AnswerMemory
    _written: int = field(default=0)

    def changes(self) -> Rows:
        if self.memory.revision == self._written:
            return {}
        self._written = self.memory.revision
        return {self.prefix: self.memory.export()}

    def load(self, rows: Rows) -> None:
        for exported in rows.values():
            self.memory.load(exported)
        self._written = self.memory.revision


class VerdictRows:
    """What `verify` wrote: read again every now and then, never written."""

    prefix = ROWS

    def __init__(self, tell: Callable[[Verdicts], None]) -> None:
        self._tell = tell
        self._known: Rows | None = None

    def changes(self) -> Rows:
        return {}

    def load(self, rows: Rows) -> None:
        if rows != self._known:
            self._known = rows
            self._tell(Verdicts(rows))


class Keeping:
    """Writes `memories` to `state` while it is `running`; `changed` wakes it. What others write meanwhile is read every
    `read_s` seconds (`verdicts`)."""

    def __init__(
        self,
        state: StateFile,
        memories: Sequence[Kept],
        verdicts: VerdictRows | None = None,
        read_s: float = READ_S,
    ) -> None:
        self._state = state
        self._memories = memories
        self._verdicts = verdicts
        self._read_s = read_s
        self._unwritten: Rows = {}
        self._changed = asyncio.Event()

    def load(self) -> None:
        """Take over what an earlier process left; what cannot be read is dropped from the file, with a warning."""
        if self._verdicts is not None:
            self._verdicts.load(self._state.rows(self._verdicts.prefix))
        for kept in self._memories:
            rows = self._state.rows(kept.prefix)
            try:
                kept.load(rows)
            except (ValueError, KeyError, TypeError, AttributeError) as failure:
                log.warning("state %r cannot be used and starts empty: %s", kept.prefix, failure)
                self._unwritten |= dict.fromkeys(rows)
        self.changed()

    def changed(self) -> None:
        """Something may have changed; cheap, and may be called at any time."""
        self._changed.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Loads, keeps writing, and writes what is left at the end."""
        self.load()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep_writing())]
            if self._verdicts is not None and self._state.persistent:
                tasks.append(group.create_task(self._keep_reading(self._verdicts)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
        await self.write()
        self._state.close()

    async def _keep_writing(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait()
            self._changed.clear()
            started = loop.time()
            written = await self.write()
            await asyncio.sleep(min(PAUSE_S, PAUSE_RATIO * (loop.time() - started)) if written else PAUSE_S)

    async def _keep_reading(self, verdicts: VerdictRows) -> None:
        while True:
            await asyncio.sleep(self._read_s)
            verdicts.load(await asyncio.to_thread(self._state.rows, verdicts.prefix))

    async def write(self) -> bool:
        """Write what has changed now; whether that could be done. If not, it is tried again the next time."""
        for kept in self._memories:
            self._unwritten |= kept.changes()
        if not self._unwritten:
            return True
        written = dict(self._unwritten)
        if not await asyncio.to_thread(lambda: self._state.update(written)):
            return False
        self._unwritten.clear()
        return True


def keeping_of(
    state: StateFile,
    stabiliser: Stabiliser,
    tools: ToolMemory,
    answers: AnswerMemory,
    *more: Kept,
    verdicts: VerdictRows | None = None,
) -> Keeping:
    """Everything that must outlive a restart for the next turn of a known conversation to extend it."""
    return Keeping(
        state, [StabiliserRows(stabiliser), WholeRow("tools", tools), WholeRow("answers", answers), *more], verdicts
    )
