"""Runs a command that measures or looks until it is done, or until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
INTERRUPTED = "it was interrupted"
"""Why it ended early, in what it shows all the same."""
_NO_HANDLERS = (RuntimeError, ValueError)
"""Raised by asyncio on Windows (NotImplementedError, a RuntimeError) and outside of the main thread, and by uvloop
there."""
INTERRUPTED_CODE = 130
"""Exit code, as shells have it after Ctrl-C."""


def run_until_told(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, but SIGTERM ends it as Ctrl-C does: what it started is stopped, and saved slots are removed.

    Raises KeyboardInterrupt when it was told to stop, unless `main` returned all the same.
    """
    try:
        return asyncio.run(_heard(main))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _heard(main: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    with suppress(*_NO_HANDLERS):
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await main
    finally:
        with suppress(*_NO_HANDLERS):
            loop.remove_signal_handler(signal.SIGTERM)


def told_to_stop() -> None:
    """For a main task that caught its cancellation: it goes on and returns what it has."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
