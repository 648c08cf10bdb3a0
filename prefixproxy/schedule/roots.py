"""The roots of one upstream: which are being warmed, which have a snapshot, and the bounded pool of snapshot files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import count
from math import exp2, inf

from prefixproxy.prefix import PrefixChain
from prefixproxy.schedule.slot import Held
from prefixproxy.schedule.types import Policy
from prefixproxy.types import RootId, SlotId, UpstreamFacts

STRIKES = 2
"""Snapshots in a row that did not deliver before an upstream gets no more of them."""
ROOT_HALF_LIFE_S = 1200.0
"""In which an unused snapshot loses half its worth."""
EARLIER_TURN = 0.1
"""How likely the turn before the newest is gone on from, beside the newest."""
RETRY_S = 60.0
"""A root that could not be warmed is left alone for this long."""
DELIVERED_SHARE = 0.5
"""A restored root of which less than this share was reused did not deliver. Estimates are off by far less."""


class RootState(StrEnum):
    COLD = "cold"
    WARMING = "warming"
    SAVING = "saving"
    READY = "ready"


@dataclass(slots=True)
class Root:
    """`tokens`: of the root itself. `file`, `n_bytes`: the file it is saved in or is being saved to. `snapshot`: what
    that file holds once saved, perhaps more than the root. `restoring`: restores that read it now. `forks`: how often
    it was restored. `until`: when the warm-up or save under way counts as failed. `retry_at`: not warmed before.
    `leader`: the prompt it was first seen in. `parked`: what one conversation left in a slot, not a root of several.
    `adopted`: its file is an earlier process's, and has not been read yet. `saved_from`: the slot its file was written
    from, None if that was in an earlier process. `earlier`: a later turn of its conversation was parked."""

    id: RootId
    chain: PrefixChain
    family: str
    tokens: int
    state: RootState = RootState.COLD
    file: str = ""
    n_bytes: int = 0
    snapshot: Held | None = None
    restoring: int = 0
    forks: int = 0
    last_used: float = 0.0
    until: float = inf
    retry_at: float = -inf
    leader: PrefixChain | None = None
    parked: bool = False
    adopted: bool = False
    saved_from: SlotId | None = None
    earlier: bool = False
    number: int = 0
    """Grows in the order in which the roots of a table became known."""

    @property
    def running(self) -> bool:
        return self.state in (RootState.WARMING, RootState.SAVING)


@dataclass(slots=True)
class Gathering:
    """A cold root that was just seen for the first time: lanes that share it are waited for until `until`."""

    chain: PrefixChain
    until: float


def root_id(chain: PrefixChain, upstream: str) -> RootId:
    """The same root on another upstream is another root: it is warmed and saved there on its own."""
    return RootId(f"{chain.digest:016x}@{upstream}")


def fingerprint(facts: UpstreamFacts) -> str:
    """What a snapshot is bound to. llama-server checks neither model nor build of a slot file (llama-kv-cache.cpp
    state_read checks layer count, K/V types and number of streams only)."""
    text = "\0".join((facts.model, facts.build, str(facts.n_slots), str(facts.n_ctx_slot)))
    return blake2b(text.encode(), digest_size=6).hexdigest()


def file_stem(facts: UpstreamFacts) -> str:
    """What the names of its snapshot files begin with. Servers of one model may share a directory, and a server may
    have several proxies: whoever else saves there, as far as that can be told, uses other names. Two servers that
    write one file at the same time leave a mixture, of which the header may still be whole."""
    owner = blake2b(f"{facts.name}\0{facts.owner}".encode(), digest_size=4).hexdigest()
    return f"prefixproxy-{fingerprint(facts)}-{owner}-"


@dataclass(slots=True)
class RootTable:
    """Roots by id, with the pool of files, whose names begin with `stem`. `strikes`: snapshots in a row that did not
    deliver."""

    upstream: str
    fingerprint: str = ""
    stem: str = ""
    roots: dict[RootId, Root] = field(default_factory=dict)
    gatherings: list[Gathering] = field(default_factory=list)
    strikes: int = 0
    off_because: str = ""
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _under_way: dict[RootId, Root] = field(default_factory=dict)
    _by_end: dict[int, dict[RootId, Root]] = field(default_factory=dict)
    """By the last block of its chain."""

    def add(self, root: Root) -> Root:
        """This root, or the one of the same chain that was known before."""
        known = self.roots.setdefault(root.id, root)
        if known is root:
            root.number = next(self._numbers)
            self._by_end.setdefault(_end(root.chain), {})[root.id] = root
        return known

    def enter(self, root: Root, state: RootState) -> None:
        """Change its state; `running` knows by this who is under way."""
        root.state = state
        if root.running:
            self._under_way[root.id] = root
        else:
            self._under_way.pop(root.id, None)

    def deepest_shared(self, chain: PrefixChain) -> int:
        """Blocks of the longest known root of several that `chain` begins with."""
        for end in reversed(chain.hashes):
            for root in self._by_end.get(end, {}).values():
                if not root.parked and chain.extends(root.chain):
                    return len(root.chain.hashes)
        return 0

    def obtain(self, chain: PrefixChain, family: str, tokens: int, now: float) -> Root:
        """The root of exactly this chain, known or new."""
        key = root_id(chain, self.upstream)
        root = self.roots.get(key) or self.add(Root(key, chain, family, tokens))
        root.last_used = now
        return root

    def find(self, chain: PrefixChain) -> Root | None:
        return self.roots.get(root_id(chain, self.upstream))

    def end_gathering(self, chain: PrefixChain) -> None:
        half = len(chain.hashes) // 2
        self.gatherings = [g for g in self.gatherings if g.chain.common_blocks(chain) <= half]

    def running(self) -> list[Root]:
        return sorted(self._under_way.values(), key=lambda root: root.number)

    def saved(self) -> Iterator[Root]:
        return (root for root in self.roots.values() if root.snapshot is not None)

    def worth(self, root: Root, now: float) -> float:
        """Prefill tokens a snapshot is expected to save: its length, times its forks, less the longer it lies idle."""
        share = EARLIER_TURN if root.earlier else 1.0
        return share * root.tokens * (1 + root.forks) * exp2((root.last_used - now) / ROOT_HALF_LIFE_S)

    def room_for(self, root: Root, n_bytes: int, policy: Policy, now: float) -> tuple[str, list[Root]] | None:
        """A file for `root` of about `n_bytes`, and the least valuable roots whose snapshots must go for it; None if
        even that is not enough."""
        holders = [other for other in self.roots.values() if other.file and other is not root]
        spare = sorted(
            (other for other in holders if not other.restoring and not other.running),
            key=lambda root: self.worth(root, now),
        )
        victims: list[Root] = []
        total = n_bytes + sum(other.n_bytes for other in holders)
        while len(holders) >= policy.max_snapshots or total > policy.max_snapshot_bytes:
            if not spare or (root.parked and self.worth(spare[0], now) >= self.worth(root, now)):
                return None
            victims.append(spare.pop(0))
            holders.remove(victims[-1])
            total -= victims[-1].n_bytes
        used = {other.file for other in holders}
        names = (f"{self.stem}{i:03d}.bin" for i in count())
        return next(name for name in names if name not in used), victims

    def supersede(self, root: Root, rolls_back: bool) -> list[Root]:
        """The earlier turns of the conversation that was just parked that are not needed any more. The last of them is
        kept, for less, where slots cannot be cut back: whoever asks the newest question again in other words goes on
        from there."""
        earlier = [
            other
            for other in self.saved()
            if other is not root and other.parked and not other.restoring and _is_later(root.chain, other.chain)
        ]
        root.earlier = False
        if rolls_back or not earlier:
            return earlier
        *gone, last = sorted(earlier, key=lambda other: other.tokens)
        last.earlier = True
        return gone

    def judge(self, root: Root, delivered: bool) -> bool:
        """Note whether a restored root was reused; True if its snapshot has to be dropped."""
        if delivered:
            self.strikes, root.adopted = 0, False
            return False
        if root.adopted:
            return True
        self.strikes += 1
        if self.strikes >= STRIKES:
            self.off_because = "restored roots were not reused"
        return True

    def forget_stale(self, now: float, limit: int) -> None:
        """Forget closed windows, and the least valuable roots beyond `limit`; one with a file or under way stays."""
        if self.gatherings:
            self.gatherings = [g for g in self.gatherings if now < g.until]
        over = len(self.roots) - limit
        if over > 0:
            idle = [root for root in self.roots.values() if not root.file and not root.running]
            for root in sorted(idle, key=lambda root: self.worth(root, now))[:over]:
                del self.roots[root.id]
                self._by_end[_end(root.chain)].pop(root.id)
                if not self._by_end[_end(root.chain)]:
                    del self._by_end[_end(root.chain)]


def _end(chain: PrefixChain) -> int:
    return chain.hashes[-1] if chain.hashes else 0


def _is_later(chain: PrefixChain, earlier: PrefixChain) -> bool:
    """Whether a prompt goes on from an earlier one. Two short ones, or two questions on one root, may differ in their
    last, partial block alone; a prompt without parts does not tell that."""
    if len(chain.ends) < 2 and earlier.hashes:
        return chain.extends(earlier)
    return chain.goes_on(earlier)
