"""What observing costs: processor time of one proxy per request, with its telemetry at work and with it at rest.

    python tests/bench/observe.py [--blocks 30] [--json]

The proxy runs as a user would run it, at the default log level. Blocks of requests meet it in turn with everything that
observing does (kind, miss reason, record, metrics, journal, strip, trend) and with none of it: one process, so that
neither its memory nor whatever else the machine does makes a difference. Time is processor time of the whole process
(all threads), not time on the clock: waiting counts as nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from overhead import SYSTEM, Case, stub, until_ready, whole

from prefixproxy import app
from prefixproxy.exchange import Exchange
from prefixproxy.logs import logging_to
from prefixproxy.serving import run
from prefixproxy.settings import load_settings, packaged_config
from prefixproxy.telemetry import Telemetry

PER_BLOCK = 40
WARM_UP_BLOCKS = 2
N_CTX = 1 << 16
PAUSE_S = 0.2
"""Before its time is taken, the proxy has worked through the notes it took: see `telemetry`."""
WAYS = ("unobserved", "observed")
TURN = "The berth is free from noon; the pilot asks for a tug, and the agent of the ship wants a time. " * 4
TALK = [{"role": ("user", "assistant")[n % 2], "content": f"{n}: {TURN}"} for n in range(30)]

CASES = (
    Case("json", "JSON, 16 tokens", {"max_tokens": 16}),
    Case("talk", "JSON, 31 messages before it", {"max_tokens": 16, "talk": TALK}),
    Case("stream", "stream, 200 chunks", {"max_tokens": 200, "stream": True}),
)


class Switched(Telemetry):
    """Watches while it is told to, and counts the processor time it takes. What a request is served with does not
    depend on it."""

    watching = True
    taken_s = 0.0

    def sent(self, exchange: Exchange, now: float) -> None:
        if Switched.watching:
            with counted():
                super().sent(exchange, now)

    def answered(self, exchange: Exchange, text: str) -> None:
        if Switched.watching:
            with counted():
                super().answered(exchange, text)

    def record(self, exchange: Exchange, status: int, now: float) -> None:
        if Switched.watching:
            with counted():
                super().record(exchange, status, now)

    def _in_time(self) -> None:
        with counted():
            super()._in_time()


@contextmanager
def counted() -> Iterator[None]:
    started = time.thread_time()
    try:
        yield
    finally:
        Switched.taken_s += time.thread_time() - started


@dataclass(frozen=True)
class Child:
    """The proxy in a process of its own."""

    url: str
    orders: IO[str]
    answers: IO[str]

    def cpu_s(self, way: str) -> tuple[float, float]:
        """Processor time it has taken so far, and of that its telemetry; from now on it works in this way."""
        self.orders.write(f"{way}\n")
        self.orders.flush()
        whole_s, telemetry_s = self.answers.readline().split()
        return float(whole_s), float(telemetry_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30, help="of requests, for each kind and way")
    parser.add_argument("--requests", type=int, default=PER_BLOCK, help="in each block")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--child", metavar="UPSTREAM", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return serve(given.child)
    if given.blocks < 1 or given.requests < 1:
        parser.error("--blocks, --requests: at least 1")
    with stub(n_ctx_slot=N_CTX) as upstream, proxy(upstream) as child:
        taken = measure(child, given.blocks, given.requests)
    report = summary(taken, given.blocks, given.requests)
    print(json.dumps(report, indent=2) if given.json else as_text(report))
    return 0


def serve(upstream: str) -> int:
    """The child: a proxy that takes orders on its input, until that ends."""
    vars(app)["Telemetry"] = Switched  # where the one of a proxy is made
    settings = load_settings(
        packaged_config("default.toml"),
        {"upstreams": [{"name": "local", "url": upstream}], "state.path": ":memory:", "server.port": 0},
        {},
    )

    def listening(url: str) -> None:
        print(url, flush=True)
        threading.Thread(target=obey, daemon=True).start()

    with logging_to(sys.stderr.fileno(), logging.INFO):
        run(settings, listening)
    return 0


def obey() -> None:
    for way in sys.stdin:
        time.sleep(PAUSE_S)
        print(time.process_time(), Switched.taken_s, flush=True)
        Switched.watching = way.strip() == "observed"


@contextmanager
def proxy(upstream: str) -> Iterator[Child]:
    command = [sys.executable, __file__, "--child", upstream]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdin
        assert process.stdout
        try:
            url = process.stdout.readline().strip()
            until_ready(url)
            yield Child(url, process.stdin, process.stdout)
        finally:
            process.terminate()


def measure(child: Child, blocks: int, requests: int) -> dict[tuple[str, str], list[float]]:
    """Processor seconds per request of each block, by case and way; "inside" is what telemetry took when observed."""
    taken: dict[tuple[str, str], list[float]] = {}
    line = Line(child.url)
    for number in range(WARM_UP_BLOCKS + blocks):
        for case in CASES:
            for way in WAYS if number % 2 else reversed(WAYS):
                before = child.cpu_s(way)
                for i in range(requests):
                    line.ask(case, f"Ship {number} {i}")
                spent = [(b - a) / requests for a, b in zip(before, child.cpu_s(way), strict=True)]
                if number >= WARM_UP_BLOCKS:
                    taken.setdefault((case.name, way), []).append(spent[0])
                    if way == "observed":
                        taken.setdefault((case.name, "inside"), []).append(spent[1])
    line.close()
    return taken


class Line:
    """One connection that is kept."""

    def __init__(self, url: str) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._connection = socket.create_connection((self._host, int(port)))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, case: Case, text: str) -> None:
        """Raises RuntimeError unless the answer is whole."""
        more = dict(case.body)
        talk = more.pop("talk", [])
        messages = [{"role": "system", "content": SYSTEM}, *talk, {"role": "user", "content": text}]
        body = json.dumps({"messages": messages, **more}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b""
        while not whole(answer):
            piece = self._connection.recv(1 << 16)
            if not piece:
                raise RuntimeError(f"the proxy broke off: {answer[:300]!r}")
            answer += piece
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the proxy answered {answer[:300]!r}")

    def close(self) -> None:
        self._connection.close()


def summary(taken: dict[tuple[str, str], list[float]], blocks: int, requests: int) -> dict[str, Any]:
    """Milliseconds of processor time per request, and what share observing is: by the difference of the two ways, and
    as counted inside. Lower quartiles of the blocks: whatever disturbs only ever adds."""
    rows = {case.name: {way: _quartile(taken[case.name, way]) for way in (*WAYS, "inside")} for case in CASES}
    whole_run = {way: sum(row[way] for row in rows.values()) for way in (*WAYS, "inside")}
    return {
        "blocks": blocks,
        "requests_per_block": requests,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **_shares(whole_run),
        "cases": {name: {**{f"{way}_ms": ms for way, ms in row.items()}, **_shares(row)} for name, row in rows.items()},
    }


def _quartile(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4] * 1e3


def _shares(row: dict[str, float]) -> dict[str, float]:
    return {
        "share_by_difference": (row["observed"] - row["unobserved"]) / row["observed"],
        "share_inside": row["inside"] / row["observed"],
    }


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"Processor time of the proxy per request, ms (lower quartiles of {report['blocks']} blocks of"
        f" {report['requests_per_block']}; Python {report['python']}, {report['cores']} cores)",
        f"{'':28}{'unobserved':>12}{'observed':>10}{'difference':>12}{'inside':>9}{'share':>8}",
    ]
    for case in CASES:
        row = report["cases"][case.name]
        lines.append(
            f"{case.title:28}{row['unobserved_ms']:12.3f}{row['observed_ms']:10.3f}{row['share_by_difference']:12.1%}"
            f"{row['inside_ms']:9.3f}{row['share_inside']:8.1%}"
        )
    lines.append(
        f"Observing takes {report['share_inside']:.1%} of the proxy's own time;"
        f" the two ways differ by {report['share_by_difference']:.1%}."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
