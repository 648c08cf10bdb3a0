"""What of an upstream outlives a restart: of the server, of its connection, or of this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefixproxy.schedule import work
from prefixproxy.schedule.plan import Server
from prefixproxy.schedule.roots import Root, RootState, RootTable, file_stem, fingerprint, root_id
from prefixproxy.schedule.slot import Held
from prefixproxy.schedule.types import Effect
from prefixproxy.types import SlotId, UpstreamFacts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One file of a server: what it holds, and of that the root (`blocks`; all of it where `parked`)."""

    file: str
    n_bytes: int
    held: Held
    blocks: int
    family: str
    forks: int
    parked: bool


@dataclass(frozen=True, slots=True)
class Recalled:
    """What an earlier process wrote down of an upstream, with its `mark` (model, build and settings)."""

    mark: str
    held: Mapping[int, Held]
    snapshots: Sequence[Snapshot] = ()


NOTHING_RECALLED = Recalled("", {})


def residency(servers: Iterable[Server]) -> Iterator[tuple[SlotId, str, Held]]:
    """What each slot is believed to hold, with its upstream's mark."""
    for server in servers:
        if server.slots.observed:
            for slot in server.slots.slots:
                yield slot.id, fingerprint(server.slots.facts), slot.held


def snapshots(servers: Iterable[Server]) -> Iterator[tuple[str, str, list[Snapshot]]]:
    """The snapshots of each upstream that was ever up, with its name and mark."""
    for server in servers:
        if server.roots.fingerprint:
            found = [_snapshot(root, root.snapshot) for root in server.roots.saved() if root.snapshot is not None]
            yield server.slots.name, server.roots.fingerprint, found


def _snapshot(root: Root, held: Held) -> Snapshot:
    blocks = len(root.chain.hashes)
    return Snapshot(root.file, root.n_bytes, held, blocks, root.family, root.forks, root.parked)


def come_up(server: Server, facts: UpstreamFacts, same: bool, recalled: Recalled, now: float) -> list[Effect]:
    """A server that was lost, or is new, answers. Its files are used again if it is the `same` as before; `recalled`
    is of this very mark."""
    effects: list[Effect] = []
    mark = fingerprint(facts)
    if not same:
        for root in list(server.roots.saved()):
            effects += work.drop(server, root)
        server.roots = RootTable(facts.name)
    server.slots.open(now, recalled.held)
    server.roots.fingerprint, server.roots.stem = mark, file_stem(facts)
    for snapshot in recalled.snapshots:
        if snapshot.file.startswith(server.roots.stem):  # else somebody else may write it
            _adopt(server, snapshot, now)
    work.recount(server)
    server.roots.strikes, server.roots.off_because = 0, ""
    server.rewarm = True
    return effects


def _adopt(server: Server, snapshot: Snapshot, now: float) -> None:
    """Take over a file that an earlier process had written. Whether it is still there shows when it is read."""
    whole = snapshot.parked or snapshot.blocks >= len(snapshot.held.chain.hashes)
    chain = snapshot.held.chain if whole else snapshot.held.chain.head(snapshot.blocks)
    root = Root(
        root_id(chain, server.slots.name),
        chain,
        snapshot.family,
        snapshot.held.tokens if whole else snapshot.held.tokens_at(snapshot.blocks),
        RootState.READY,
        snapshot.file,
        snapshot.n_bytes,
        snapshot.held,
        forks=snapshot.forks,
        last_used=now,
        parked=snapshot.parked,
        adopted=True,
    )
    server.roots.add(root)
