"""The embedded engine's own process: the llama.cpp server inside the xllamacpp wheel, for as long as its parent lives.

Started by `engine` as a plain file with `python -P`, so it imports the standard library and xllamacpp alone. Reads one
JSON line of settings on stdin, writes one JSON line on stdout ({"event": "ready"} or {"event": "failed"}), and logs to
stderr. The end of stdin means that the parent is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, BinaryIO

FAILED_EXIT_CODE = 3
"""The server could not start and said so; any other code is a crash."""

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until SIGTERM or until the parent is gone."""
    report = _reporter()
    settings = json.loads(sys.stdin.buffer.readline())
    os.umask(0o077)
    # Loading a model holds the GIL for seconds: until it is done only a signal that needs no Python can end us.
    _on_parent_death(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    if os.getppid() != settings["parent_pid"]:
        os._exit(0)
    try:
        server, build = _serve(settings)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told in one line
        report({"event": "failed", "reason": f"{type(error).__name__}: {error}"})
        os._exit(FAILED_EXIT_CODE)

    def leave(_signal: int = 0, _frame: FrameType | None = None) -> None:
        if settings["private_save_dir"]:
            shutil.rmtree(settings["save_dir"], ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    _on_parent_death(signal.SIGTERM)
    report({"event": "ready", "url": server.listening_address, "build": build})
    while os.read(0, 4096):
        continue
    leave()


def _serve(settings: dict[str, Any]) -> tuple[Any, str]:
    """The running server and the build it was made from."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.port = settings["port"]
    params.reuse_port = settings["reuse_port"]
    params.n_parallel = settings["parallel"]
    params.n_ctx = settings["ctx"]
    params.endpoint_slots = params.endpoint_metrics = params.endpoint_props = True
    params.ui = False
    if not settings["stock"]:
        # Without an alias the server calls the model by its path, in every answer.
        params.model_alias = {os.path.splitext(os.path.basename(settings["model"]))[0]}
        params.kv_unified = False
        # llama-server joins directory and file name as they are, without a separator.
        params.slot_save_path = os.path.join(settings["save_dir"], "")
    for name, value in settings["extra"].items():
        _set(params, name, value)
    return xllamacpp.Server(params), f"xllamacpp-{xllamacpp.__version__}"


def _set(params: Any, name: str, value: Any) -> None:
    """Set one field of CommonParams; dots lead into its parts ("sampling.temp")."""
    *parts, last = name.split(".")
    for part in parts:
        params = getattr(params, part)
    if not hasattr(params, last):
        raise AttributeError(f"the engine has no setting {name!r}")
    setattr(params, last, value)


def _reporter() -> Callable[[dict[str, str]], None]:
    """Keep stdout for reports; whatever else prints to it from now on goes to the log."""
    out: BinaryIO = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def report(event: dict[str, str]) -> None:
        out.write(json.dumps(event).encode() + b"\n")

    return report


def _on_parent_death(number: int) -> None:
    """Ask Linux for this signal when the thread that started us ends; elsewhere the end of stdin has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


if __name__ == "__main__":
    main()
