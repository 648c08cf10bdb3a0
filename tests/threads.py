"""Runs something asynchronous in a thread with an event loop of its own, for tests of any colour."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def in_thread(name: str, open_one: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What `open_one()` yields, kept open in the thread until the block ends; raises what its start raised."""
    started: list[T] = []
    failed: list[BaseException] = []
    settled, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with open_one() as one:
            started.append(one)
            settled.set()
            await asyncio.to_thread(stop.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - handed to the test below
            failed.append(error)
            settled.set()

    thread = threading.Thread(target=run, name=name)
    thread.start()
    try:
        settled.wait()
        if not started:
            raise failed[0]
        yield started[0]
    finally:
        stop.set()
        thread.join()
