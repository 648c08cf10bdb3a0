"""`prefixproxy verify`: whether reuse changes answers."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixproxy.commands.options import (
    ApiKeyOption,
    ConfigOption,
    CtxOption,
    JsonOption,
    LogOption,
    ModelOption,
    ParallelOption,
    engine_values,
    settings_of,
)


def verify(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="A llama-server or a prefixproxy; else the embedded engine."),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option("--control", help="Another server for the runs without reuse.", show_default=False),
    ] = None,
    api_key: ApiKeyOption = "",
    log: LogOption = None,
    root: Annotated[int, typer.Option("--root", help="Tokens of a shared root.")] = 600,
    long: Annotated[int, typer.Option("--long", help="Tokens of the long prompt.")] = 4096,
    model: ModelOption = None,
    parallel: ParallelOption = None,
    ctx: CtxOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Does reuse change answers? The corruption suite: reuse against no reuse, with a control for noise."""
    from prefixproxy.verify.command import VerifyOptions, run

    settings = settings_of(config, engine_values(model, parallel, ctx), embedded=url is None)
    options = VerifyOptions(settings, url, control, api_key, root=root, long=long, log=log, json=json)
    raise typer.Exit(run(options))
