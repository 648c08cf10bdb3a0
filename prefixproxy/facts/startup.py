"""Reads a startup log from a file, for every command that takes `--log`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefixproxy.errors import UsageError
from prefixproxy.facts.log import MAX_LINES, LogFacts, read_log

MAX_LOG_BYTES = 256 << 20


def log_lines(path: Path) -> Sequence[str]:
    """The lines of a llama-server's log. Raises UsageError for a file that cannot be read or tells of no start."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_LOG_BYTES)
    except OSError as failure:
        raise UsageError(f"--log: cannot read {path}: {failure.strerror}") from None
    lines = text.decode("utf-8", "replace").splitlines()[:MAX_LINES]
    if not read_log(lines).told:
        raise UsageError(f"--log: {path} has no line of a llama-server's start")
    return lines


def startup_log(path: Path) -> LogFacts:
    """What that log tells. Raises UsageError as `log_lines` does."""
    return read_log(log_lines(path))
