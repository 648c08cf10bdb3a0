"""`prefixproxy simulate`: recorded arrivals on other slots and policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixproxy.commands.options import JsonOption


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
    queue_limit: Annotated[int, typer.Option("--queue-limit", help="As admission.queue_limit.")] = 256,
    queue_timeout: Annotated[float, typer.Option("--queue-timeout", help="As admission.queue_timeout (s).")] = 600.0,
    side_slots: Annotated[int, typer.Option("--side-slots", help="As admission.side_slots.")] = 0,
    kv_bytes: Annotated[int, typer.Option("--kv-bytes", help="Bytes of one token in the KV cache.")] = 50_000,
    fork: Annotated[bool, typer.Option("--fork/--no-fork", help="Whether slots can be saved and restored.")] = True,
    root_threshold: Annotated[float, typer.Option("--root-threshold", help="As admission.root_threshold (s).")] = 0.5,
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
