"""What one process learned is there for the next, also when the first was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixproxy.answers import AnswerMemory
from prefixproxy.keeping import Keeping, StabiliserRows, WholeRow, keeping_of
from prefixproxy.stabilise import Stabiliser
from prefixproxy.state import StateFile
from prefixproxy.tools import ToolMemory
from prefixproxy.volatile import load_rules


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


pytestmark = pytest.mark.anyio
