"""The slot count of an Ollama on this machine, from the command lines of the llama-servers it started.

Ollama starts one for each model: `llama-server --model P ... --no-webui --offline -c NumCtx*N -np N ...`
(llm/llama_server.go, since 0.30). Models that run with one slot say so there, so the largest N counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

PROC = Path("/proc")
_MOST_SLOTS = 1024


def slots_of_children(proc: Path = PROC) -> int | None:
    """None where nothing is running, or there is no process table to read."""
    return max((n for argv in child_command_lines(proc) if (n := _slots_in(argv)) is not None), default=None)


def child_command_lines(proc: Path = PROC) -> Iterator[list[str]]:
    """Those of llama-servers as Ollama starts them, the program first."""
    for argv in _command_lines(proc):
        if Path(argv[0]).name.removesuffix(".exe") == "llama-server" and {"--no-webui", "--offline"} <= set(argv):
            yield argv


def _command_lines(proc: Path) -> Iterator[list[str]]:
    for folder in proc.glob("[0-9]*"):
        try:
            raw = (folder / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended, or is not ours to read
        yield raw.decode(errors="replace").rstrip("\0").split("\0")


def _slots_in(argv: Sequence[str]) -> int | None:
    """The value of -np."""
    for flag, value in pairwise(argv):
        if flag == "-np" and value.isdecimal() and 1 <= int(value) <= _MOST_SLOTS:
            return int(value)
    return None
