"""The command line of the server that listens on a port of this machine, from the process table (Linux).

Only processes of the same user can be read, unless we are root; a server in a container shows its proxy instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from prefixproxy.backends.ollama_local import child_command_lines
from prefixproxy.facts.flags import ENVIRONMENT, Flags, is_llama_server, read_flags

PROC = Path("/proc")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_LISTENING = "0A"
_DEFAULT_PORTS = {"http": 80, "https": 443}


def flags_of(url: str, proc: Path = PROC) -> Flags | None:
    """The flags of the llama-server behind this URL, None where it cannot be told: it is on another machine, it is
    another kind of server, or its process is not ours to read."""
    parts = urlsplit(url)
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    if parts.hostname not in LOOPBACK or port is None:
        return None
    inodes = set(_listening(proc, port))
    if not inodes:
        return None
    for folder in proc.glob("[0-9]*"):
        if _holds(folder, inodes) and (flags := _flags_in(folder)) is not None:
            return flags
    return None


def flags_of_children(url: str, proc: Path = PROC) -> Flags | None:
    """The flags with which an Ollama on this machine runs its llama-server; None if it runs none, or several."""
    if urlsplit(url).hostname not in LOOPBACK:
        return None
    children = list(child_command_lines(proc))
    return read_flags(children[0][1:]) if len(children) == 1 else None


def _listening(proc: Path, port: int) -> Iterator[str]:
    """The socket inodes that listen on this port (proc_pid_net(5): local address in column 2, state 4, inode 10)."""
    for table in ("net/tcp", "net/tcp6"):
        for line in _read(proc / table).decode("ascii", "replace").splitlines()[1:]:
            columns = line.split()
            if len(columns) > 9 and columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]


def _holds(folder: Path, inodes: set[str]) -> bool:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        return any(str(link.readlink()) in wanted for link in (folder / "fd").iterdir())
    except OSError:
        return False  # it has ended, or is not ours to read


def _flags_in(folder: Path) -> Flags | None:
    program, *argv = _read(folder / "cmdline").decode(errors="replace").rstrip("\0").split("\0")
    if not is_llama_server(program):
        return None
    pairs = (one.partition("=") for one in _read(folder / "environ").decode(errors="replace").split("\0"))
    return read_flags(argv, {name: value for name, _, value in pairs if name in ENVIRONMENT})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
