"""`prefixproxy plan`: what fits beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixproxy.commands.options import JsonOption


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="The model; of several files, the first.")],
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="What may be used, such as 16G (default: this machine's).", show_default=False),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option("--parallel", help="Slots (default 4; with --ctx: as many as fit).", show_default=False),
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option("--ctx", help="Context of each slot in tokens (default: as much as fits).", show_default=False),
    ] = None,
    kv_type: Annotated[str, typer.Option("--kv-type", help="Of the KV cache; one, or keys,values.")] = "f16",
    swa_full: Annotated[
        bool, typer.Option("--swa-full/--no-swa-full", help="Sliding windows: keep everything, as recommended.")
    ] = True,
    log: Annotated[
        Path | None, typer.Option("--log", help="A startup log with -lv 4, to compare with.", show_default=False)
    ] = None,
    json: JsonOption = False,
) -> None:
    """How many slots of which context fit beside a model's weights, and the flags to use. Needs no server."""
    from prefixproxy.capacity.command import PlanOptions, run

    options = PlanOptions(file, memory, parallel, ctx, kv_type, swa_full, log, json)
    raise typer.Exit(run(options))
