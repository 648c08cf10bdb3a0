"""Options that several commands take, and what they make of the settings."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixproxy.errors import UsageError
from prefixproxy.settings import Settings, load_settings

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).", show_default=False)]
UpstreamOption = Annotated[
    list[str] | None, typer.Option("--upstream", help="Base URL of a running server; repeatable.", show_default=False)
]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="GGUF file for the embedded engine.", show_default=False)
]
ParallelOption = Annotated[
    int | None, typer.Option("--parallel", help="Slots of the embedded engine (default 4).", show_default=False)
]
CtxOption = Annotated[
    int | None, typer.Option("--ctx", help="Context of each slot in tokens (default 4096).", show_default=False)
]
HostOption = Annotated[
    str | None, typer.Option("--host", help="Address to listen on (default 127.0.0.1).", show_default=False)
]
PortOption = Annotated[int | None, typer.Option("--port", help="Port to listen on (default 8100).", show_default=False)]
LogOption = Annotated[
    Path | None, typer.Option("--log", help="The server's startup log, best with -lv 4.", show_default=False)
]
ApiKeyOption = Annotated[str, typer.Option("--api-key", help="Key for the server.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
LogLevelOption = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]


def engine_values(model: Path | None, parallel: int | None, ctx: int | None) -> dict[str, Any]:
    """The settings of the embedded engine that the command line names."""
    return {"engine.model": None if model is None else str(model), "engine.parallel": parallel, "engine.ctx": ctx}


def settings_of(config: Path | None, overrides: dict[str, Any], *, embedded: bool = False) -> Settings:
    """The settings in force; `embedded` (--model) sets aside the upstreams of the file."""
    if embedded:
        overrides["upstreams"] = []
    return load_settings(config, overrides, os.environ)


def log_level_of(name: str) -> int:
    """The level called `name`; libraries that tell every step are kept to their warnings. Raises UsageError."""
    number = logging.getLevelNamesMapping().get(name.upper())
    if number is None:
        raise UsageError(f"--log-level: {name!r} is none of debug, info, warning, error")
    for noisy in ("asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(max(number, logging.WARNING))
    return number
