"""How many holders (slots, snapshots, waiting prompts) share each block, and who it is where there is only one."""

from __future__ import annotations

from bisect import bisect_left

from prefixproxy.prefix import PrefixChain

NOBODY = 0
_ONE = 1 << 64
_WHO = _ONE - 1


class PrefixCounts:
    """Each block's holders as one number: how many above bit 64, the sum of their names below it. A name is a whole
    number from 0 (`NOBODY`, for those nobody asks for), far below 2^32."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def add(self, chain: PrefixChain, who: int = NOBODY, start: int = 0) -> None:
        """Count a holder for the blocks from `start` on."""
        holders, one = self._holders, _ONE + who
        for block in chain.hashes[start:] if start else chain.hashes:
            holders[block] = holders.get(block, 0) + one

    def remove(self, chain: PrefixChain, who: int = NOBODY, start: int = 0) -> None:
        holders, one = self._holders, _ONE + who
        for block in chain.hashes[start:] if start else chain.hashes:
            left = holders[block] - one
            if left:
                holders[block] = left
            else:
                del holders[block]

    def deepest(self, chain: PrefixChain, holders: int = 1) -> int:
        """How many leading blocks of `chain` at least that many holders have; holders never grow with depth."""
        hashes, counted, enough = chain.hashes, self._holders, holders * _ONE
        if not hashes or counted.get(hashes[0], 0) < enough:
            return 0
        return bisect_left(hashes, True, key=lambda block: counted.get(block, 0) < enough)

    def sole(self, chain: PrefixChain, start: int = 0) -> int:
        """The one holder of the deepest block of `chain` that anybody holds, if there is only one and that block lies
        behind the first `start`; NOBODY else."""
        blocks = self.deepest(chain)
        found = self._holders[chain.hashes[blocks - 1]] if blocks > start else 0
        return found & _WHO if found < 2 * _ONE else NOBODY

    def __len__(self) -> int:
        return len(self._holders)
