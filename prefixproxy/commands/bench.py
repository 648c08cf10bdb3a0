"""`prefixproxy bench`: what reuse saves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixproxy.commands.options import (
    ApiKeyOption,
    ConfigOption,
    CtxOption,
    JsonOption,
    ModelOption,
    ParallelOption,
    engine_values,
    settings_of,
)


def bench(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="[URL] [URL]", help="One server or two side by side; else the embedded engine."),
    ] = None,
    api_key: ApiKeyOption = "",
    ask: Annotated[str, typer.Option("--ask", help="Model to ask for, if a server has several.")] = "",
    lanes: Annotated[int, typer.Option("--lanes", help="Agents that share a root.")] = 5,
    root: Annotated[int, typer.Option("--root", help="Tokens of a root.")] = 2500,
    repeat: Annotated[int, typer.Option("--repeat", help="Runs of every scenario.")] = 3,
    straight: Annotated[bool, typer.Option("--straight/--no-straight", help="Measure the server itself.")] = True,
    proxy: Annotated[bool, typer.Option("--proxy/--no-proxy", help="Measure it through the proxy.")] = True,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the ratios (SVG).", show_default=False)] = None,
    model: ModelOption = None,
    parallel: ParallelOption = None,
    ctx: CtxOption = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """What reuse saves: seven scenarios, straight and through the proxy, against unique-prefix controls."""
    from prefixproxy.bench.command import BenchOptions, run

    settings = settings_of(config, engine_values(model, parallel, ctx), embedded=not urls)
    options = BenchOptions(
        settings,
        tuple(urls or ()),
        api_key=api_key,
        ask=ask,
        lanes=lanes,
        root=root,
        repeat=repeat,
        straight=straight,
        proxied=proxy,
        json=json,
        plot=plot,
    )
    raise typer.Exit(run(options))
