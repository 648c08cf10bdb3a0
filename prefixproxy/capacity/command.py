"""`prefixproxy plan`: how many slots of which context fit beside a model's weights."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import orjson

from prefixproxy.capacity.fit import (
    SLOTS,
    Compared,
    Fit,
    Model,
    compare,
    contexts_of,
    largest_context,
    logged_size,
    most_slots,
)
from prefixproxy.capacity.gguf import Header
from prefixproxy.capacity.read import header_of
from prefixproxy.capacity.shapes import PAD_TOKENS, TYPES, Shape, shape_of
from prefixproxy.capacity.show import Plan, as_json, report_lines
from prefixproxy.errors import UsageError
from prefixproxy.facts.log import LogFacts
from prefixproxy.facts.startup import startup_log

DEFAULT_SLOTS = 4
MOST_SLOTS = 256
LEAST_BYTES = 1 << 20
"""Of a number without a unit: whoever writes 16 means GiB."""
ALIKE = 2.0
"""Weights that differ by less may be those of one model: what is mapped and offloaded may count twice."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SHOWN_TYPES = ("f16", "q8_0", "q4_0")
_LEFT_OUT = (
    "Not in it: compute buffers (--log tells them), and on the host the RAM cache (--cache-ram, 8,192 MiB unless set) "
    "and saved slots on a tmpfs."
)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`memory`: such as "16G", None for this machine's. `parallel` and `ctx` (of each slot): what is asked for; with
    one of them the other is made as large as fits. `swa_full`: layers with a window keep everything."""

    file: Path
    memory: str | None = None
    parallel: int | None = None
    ctx: int | None = None
    kv_type: str = "f16"
    swa_full: bool = True
    log: Path | None = None
    json: bool = False


def run(options: PlanOptions) -> int:
    """Compute, print and return the exit code. Raises UsageError for options or files that are wrong."""
    plan = planned(options)
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(as_json(plan), option=orjson.OPT_INDENT_2) + b"\n")
    else:
        sys.stdout.write("\n".join(report_lines(plan)) + "\n")
    return 0 if plan.ok else 1


def planned(options: PlanOptions) -> Plan:
    """The plan, not printed."""
    type_k, type_v = _kv_types(options.kv_type)
    memory, memory_from = _memory(options.memory)
    _check(options)
    header = header_of(options.file)
    log = startup_log(options.log) if options.log is not None else None
    if log is not None and log.arch and log.arch != header.arch:
        raise UsageError(f"--log: it tells of a model of {log.arch}, and {options.file} is one of {header.arch}")
    shape = shape_of(header)
    known = shape if isinstance(shape, Shape) else None
    model, notes = _model(header, shape, log, (type_k, type_v), options.swa_full)
    fit = _fit(model, options, memory) if model is not None else None
    compared = compare(known, header.weights_bytes, log) if log is not None else ()
    notes = [*notes, *_doubts(fit, header, compared)]
    return Plan(
        file=str(options.file),
        name=options.file.name,
        arch=header.arch or "no architecture",
        weights_bytes=header.weights_bytes,
        memory_bytes=memory,
        memory_from=memory_from,
        type_k=type_k,
        type_v=type_v,
        swa_full=options.swa_full and known is not None and known.n_swa > 0,
        shape=known,
        n_ctx_train=header.whole("context_length"),
        model=model,
        per_token=_per_token(known),
        slots=sorted({*SLOTS, *((options.parallel,) if options.parallel else ())}),
        contexts=contexts_of(model) if model is not None else (),
        fit=fit,
        asked=options.parallel is not None and options.ctx is not None,
        build=(log.build if log is not None else None) or "",
        compared=compared,
        notes=(*notes, *(known.notes if known else ()), *((_LEFT_OUT,) if model is not None else ())),
    )


def _model(
    header: Header, shape: Shape | str, log: LogFacts | None, types: tuple[str, str], swa_full: bool
) -> tuple[Model | None, list[str]]:
    """What is to fit, and what is to be said about where that comes from."""
    if isinstance(shape, Shape):
        try:
            shape.bytes_per_token(*types)
        except ValueError as failure:
            raise UsageError(f"--kv-type: {failure}") from None
        size = partial(shape.kv_bytes, type_k=types[0], type_v=types[1], swa_full=swa_full)
        return Model(header.weights_bytes, size, shape.n_ctx_train, shape.state_bytes), []
    logged = logged_size(log) if log is not None else None
    if logged is None or log is None or log.kv_types is None:
        return None, [f"{shape[0].upper()}{shape[1:]}. Start it once with -lv 4 and give its log with --log."]
    if log.kv_types != types:
        raise UsageError(f"--kv-type: the log is of K {log.kv_types[0]}, V {log.kv_types[1]}; plan with these")
    said = f"{shape[0].upper()}{shape[1:]}: taken from the engine's own allocation in the log."
    return Model(header.weights_bytes, logged, header.whole("context_length")), [said]


def _doubts(fit: Fit | None, header: Header, compared: Sequence[Compared]) -> Iterator[str]:
    """What the numbers do not tell."""
    trained = header.whole("context_length")
    if fit is not None and trained and fit.n_ctx_slot > trained:
        yield (
            f"The model was trained on {trained:,} tokens: llama-server gives a slot no more, and the memory of the "
            "rest is wasted."
        )
    for one in compared:
        if one.what == "weights" and one.computed_mib and one.logged_mib is not None:
            share = one.logged_mib / one.computed_mib
            if not 1 / ALIKE < share < ALIKE:
                yield "The weights in the log are others: is it the log of another model?"


def _fit(model: Model, options: PlanOptions, memory: int) -> Fit | None:
    if options.ctx is not None:
        n_ctx_slot = -(-options.ctx // PAD_TOKENS) * PAD_TOKENS
        if options.parallel is None:
            return most_slots(model, n_ctx_slot, memory, MOST_SLOTS)
        return Fit(options.parallel, n_ctx_slot, model.needs(options.parallel, n_ctx_slot))
    return largest_context(model, options.parallel or DEFAULT_SLOTS, memory)


def _per_token(shape: Shape | None) -> list[tuple[str, int]]:
    """For the usual types, as far as this model can have them."""
    found = []
    for kind in _SHOWN_TYPES if shape is not None and shape.layers else ():
        try:
            found.append((kind, shape.bytes_per_token(kind, kind) if shape is not None else 0))
        except ValueError:
            continue
    return found


def _check(options: PlanOptions) -> None:
    for name, value, most in (("--parallel", options.parallel, MOST_SLOTS), ("--ctx", options.ctx, 1 << 24)):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{name}: a whole number from 1 to {most} is expected (got {value})")


def _kv_types(text: str) -> tuple[str, str]:
    """ "q8_0", or one for keys and one for values: "q8_0,f16"."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 2 or not set(parts) <= set(TYPES):
        raise UsageError(f"--kv-type: one or two of {', '.join(TYPES)} with a comma between them (got {text!r})")
    return parts[0], parts[-1]


def _memory(text: str | None) -> tuple[int, str]:
    if text is None and not hasattr(os, "sysconf"):
        raise UsageError("--memory: how much this machine has cannot be told here; give it")
    if text is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "all of this machine's RAM; --memory sets it"
    found = _SIZE.fullmatch(text.strip())
    n_bytes = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if not found or not n_bytes or (not found[2] and n_bytes < LEAST_BYTES):
        which = f", which is {n_bytes:,} bytes" if n_bytes else ""
        raise UsageError(f"--memory: a size such as 16G or 24000M is expected (got {text!r}{which})")
    return n_bytes, "--memory"
