"""`prefixproxy doctor`: what about a server defeats reuse."""

from __future__ import annotations

from typing import Annotated

import typer

from prefixproxy.commands.options import ApiKeyOption, ConfigOption, JsonOption, LogOption, settings_of
from prefixproxy.settings import upstream_values


def doctor(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="A server, or a prefixproxy (default: the settings' upstreams)."),
    ] = None,
    log: LogOption = None,
    api_key: ApiKeyOption = "",
    admission: Annotated[
        bool, typer.Option("--admission", help="Fill one slot with a prompt, and see whether it is answered.")
    ] = False,
    may_overwrite: Annotated[
        bool, typer.Option("--try", help="Try slots out even if they were used; what they hold is lost.")
    ] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """What about a server defeats reuse: each finding with its evidence and the flag to change. Exit 1 on errors."""
    from prefixproxy.doctor.command import DoctorOptions, run
    from prefixproxy.serving import engine_settings

    settings = settings_of(config, {})
    # the proxy's own address is no upstream, but it is one to look at: port 0 is nobody's
    named = [{**one, "api_key": api_key} for one in upstream_values([url])] if url else []
    asked = {"upstreams": named, "server.port": 0} if url else {}
    server = settings_of(config, asked).upstreams[0] if url else None
    options = DoctorOptions(
        server=server,
        log=log,
        admission=admission,
        may_overwrite=may_overwrite,
        json=json,
        settings=settings,
        engine=None if url else engine_settings(settings),
    )
    raise typer.Exit(run(options))
