"""The `prefixproxy` command. Exit codes: 0 fine, 1 a check failed, 2 wrong usage or settings."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixproxy import __version__
from prefixproxy.errors import UsageError
from prefixproxy.logs import logging_to
from prefixproxy.settings import Settings, load_settings, upstream_values

app = typer.Typer(
    name="prefixproxy",
    help="An OpenAI-compatible proxy that makes the KV cache of llama-server and Ollama hit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

USAGE_ERROR = 2
INTERRUPTED = 130
_CLICK_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""What every wrong argument raises. Newer typer has click inside, and of its errors only BadParameter a public name."""

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


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"prefixproxy {__version__}")
        raise typer.Exit


@app.callback()
def prefixproxy(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What every command shares."""


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def simulate(
    trace: Annotated[
        str | None, typer.Argument(metavar="[TRACE]", help="A journal export; - is standard input.", show_default=False)
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option("--synthetic", help="Instead: fanout, conversations or mixed, made up.", show_default=False),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", help="How many are made up.")] = 1000,
    rate: Annotated[float, typer.Option("--rate", help="Made-up requests per second.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Another seed, other requests.")] = 1,
    slots: Annotated[str, typer.Option("--slots", help="Slots of each server to try, with commas.")] = "1,2,4,8",
    servers: Annotated[int, typer.Option("--servers", help="How many servers.")] = 1,
    policy: Annotated[str, typer.Option("--policy", help="Policies to try, with commas.")] = "cost,fifo",
    prefill_rate: Annotated[
        float | None,
        typer.Option("--prefill-rate", help="Prompt tokens/s of a server (default: the trace's, else 200)."),
    ] = None,
    decode_rate: Annotated[
        float | None,
        typer.Option("--decode-rate", help="Answer tokens/s of a slot (default: the trace's, else 50)."),
    ] = None,
    queue_limit: Annotated[int, typer.Option("--queue-limit", help="As in [admission].")] = 256,
    queue_timeout: Annotated[float, typer.Option("--queue-timeout", help="As in [admission], seconds.")] = 600.0,
    side_slots: Annotated[int, typer.Option("--side-slots", help="As in [admission].")] = 0,
    kv_bytes: Annotated[int, typer.Option("--kv-bytes", help="Bytes of one token in the KV cache.")] = 50_000,
    fork: Annotated[bool, typer.Option("--fork/--no-fork", help="Whether slots can be saved and restored.")] = True,
    root_threshold: Annotated[float, typer.Option("--root-threshold", help="As in [admission], seconds.")] = 0.5,
    json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw time to first token over slots (SVG).", show_default=False)
    ] = None,
) -> None:
    """Replay recorded or made-up arrivals on other slot counts and policies; the real scheduler, no server."""
    from prefixproxy.simulate.command import SimulateOptions, run

    options = SimulateOptions(
        trace=trace,
        synthetic=synthetic,
        requests=requests,
        rate=rate,
        seed=seed,
        slots=slots,
        policies=policy,
        servers=servers,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        queue_limit=queue_limit,
        queue_timeout_s=queue_timeout,
        side_slots=side_slots,
        kv_bytes=kv_bytes,
        fork=fork,
        root_threshold_s=root_threshold,
        json=json,
        plot=plot,
    )
    raise typer.Exit(run(options))


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def bench(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="[URL] [URL]", help="One server or two side by side; else the embedded engine."),
    ] = None,
    api_key: Annotated[str, typer.Option("--api-key", help="Key for the servers.", show_default=False)] = "",
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


def main() -> None:
    """Entry point: wrong usage is one line on stderr, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except UsageError as failure:
        _tell(str(failure))
        code = USAGE_ERROR
    except _CLICK_ERROR as failure:
        if type(failure).__name__ == "NoArgsIsHelpError":
            failure.show()
        else:
            _tell(" ".join(failure.format_message().split()))
        code = USAGE_ERROR
    except typer.Abort:
        code = INTERRUPTED
    sys.exit(code or 0)


def _tell(wrong: str) -> None:
    typer.echo(f"prefixproxy: {wrong}", err=True)


if __name__ == "__main__":
    main()
