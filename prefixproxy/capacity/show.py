"""What plan computed, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from shlex import quote
from textwrap import wrap
from typing import Any

from prefixproxy.capacity.fit import Compared, Fit, Model
from prefixproxy.capacity.shapes import MIB, Shape
from prefixproxy.facts.report import UNKNOWN, aligned

_GIB = 1 << 30
_WIDTH = 110
_QUANTISED_V = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


@dataclass(frozen=True, slots=True)
class Plan:
    """`shape` None: the architecture is not known, `notes` say why. `per_token`: bytes of one token for each KV type.
    `memory_from`: who states the budget. `asked`: whether slots and context were both given, so that `fit` is not the
    largest but these."""

    file: str
    name: str
    arch: str
    weights_bytes: int
    memory_bytes: int
    memory_from: str
    type_k: str
    type_v: str
    swa_full: bool
    shape: Shape | None
    n_ctx_train: int | None
    model: Model | None
    per_token: Sequence[tuple[str, int]]
    slots: Sequence[int]
    contexts: Sequence[int]
    fit: Fit | None
    asked: bool
    build: str = ""
    compared: Sequence[Compared] = ()
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether there is something to run, and the log, if there is one, agrees."""
        fits = self.fit is not None and self.fit.needs_bytes <= self.memory_bytes
        return fits and not any(one.differs for one in self.compared)

    @property
    def flags(self) -> str:
        """The command line that runs the fit."""
        if self.fit is None:
            return ""
        n, ctx = self.fit.n_slots, self.fit.n_ctx_slot
        parts = [f"llama-server -m {quote(self.file)} -np {n} -c {n * ctx} --no-kv-unified"]
        if (self.type_k, self.type_v) != ("f16", "f16"):
            parts.append(f"-ctk {self.type_k} -ctv {self.type_v}")
        if self.type_v in _QUANTISED_V:
            parts.append("-fa on")
        if self.swa_full:
            parts.append("--swa-full")
        return " ".join([*parts, "--slots --metrics --slot-save-path DIR/"])


