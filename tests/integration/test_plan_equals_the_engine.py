"""plan's KV cache is what the real engine allocates, to the byte it logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running_engine import running_engine

from prefixproxy.capacity.command import PlanOptions, planned
from prefixproxy.engine import EngineSettings, default_model
from prefixproxy.facts.log import LogFacts, read_log

TELLING = {"verbosity": 4, "cpuparams.n_threads": 1, "warmup": False}
F16, Q8_0, Q4_0 = 1, 8, 2


def allocated(model: Path, folder: Path, parallel: int, ctx: int, extra: dict[str, Any]) -> Path:
    """The startup log of the engine with these settings."""
    settings = EngineSettings(model, parallel=parallel, ctx=ctx, extra={**TELLING, **extra})
    with running_engine(settings) as one:
        log = folder / "server.log"
        log.write_text("\n".join(one.engine.startup_log), encoding="utf-8")
    return log


def logged(log: Path) -> LogFacts:
    return read_log(log.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    ("parallel", "ctx", "type_k", "type_v", "kv_mib"),
    [(6, 8192, F16, F16, 202.5), (2, 4096, Q8_0, F16, 68.91), (3, 1000, Q8_0, Q4_0, 13.71)],
)
def test_for_the_bundled_model(
    tokenizer_source: Path, tmp_path: Path, parallel: int, ctx: int, type_k: int, type_v: int, kv_mib: float
) -> None:
    extra = {"cache_type_k": type_k, "cache_type_v": type_v}
    log = allocated(default_model(), tmp_path, parallel, ctx, extra)
    (made,) = logged(log).kv
    assert sum(logged(log).kv_buffers_mib.values()) == made.size_mib == kv_mib
    compared = {one.what: one for one in planned(PlanOptions(default_model(), log=log)).compared}
    kv = compared["KV cache"]
    assert kv.computed_mib is not None
    assert (round(kv.computed_mib, 2), kv.differs) == (kv_mib, False)
    assert compared["weights"].differs is False


@pytest.mark.parametrize("extra", [{}, {"swa_full": True}, {"kv_unified": True}])
def test_for_a_model_with_a_window(tiny_models: Callable[[str], Path], tmp_path: Path, extra: dict[str, Any]) -> None:
    model = tiny_models("swa")
    log = allocated(model, tmp_path, 3, 8192, extra)
    plan = planned(PlanOptions(model, log=log))
    compared = {one.what: one for one in plan.compared}
    assert compared["KV cache"].computed_mib is not None
    assert compared["KV cache"].logged_mib
    assert plan.ok


def test_for_a_recurrent_model(tiny_models: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_models("mamba")
    plan = planned(PlanOptions(model, log=allocated(model, tmp_path, 2, 2048, {})))
    compared = {one.what: one for one in plan.compared}
    assert compared["recurrent state"].computed_mib is not None
    assert plan.ok
