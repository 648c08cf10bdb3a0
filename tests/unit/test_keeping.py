"""What one process learned is there for the next, also when the first was killed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from prompting import prompt_of

from prefixproxy import keeping as keeping_module
from prefixproxy.answers import AnswerMemory
from prefixproxy.keeping import Keeping, StabiliserRows, VerdictRows, WholeRow, keeping_of
from prefixproxy.stabilise.stabiliser import Stabiliser
from prefixproxy.state import StateFile
from prefixproxy.tools import ToolMemory
from prefixproxy.verdicts import Verdicts
from prefixproxy.volatile.files import load_rules


def memories() -> tuple[Stabiliser, ToolMemory, AnswerMemory]:
    return Stabiliser(load_rules([], frozenset())), ToolMemory(10, 10_000), AnswerMemory(10, 10_000)


def learned_calls(answers: AnswerMemory) -> object:
    return answers.export()


async def test_what_was_learned_is_written_while_it_runs_and_read_by_the_next(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    first, second = memories(), memories()
    first[2].learn("call_1", "look", '{"a":  1}')
    with StateFile(path) as state:
        await keeping_of(state, *first).write()
    with StateFile(path) as state:
        keeping_of(state, *second).load()
    assert learned_calls(second[2]) == [["call_1", "look", '{"a":  1}']]


async def test_what_is_unwritten_at_the_end_is_written_then(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    first, second = memories(), memories()
    async with keeping_of(StateFile(path), *first).running():
        first[2].learn("call_1", "look", "{}")
    with StateFile(path) as state:
        keeping_of(state, *second).load()
    assert learned_calls(second[2]) == [["call_1", "look", "{}"]]


async def test_nothing_changed_writes_nothing(tmp_path: Path) -> None:
    stabiliser, tools, answers = memories()
    with StateFile(str(tmp_path / "state.db")) as state:
        rows = StabiliserRows(stabiliser), WholeRow("tools", tools), WholeRow("answers", answers)
        await Keeping(state, rows).write()
        assert [kept.changes() for kept in rows] == [{}, {}, {}]
        assert state.rows("") == {}


async def test_what_could_not_be_written_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stabiliser, tools, answers = memories()
    with StateFile(str(tmp_path / "state.db")) as state:
        keeping = keeping_of(state, stabiliser, tools, answers)
        answers.learn("call_1", "look", "{}")
        with monkeypatch.context() as patch:
            patch.setattr(state, "update", lambda values: False)
            await keeping.write()
        assert state.rows("answers") == {}
        await keeping.write()
        assert state.rows("answers") == {"answers": [["call_1", "look", "{}"]]}


def test_rows_of_another_shape_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with StateFile(str(tmp_path / "state.db")) as state:
        state.update({"answers": {"what": "is this"}, "tools": 7, "stabilise/families/zz": None})
        stabiliser, tools, answers = memories()
        keeping_of(state, stabiliser, tools, answers).load()
    assert (answers.export(), tools.export()) == ([], {"tools": [], "orders": []})
    assert "starts empty" in caplog.text


def stabiliser_state(path: Path) -> None:
    """The state file of a process that saw one conversation with a clock."""
    first = memories()
    first[0].apply(prompt_of("Current time: 10:00:00\nYou are the clerk.", "u:Hello"), 0.0, request_id="r")
    with StateFile(str(path)) as state:
        state.update(StabiliserRows(first[0]).changes())


@pytest.mark.parametrize("change", ["steps of another shape", "another format", "another part"])
async def test_entries_of_another_version_are_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    path = tmp_path / "state.db"
    stabiliser_state(path)
    with StateFile(str(path)) as state:
        names = [name for name in state.rows("stabilise/") if name.startswith("stabilise/conversations/")]
        if change == "steps of another shape":
            state.update({names[0]: {"steps": []}})
        elif change == "another format":
            state.update({"stabilise/format": 0})
        else:
            state.update({"stabilise/odd/1": {}})
    told = []
    for _ in range(2):
        caplog.clear()
        async with keeping_of(StateFile(str(path)), *memories()).running():
            pass
        told.append([record.message for record in caplog.records])
    ((message,), none) = told
    assert "written by another version and are dropped" in message
    assert "evaluated anew once" in message
    assert none == []


async def test_rows_that_cannot_be_used_at_all_are_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "state.db")
    with StateFile(path) as state:
        state.update({"answers": {"what": "is this"}})
    for warnings in (1, 0):
        caplog.clear()
        async with keeping_of(StateFile(path), *memories()).running():
            pass
        assert len(caplog.records) == warnings


class Watched:
    """A state file whose writes are counted, the first held up until it is let go."""

    def __init__(self, state: StateFile) -> None:
        self.written: list[dict[str, Any]] = []
        self.may_go = Event()
        self._update = state.update

    def update(self, values: Mapping[str, Any]) -> bool:
        assert self.may_go.wait(60)
        self.written.append(dict(values))
        return self._update(values)


async def test_a_change_behind_a_write_is_written_without_a_long_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in that pause would lose it. What changes during a write is written in one go after it."""
    monkeypatch.setattr(keeping_module, "PAUSE_S", 3600.0)
    state = StateFile(str(tmp_path / "state.db"))
    watched, (stabiliser, tools, answers) = Watched(state), memories()
    monkeypatch.setattr(state, "update", watched.update)
    keeping = keeping_of(state, stabiliser, tools, answers)
    async with keeping.running(), asyncio.timeout(60):
        for number in range(4):
            answers.learn(f"call_{number}", "look", "{}")
            keeping.changed()
            await asyncio.sleep(0)
        watched.may_go.set()
        while not watched.written or len(watched.written[-1]["answers"]) < 4:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.001)
        assert len(watched.written) <= 2


pytestmark = pytest.mark.anyio


async def test_a_verdict_that_another_process_wrote_is_read_while_it_runs(tmp_path: Path) -> None:
    path = str(tmp_path / "state.db")
    told: list[Mapping[str, Any]] = []
    heard = asyncio.Event()

    def tell(verdicts: Verdicts) -> None:
        told.append(verdicts.rows)
        if verdicts.rows:
            heard.set()

    keeping = Keeping(StateFile(path), [], VerdictRows(tell), read_s=0.01)
    async with keeping.running():
        with StateFile(path) as other:
            assert other.update({"verify/abc": {"outcome": "failed"}})
        async with asyncio.timeout(60):
            await heard.wait()
    assert told == [{}, {"verify/abc": {"outcome": "failed"}}]
