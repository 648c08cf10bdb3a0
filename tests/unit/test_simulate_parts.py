"""Texts without words, the least that can be evaluated, and the server without a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from schedule_sim import FULL, words

from prefixproxy.prefix import blocks_within
from prefixproxy.simulate.server import RamCache, VirtualServer
from prefixproxy.simulate.text import BYTES_PER_TOKEN, EMPTY, Text, Trie, span
from prefixproxy.types import UpstreamFacts

PARTS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 90)), max_size=5)


def text_of(parts: list[tuple[int, int]]) -> Text:
    text = EMPTY
    for name, n in parts:
        text += span(name, n)
    return text


def tokens_of(text: Text) -> list[tuple[object, ...]]:
    """Each token as all that stands before it and its own place: what the spans mean, spelled out."""
    tokens: list[tuple[object, ...]] = []
    before: tuple[object, ...] = ()
    start = 0
    for name, end in text.spans:
        tokens += [(before, name, place) for place in range(start, end)]
        before, start = (before, name, end), end
    return tokens


@given(PARTS, PARTS)
def test_two_texts_have_in_common_what_their_tokens_have(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, two = text_of(a), text_of(b)
    shared = 0
    for x, y in zip(tokens_of(one), tokens_of(two), strict=False):
        if x != y:
            break
        shared += 1
    assert one.common(two) == two.common(one) == shared
    assert one.chain().common_blocks(two.chain()) == blocks_within(BYTES_PER_TOKEN * shared)


@given(st.lists(PARTS, max_size=6))
def test_the_least_is_the_number_of_distinct_prefixes(many: list[list[tuple[int, int]]]) -> None:
    trie = Trie()
    for parts in many:
        trie.add(text_of(parts))
    assert trie.tokens == len({token for parts in many for token in tokens_of(text_of(parts))})


@given(PARTS, st.integers(0, 500))
def test_a_head_has_the_first_tokens(parts: list[tuple[int, int]], n: int) -> None:
    text = text_of(parts)
    assert tokens_of(text.head(n)) == tokens_of(text)[:n]
    assert len(text.head(n)) == min(n, len(text))


def test_what_the_server_generated_costs_nothing() -> None:
    trie, first = Trie(), span(1, 100)
    trie.add(first)
    trie.add(first + span(-1, 30) + span(2, 20))
    assert trie.tokens == 120


def test_the_ram_cache_keeps_the_longest_and_gives_an_entry_away() -> None:
    ram, root = RamCache(1000), span(1, 100)
    ram.publish(root)
    ram.publish(root + span(2, 50))
    ram.publish(root)
    assert ram.load(root + span(3, 50), EMPTY) == (root + span(2, 50), ())
    assert ram.load(root, EMPTY) is None


def test_the_ram_cache_loads_only_what_is_better_than_the_slot_and_used_by_a_quarter() -> None:
    ram, root = RamCache(10_000), span(1, 100)
    ram.publish(root + span(2, 900))
    assert ram.load(root + span(3, 50), EMPTY) is None
    ram.publish(root + span(4, 50))
    assert ram.load(root + span(4, 60), root + span(4, 55)) is None


def test_the_ram_cache_forgets_its_oldest_entry_when_it_is_full() -> None:
    ram = RamCache(250)
    for name in (1, 2, 3):
        ram.publish(span(name, 100))
    assert ram.load(span(1, 110), EMPTY) is None
    assert ram.load(span(3, 110), EMPTY) == (span(3, 100), ())


def server(ram_tokens: int = 0) -> VirtualServer:
    return VirtualServer(UpstreamFacts("u", "llama-server", 2, capabilities=FULL), rate=100.0, ram_tokens=ram_tokens)


def run_one(made: VirtualServer, slot: int | None, prompt: Text) -> tuple[int, int]:
    """Evaluate it alone: its slot, and what was reused."""
    taken = made.take(slot, prompt, made.free_at, "a test")
    assert taken is not None
    made.release(taken.slot, taken.ready)
    return taken.slot, taken.cached


def test_a_conversation_that_lost_its_slot_comes_back_from_the_ram_cache_but_not_into_an_empty_slot() -> None:
    first, other = words("one", 200), words("two", 200)
    for ram_tokens, back in ((10_000, 200), (0, 0)):
        made = server(ram_tokens)
        assert [run_one(made, 0, text) for text in (first, other)] == [(0, 0), (0, 0)]
        assert run_one(made, 1, first + span(9, 10)) == (1, 0)  # a pin to an empty slot asks nobody
        made = server(ram_tokens)
        for text in (first, other):
            run_one(made, 0, text)
        assert run_one(made, 0, first + span(9, 10)) == (0, back)


def test_an_unpinned_prompt_goes_to_the_most_similar_slot_else_to_the_one_unused_for_longest() -> None:
    made = server()
    assert [run_one(made, None, words(name, 50))[0] for name in ("one", "two", "one")] == [1, 0, 1]
    assert run_one(made, None, words("three", 50))[0] == 0


def test_the_last_token_of_a_prompt_is_always_evaluated() -> None:
    made = server()
    assert [run_one(made, 0, words("one", 50)) for _ in range(2)] == [(0, 0), (0, 49)]
    assert made.evaluated == 51
