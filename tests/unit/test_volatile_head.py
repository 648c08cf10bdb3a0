"""Long heads: how many of their lines are searched, at first sight and later."""

from __future__ import annotations

import pytest
from prompting import prompt_of

from prefixproxy.volatile.files import load_rules
from prefixproxy.volatile.head import MAX_HEAD_LINES, MAX_LINES, SLICE_LINES, HeadReader
from prefixproxy.volatile.lines import LineFacts, LineReader

RULES = load_rules()


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines on which rules were tried, in order."""
    lines: list[str] = []
    whole = LineReader.facts

    def facts(self: LineReader, line: str) -> LineFacts | None:
        lines.append(line)
        return whole(self, line)

    monkeypatch.setattr(LineReader, "facts", facts)
    return lines


def lines(n: int, kind: str = "rule {} reads maps") -> str:
    return "\n".join(kind.format(i) for i in range(n))


@pytest.mark.parametrize("kind", ["rule {} reads maps", "<t{0}>v{0}</t{0}>", "{} " + "reads maps " * 100])
def test_a_line_is_searched_once_whatever_its_length(searched: list[str], kind: str) -> None:
    reader = HeadReader(RULES)
    reader.read(prompt_of("Current time: 10:00:00\n" + lines(500, kind)).head)
    assert len(searched) == 501
    view = reader.read(prompt_of("Current time: 10:00:01\n" + lines(500, kind)).head)
    assert searched[501:] == ["Current time: 10:00:01"]
    assert [span.note for span in view.spans] == ["Current time: 10:00:01"]


def test_of_a_very_long_text_only_its_ends_are_searched(searched: list[str]) -> None:
    text = f"Current time: 10:00:00\n{lines(40_000)}\nLane: 3"
    view = HeadReader(RULES).read(prompt_of(text).head)
    assert len(searched) == MAX_LINES
    assert [span.note for span in view.spans] == ["Current time: 10:00:00", "Lane: 3"]


def test_many_texts_share_one_bound(searched: list[str]) -> None:
    texts = ["Current time: 10:00:00", *(lines(1_000, f"{i} of {{}} maps") for i in range(60)), "Lane: 3"]
    view = HeadReader(RULES).read(prompt_of(texts).head)
    assert len(searched) <= MAX_HEAD_LINES
    assert [span.note for span in view.spans] == ["Current time: 10:00:00", "Lane: 3"]


def test_one_endless_line_is_read_at_its_ends() -> None:
    text = f"Current time: 10:00:00. You help. {'maps ' * 100_000}are read. Today's date is 2026-03-14."
    view = HeadReader(RULES).read(prompt_of(text).head)
    assert [span.note for span in view.spans] == ["Current time: 10:00:00.", "Today's date is 2026-03-14."]


def test_a_head_read_in_slices_is_read_for_good(searched: list[str]) -> None:
    reader, head = HeadReader(RULES), prompt_of(f"Current time: 10:00:00\n{lines(1_000)}").head
    assert sum(1 for _ in reader.read_ahead(head)) == 1_001 // SLICE_LINES
    assert len(searched) == 1_001
    assert reader.read(head).spans
    assert len(searched) == 1_001
    assert list(reader.read_ahead(head)) == []


def test_a_head_larger_than_the_cache_is_still_read_once(searched: list[str]) -> None:
    reader, head = HeadReader(RULES), prompt_of("Lane: 3\n" + "x" * (9 << 20)).head
    assert reader.read(head) is reader.read(head)
