"""The table of clients: what of each request's prompt was found in the KV cache, straight and through the proxy."""

from __future__ import annotations

import os
from pathlib import Path

from running import Run

HEAD = (
    "| client | version | API | % cached of each request, straight | through the proxy "
    "| tokens evaluated, straight | through |",
    "| --- | --- | --- | --- | --- | ---: | ---: |",
)
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"


class Table:
    """Rows by client. Each is put into the page that CLIENTS_TABLE names, if one is named; the
    other rows there stay."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def add(self, name: str, version: str, plain: Run, run: Run) -> None:
        paths = ", ".join(sorted({each.api.value for each in run.asked}))
        cells = [name, version, paths, shares(plain), shares(run), f"{evaluated(plain):,}", f"{evaluated(run):,}"]
        self.rows[name] = f"| {' | '.join(cells)} |"
        self.keep()

    @property
    def text(self) -> str:
        return "\n".join([*HEAD, *self.rows.values()])

    def keep(self) -> None:
        name = os.environ.get("CLIENTS_TABLE")
        if not name:
            return
        page = Path(name)
        before, rest = page.read_text(encoding="utf-8").split(BEGIN)
        old, after = rest.split(END)
        known = {line.split("|")[1].strip(): line for line in old.strip().splitlines()[len(HEAD) :]}
        merged = Table()
        merged.rows = known | self.rows
        page.write_text(f"{before}{BEGIN}\n{merged.text}\n{END}{after}", encoding="utf-8")


def shares(run: Run) -> str:
    """Percent of each request, in the order of arrival."""
    return " ".join(str(round(100 * each.counts.cached / each.counts.prompt)) for each in run.asked)


def evaluated(run: Run) -> int:
    """Tokens of all prompts that were not found, and of the warm-ups before them."""
    return sum(each.counts.evaluated for each in run.asked) + sum(run.warmed)
