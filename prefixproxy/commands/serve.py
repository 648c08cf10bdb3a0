"""`prefixproxy serve`: runs the proxy."""

from __future__ import annotations

import sys

import typer

from prefixproxy import __version__
from prefixproxy.commands.options import (
    ConfigOption,
    CtxOption,
    HostOption,
    LogLevelOption,
    ModelOption,
    ParallelOption,
    PortOption,
    UpstreamOption,
    engine_values,
    log_level_of,
    settings_of,
)
from prefixproxy.errors import UsageError
from prefixproxy.logs import logging_to
from prefixproxy.settings import upstream_values


def serve(
    upstream: UpstreamOption = None,
    model: ModelOption = None,
    parallel: ParallelOption = None,
    ctx: CtxOption = None,
    config: ConfigOption = None,
    host: HostOption = None,
    port: PortOption = None,
    log_level: LogLevelOption = "info",
) -> None:
    """Run the proxy in front of --upstream URL, or of the embedded engine with --model FILE (or the bundled model)."""
    from prefixproxy.serving import run

    level = log_level_of(log_level)
    if upstream and model:
        raise UsageError("--upstream and --model exclude each other: name a running server, or a model to run")
    settings = settings_of(
        config,
        {
            "server.host": host,
            "server.port": port,
            **engine_values(model, parallel, ctx),
            "upstreams": upstream_values(upstream) if upstream else None,
        },
        embedded=model is not None,
    )
    with logging_to(sys.stderr.fileno(), level):
        run(settings, lambda url: typer.echo(f"prefixproxy {__version__} listens on {url}", err=True))
