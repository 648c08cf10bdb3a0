"""Commands that are told to stop: what they started is stopped, and what they had is shown."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixproxy.ending import run_until_told, told_to_stop
from prefixproxy.errors import UsageError
from prefixproxy.serving import on_loopback
from prefixproxy.settings import load_settings, packaged_config

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Whoever runs the tests in the background may have them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def told(number: int) -> None:
    """Gets that signal and never ends by itself."""
    os.kill(os.getpid(), number)
    await asyncio.Event().wait()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_it_in_order(number: int) -> None:
    cleaned_up = []

    async def main() -> None:
        try:
            await told(number)
        finally:
            await asyncio.sleep(0)
            cleaned_up.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_told(main())
    assert cleaned_up
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", SIGNALS)
def test_what_it_has_by_then_it_may_still_return(number: int) -> None:
    async def main() -> str:
        try:
            await told(number)
        except asyncio.CancelledError:
            told_to_stop()
        await asyncio.sleep(0)
        return "half of it"

    assert run_until_told(main()) == "half of it"


def test_it_runs_in_a_thread_too() -> None:
    async def main() -> str:
        return "done"

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(run_until_told, main()).result() == "done"


def test_what_goes_wrong_is_raised_as_it_is() -> None:
    async def main() -> None:
        raise UsageError("no such thing")

    with pytest.raises(UsageError, match="no such thing"):
        run_until_told(main())


def test_a_proxy_that_was_started_for_it_ends_without_a_word(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    overrides = {"state.path": ":memory:", "upstreams": [{"url": "http://127.0.0.1:9"}]}
    settings = load_settings(packaged_config("default.toml"), overrides, {})

    async def main() -> None:
        async with on_loopback(settings, None):
            await told(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_until_told(main())
    assert "Traceback" not in caplog.text + capfd.readouterr().err
