"""`prefixproxy demo`: five lanes, straight and through the proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixproxy.commands.options import JsonOption


def demo(
    model: Annotated[
        Path | None, typer.Option("--model", help="GGUF file to run (default: the bundled one).", show_default=False)
    ] = None,
    lanes: Annotated[int, typer.Option("--lanes", help="Agents that start at once.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A briefing of 800 tokens instead of 2,600.")] = False,
    json: JsonOption = False,
) -> None:
    """Five agents with one briefing start at once: straight to llama-server, then through the proxy."""
    from prefixproxy.demo.command import DemoOptions, run

    raise typer.Exit(run(DemoOptions(model=model, lanes=lanes, quick=quick, json=json)))
