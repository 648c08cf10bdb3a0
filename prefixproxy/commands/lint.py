"""`prefixproxy lint`: where request bodies break the prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixproxy.commands.options import ConfigOption, JsonOption, settings_of


def lint(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Request bodies; - is standard input.")],
    json: JsonOption = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if the cache still breaks when stabilised.")] = False,
    path: Annotated[
        str | None,
        typer.Option("--path", help="Where the bodies go, such as /v1/messages; else guessed.", show_default=False),
    ] = None,
    rules: Annotated[
        list[Path] | None, typer.Option("--rules", help="One more rule file (TOML); repeatable.", show_default=False)
    ] = None,
    learned: Annotated[
        str | None, typer.Option("--learned", help="apply, suggest or off, as in the settings.", show_default=False)
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Where request bodies break the cached prefix, and what stabilising does about it. Needs no server."""
    from prefixproxy.lint.command import LintOptions, run

    stabilise = settings_of(config, {"stabilise.learned": learned}).stabilise
    options = LintOptions(
        path=path,
        json=json,
        strict=strict,
        mode=stabilise.mode,
        learned=stabilise.learned,
        rules=(*stabilise.rules, *map(str, rules or ())),
        disabled=stabilise.disabled,
        replay_limit=stabilise.replay_limit,
    )
    raise typer.Exit(run(files, options))
