"""The pool of snapshot files and the table of roots."""

from __future__ import annotations

import re
from dataclasses import replace

from schedule_sim import facts, words

from prefixproxy.schedule import work
from prefixproxy.schedule.plan import Server
from prefixproxy.schedule.roots import Gathering, Root, RootState, RootTable, file_stem, fingerprint, root_id
from prefixproxy.schedule.slot import Held, Work
from prefixproxy.schedule.slots import Upstream
from prefixproxy.schedule.types import Policy, Save, WarmResult


def a_root(table: RootTable, name: str, tokens: int = 1000, *, now: float = 0.0) -> Root:
    return table.obtain(words(name, tokens).chain(), name, tokens, now)


def saved(table: RootTable, name: str, policy: Policy, n_bytes: int = 10, now: float = 0.0) -> list[str]:
    """Save a root of that name; the families whose snapshots went for it."""
    root = a_root(table, name, now=now)
    room = table.room_for(root, n_bytes, policy, now)
    assert room is not None
    root.file, victims = room
    for victim in victims:
        victim.snapshot, victim.file, victim.n_bytes = None, "", 0
    root.snapshot, root.n_bytes, root.state = Held(root.chain, 1000, 1000), n_bytes, RootState.READY
    return [victim.family for victim in victims]


def test_a_root_is_known_by_its_bytes_and_its_upstream() -> None:
    table = RootTable("u")
    assert a_root(table, "one") is a_root(table, "one")
    assert a_root(table, "one") is not a_root(table, "two")
    assert root_id(a_root(table, "one").chain, "u") != root_id(a_root(table, "one").chain, "v")


def test_files_are_named_after_model_build_and_settings_in_characters_the_server_accepts() -> None:
    table = RootTable("u", stem=file_stem(facts()))
    saved(table, "one", Policy())
    assert re.fullmatch(rf"prefixproxy-{fingerprint(facts())}-[0-9a-f]{{8}}-000\.bin", a_root(table, "one").file)
    marks = {fingerprint(facts(**change)) for change in ({}, {"model": "m"}, {"build": "b"})}  # type: ignore[arg-type]
    assert len({*marks, fingerprint(facts(n_slots=3))}) == 4


def test_nobody_else_who_saves_in_the_same_directory_uses_the_same_names() -> None:
    one = facts("a:1")
    others = [facts("a:2"), facts("a"), replace(one, owner="127.0.0.1:8101 http://a"), replace(one, build="b")]
    stems = {file_stem(each) for each in (one, *others)}
    assert len(stems) == 5
    assert not any(stem.startswith(other) for stem in stems for other in stems - {stem})
    assert file_stem(replace(one, rank=3, models=("m",))) == file_stem(one), "what another start may change"


def test_the_least_valuable_snapshot_goes_when_the_pool_is_full() -> None:
    table, policy = RootTable("u"), Policy(max_snapshots=2)
    assert saved(table, "old", policy, now=0.0) == []
    assert saved(table, "often used", policy, now=0.0) == []
    a_root(table, "often used").forks = 9
    a_root(table, "old", now=500.0)
    assert saved(table, "new", policy, now=600.0) == ["old"]
    assert len({root.file for root in table.saved()}) == 2


def test_age_makes_a_snapshot_worth_less() -> None:
    table, policy = RootTable("u"), Policy(max_snapshots=2)
    saved(table, "forked twice, long ago", policy, now=0.0)
    a_root(table, "forked twice, long ago").forks = 1
    saved(table, "fresh", policy, now=5000.0)
    assert saved(table, "new", policy, now=5001.0) == ["forked twice, long ago"]


def test_bytes_are_bounded_too() -> None:
    table, policy = RootTable("u"), Policy(max_snapshot_bytes=100)
    assert saved(table, "one", policy, 60) == []
    assert saved(table, "two", policy, 30, now=1.0) == []
    assert saved(table, "three", policy, 50, now=2.0) == ["one"]
    assert table.room_for(a_root(table, "huge"), 101, policy, 3.0) is None


def test_a_file_that_is_being_read_or_written_is_not_given_away() -> None:
    table, policy = RootTable("u"), Policy(max_snapshots=1)
    saved(table, "one", policy)
    a_root(table, "one").restoring = 1
    assert table.room_for(a_root(table, "two"), 10, policy, 1.0) is None
    a_root(table, "one").restoring = 0
    a_root(table, "one").state = RootState.SAVING
    assert table.room_for(a_root(table, "two"), 10, policy, 1.0) is None


def test_two_disappointments_in_a_row_end_snapshots_one_does_not() -> None:
    table = RootTable("u")
    root = a_root(table, "one")
    assert table.judge(root, delivered=False)
    assert not table.judge(root, delivered=True)
    assert table.judge(root, delivered=False)
    assert table.off_because == ""
    assert table.judge(root, delivered=False)
    assert table.off_because == "restored roots were not reused"


def test_roots_and_closed_windows_are_forgotten_but_none_with_a_file() -> None:
    table = RootTable("u")
    saved(table, "saved", Policy())
    for i in range(5):
        a_root(table, f"root {i}", now=float(i))
    table.gatherings = [Gathering(a_root(table, "saved").chain, 1.0), Gathering(a_root(table, "saved").chain, 9.0)]
    table.forget_stale(5.0, limit=3)
    assert [root.family for root in table.roots.values()] == ["saved", "root 3", "root 4"]
    assert [gathering.until for gathering in table.gatherings] == [9.0]


def test_a_restore_that_ends_while_its_root_is_saved_anew_does_not_take_the_file_away() -> None:
    server = Server(Upstream(facts(n_slots=2)), RootTable("u"))
    server.slots.open(0.0, {})
    reading, writing = server.slots.slots
    for slot in (reading, writing):
        server.slots.drained(slot, 0, 0.0)
    root = a_root(server.roots, "one")
    root.file, root.snapshot, root.state = "file", Held(root.chain, 640, 640), RootState.READY
    server.slots.counts.add(root.chain)
    work.start_restore(server, root, reading, None, Policy(), 1.0)
    assert work.drop(server, root) == []  # it was found not to deliver
    root.state = RootState.WARMING
    server.slots.reserve(writing, Work.WARM, root.id, 60.0, 1.0)
    (save,) = work.warmed(server, root, writing, WarmResult(True, 640, 0.1), Policy(), 1.1)
    assert work.restored(server, root, reading, 0.2, 1.2) == []
    work.saved(server, root, writing, 1000, 0.1, 1.3)
    assert isinstance(save, Save)
    assert root.snapshot is not None
    assert root.file == save.file