def report_lines(plan: Plan) -> list[str]:
    lines = [*_head(plan), "", *_model_lines(plan), ""]
    if plan.model is not None:
        lines += [*_table(plan, plan.model), "", *_fit_lines(plan), ""]
    if plan.compared:
        lines += ["The engine's log beside this:", *(_compared_line(one) for one in plan.compared), ""]
    for note in plan.notes:
        lines += wrap(note, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return lines


def as_json(plan: Plan) -> dict[str, Any]:
    """The same as one JSON object; bytes, tokens, null for what is not known."""
    model = plan.model
    rows = [
        {"n_slots": n, "n_ctx_slot": ctx, "needs_bytes": model.needs(n, ctx)}
        for n in plan.slots
        for ctx in plan.contexts
        if model is not None
    ]
    return {
        "ok": plan.ok,
        "file": plan.file,
        "model": plan.name,
        "arch": plan.arch,
        "build": plan.build or None,
        "n_ctx_train": plan.n_ctx_train,
        "weights_bytes": plan.weights_bytes,
        "memory_bytes": plan.memory_bytes,
        "memory_from": plan.memory_from,
        "kv_type_k": plan.type_k,
        "kv_type_v": plan.type_v,
        "swa_full": plan.swa_full,
        "kv_bytes_per_token": dict(plan.per_token),
        "state_bytes_per_slot": plan.model.state_bytes if plan.model else None,
        "exact": plan.shape.exact if plan.shape else False,
        "table": rows,
        "fit": None if plan.fit is None else asdict(plan.fit),
        "flags": plan.flags or None,
        "compared": [{**asdict(one), "differs": one.differs} for one in plan.compared],
        "notes": list(plan.notes),
    }


def _head(plan: Plan) -> list[str]:
    """The facts every report begins with, as far as nothing runs yet."""
    fit = plan.fit
    return aligned(
        [
            ("server", "none runs: computed from the model's file"),
            ("build", f"{plan.build} (startup log)" if plan.build else UNKNOWN),
            ("model", f"{plan.name} ({plan.arch})"),
            ("slots", f"{fit.n_slots} (planned)" if fit else UNKNOWN),
            ("n_ctx_slot", f"{fit.n_ctx_slot:,} (planned)" if fit else UNKNOWN),
            ("KV cache", f"K {plan.type_k}, V {plan.type_v}; unified: no (planned)"),
            ("flash attention", "on (planned)" if plan.type_v in _QUANTISED_V else "auto (the default)"),
            ("flags", plan.flags or UNKNOWN),
            ("tokens", "none are counted"),
        ]
    )


def _model_lines(plan: Plan) -> list[str]:
    shape = plan.shape
    trained = f"{plan.n_ctx_train:,} tokens" if plan.n_ctx_train else UNKNOWN
    rows = [
        ("weights", _size(plan.weights_bytes)),
        ("memory", f"{_size(plan.memory_bytes)} ({plan.memory_from})"),
        ("trained on", trained),
    ]
    if shape is not None:
        windowed = sum(layer.window for layer in shape.layers)
        n = len(shape.layers)
        layers = f"{n} layer{'' if n == 1 else 's'} with a KV cache" if n else "no KV cache, a state for each slot"
        rows.append(("layers", layers + (f", {windowed} of them with a window of {shape.n_swa:,}" if windowed else "")))
    rows += [("KV per token", ", ".join(f"{kind} {n:,} bytes" for kind, n in plan.per_token))] if plan.per_token else []
    if plan.model is not None and plan.model.state_bytes:
        rows.append(("state per slot", _size(plan.model.state_bytes)))
    return aligned(rows)


def _table(plan: Plan, model: Model) -> list[str]:
    head = f"{'slots':>6}" + "".join(f"{ctx:>11,}" for ctx in plan.contexts)
    lines = [f"Weights and KV cache in GiB, K {plan.type_k}, V {plan.type_v}, by tokens for each slot:", "", head]
    for n in plan.slots:
        cells = "".join(f"{_cell(model.needs(n, ctx), plan.memory_bytes):>11}" for ctx in plan.contexts)
        lines.append(f"{n:>6}{cells}")
    return [*lines, "", "In brackets: more than the memory."]


def _fit_lines(plan: Plan) -> list[str]:
    if plan.fit is None:
        return ["Nothing fits."]
    fit = plan.fit
    what = (
        f"{fit.n_slots} slots of {fit.n_ctx_slot:,} tokens"
        if fit.n_slots > 1
        else f"1 slot of {fit.n_ctx_slot:,} tokens"
    )
    fits = fit.needs_bytes <= plan.memory_bytes
    told = "What was asked for" if plan.asked else "The largest fit"
    take = "take" if plan.shape is None or plan.shape.exact else "take at least"
    end = "" if fits else f": {_size(fit.needs_bytes - plan.memory_bytes)} too much"
    return [f"{told}: {what} {take} {_size(fit.needs_bytes)}{end}.", f"  {plan.flags}"]


def _compared_line(one: Compared) -> str:
    computed = "not computed" if one.computed_mib is None else f"computed {one.computed_mib:,.2f} MiB"
    logged = "not logged" if one.logged_mib is None else f"logged {one.logged_mib:,.2f} MiB"
    if one.computed_mib is None or one.logged_mib is None:
        return f"  {one.what:<16}{computed}, {logged}"
    difference = f"differs by {one.logged_mib - one.computed_mib:+,.2f} MiB" if one.differs else "equal"
    return f"  {one.what:<16}{computed}, {logged}: {difference}"


def _cell(n_bytes: int, memory: int) -> str:
    text = f"{n_bytes / _GIB:,.2f}"
    return text if n_bytes <= memory else f"({text})"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:,.2f} GiB" if n_bytes >= _GIB else f"{n_bytes / MIB:,.2f} MiB"
