"""What `--help` prints: every word of every command, which a renderer that takes brackets for markup loses."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from prefixproxy.cli import app

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_of_the_help_is_lost(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300", "NO_COLOR": "1"}).output
    command = COMMANDS[name]
    told = [command.help, *(param.help for param in command.params if param.help)]
    assert len(told) > 3
    for text in told:
        assert text in " ".join(shown.split())


def test_a_text_in_brackets_would_have_been_found() -> None:
    lossy = typer.Typer()

    @lossy.command(help="As in [admission].")
    def one() -> None:
        """Nothing."""

    assert "[admission]" not in CliRunner().invoke(lossy, ["--help"], env={"COLUMNS": "300"}).output
