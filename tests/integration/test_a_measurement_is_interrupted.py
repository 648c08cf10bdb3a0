"""bench and verify on a real server, told to stop in the middle: what they have by then is not lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from running_engine import RunningEngine

from prefixproxy.bench import command as bench
from prefixproxy.bench.run import measure
from prefixproxy.settings import load_settings, packaged_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Whoever runs the tests in the background may have them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bench_shows_what_was_measured(
    engine: RunningEngine,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    tmp_path: Path,
) -> None:
    """The signal comes when both arms were measured once."""
    settings = load_settings(packaged_config("default.toml"), {"state.path": ":memory:"}, {})
    walked: list[Any] = []

    async def interrupted(*arguments: Any) -> None:
        if len(walked) == 2:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        await measure(*arguments)
        walked.append(arguments[0].arm)

    monkeypatch.setattr(bench, "measure", interrupted)
    plot = tmp_path / "ratios.svg"
    options = bench.BenchOptions(settings, (engine.url,), lanes=2, root=200, repeat=9, json=True, plot=plot)
    assert bench.run(options) == 130
    told = capfdbinary.readouterr()
    report = orjson.loads(told.out)
    assert report["failure"] == "it was interrupted"
    [target] = report["targets"]
    assert [len(arm["scenarios"]) for arm in target["arms"]] == [7, 7]
    assert plot.read_text(encoding="utf-8").startswith("<svg")
    assert b"Traceback" not in told.err
