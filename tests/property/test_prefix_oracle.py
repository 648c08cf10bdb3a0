"""Block chains against plain byte comparison, and the holder counts against plain lists of chains."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixproxy.prefix import BLOCK_ENDS, PrefixChain, blocks_within, bytes_of, chain_of
from prefixproxy.schedule.counts import PrefixCounts

PIECES = st.lists(st.sampled_from([b"a" * 64, b"b" * 64, b"a" * 700, b"b" * 5000, b"c" * 63, b"d"]), max_size=6)
"""Few and repetitive, so that prompts share prefixes of all lengths."""


def shared_bytes(a: bytes, b: bytes) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def naive_blocks(a: bytes, b: bytes) -> int:
    """Whole blocks inside the part that both share."""
    shared = shared_bytes(a, b)
    return sum(1 for _ in takewhile(lambda end: end <= shared, BLOCK_ENDS))


@given(PIECES, PIECES)
def test_common_blocks_are_the_whole_blocks_of_the_shared_bytes(a: list[bytes], b: list[bytes]) -> None:
    left, right = b"".join(a), b"".join(b)
    assert chain_of(a).common_blocks(chain_of(b)) == naive_blocks(left, right)


@given(PIECES, PIECES)
def test_common_bytes_never_claim_more_than_is_shared_and_miss_little(a: list[bytes], b: list[bytes]) -> None:
    left, right = b"".join(a), b"".join(b)
    shared, claimed = shared_bytes(left, right), chain_of(a).common_bytes(chain_of(b))
    assert claimed <= shared
    assert shared - claimed < max(64, shared // 64 + 1)
    if left == right:
        assert claimed == len(left)


@given(PIECES, PIECES)
def test_a_prompt_extends_another_when_it_has_all_its_whole_blocks(a: list[bytes], b: list[bytes]) -> None:
    left, right = b"".join(a), b"".join(b)
    whole = bytes_of(blocks_within(len(right)))
    assert chain_of(a).extends(chain_of(b)) == (left[:whole] == right[:whole])
    assert chain_of([left, right]).extends(chain_of([left]))


@given(PIECES, st.integers(0, 12))
def test_how_a_prompt_is_cut_into_parts_is_nothing_to_its_chain(a: list[bytes], cut: int) -> None:
    text = b"".join(a)
    assert chain_of(a) == chain_of([text]) == chain_of([text[:cut], b"", text[cut:]])


@given(PIECES, st.integers(0, 40))
def test_a_head_is_the_chain_of_the_leading_bytes(a: list[bytes], blocks: int) -> None:
    text = b"".join(a)
    chain = chain_of([text])
    head, expected = chain.head(blocks), chain_of([text[: bytes_of(min(blocks, len(chain.hashes)))]])
    assert (head.hashes, head.n_bytes) == (expected.hashes, expected.n_bytes)


@given(PIECES)
def test_a_salt_keeps_models_apart(a: list[bytes]) -> None:
    assert chain_of(a, b"one").common_blocks(chain_of(a, b"other")) == 0
    assert chain_of(a, b"one").digest != chain_of(a, b"other").digest


@given(st.integers(0, 1 << 20))
def test_blocks_within_and_bytes_of_are_inverse(n_bytes: int) -> None:
    blocks = blocks_within(n_bytes)
    assert bytes_of(blocks) <= n_bytes < BLOCK_ENDS[blocks]
    assert blocks_within(bytes_of(blocks)) == blocks


class Counts(RuleBasedStateMachine):
    """Holder counts beside the list of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = PrefixCounts()
        self.held: list[PrefixChain] = []

    @rule(pieces=PIECES)
    def hold(self, pieces: list[bytes]) -> None:
        self.held.append(chain_of(pieces))
        self.counts.add(self.held[-1])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def let_go(self, which: int) -> None:
        self.counts.remove(self.held.pop(which % len(self.held)))

    @rule(pieces=PIECES, holders=st.integers(1, 3))
    def ask(self, pieces: list[bytes], holders: int) -> None:
        """The depth that the so-many-th best holder shares."""
        chain = chain_of(pieces)
        depths = sorted((chain.common_blocks(other) for other in self.held), reverse=True)
        assert self.counts.deepest(chain, holders) == (depths[holders - 1] if len(depths) >= holders else 0)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        assert len(self.counts) == len({block for chain in self.held for block in chain.hashes})


TestCounts = Counts.TestCase


PARTS = st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5)


@given(PARTS, PARTS)
def test_a_prompt_is_found_as_the_beginning_of_one_that_goes_on(parts: list[bytes], more: list[bytes]) -> None:
    whole = chain_of([*parts, *more])
    assert whole.goes_on(chain_of(parts))
    assert whole.goes_on(whole)
    assert whole.end_at(sum(map(len, parts))) == chain_of(parts).digest
    assert whole == chain_of([b"".join([*parts, *more])])


@given(PARTS, PARTS, st.data())
def test_another_last_byte_is_another_beginning(parts: list[bytes], more: list[bytes], given: st.DataObject) -> None:
    """Though it may lie behind the last whole block."""
    last = bytearray(parts[-1])
    last[-1] ^= given.draw(st.integers(1, 255))
    assert not chain_of([*parts, *more]).goes_on(chain_of([*parts[:-1], bytes(last)]))
