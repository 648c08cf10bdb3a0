"""What the proxy adds to one request: the same requests to a stub upstream, direct and through it, in turn.

    python -m tests.bench.overhead [--requests 300] [--json]

Stub, proxy and client are three processes on loopback. Each request has a connection of its own, opened before its
clock starts; it ends when the last byte of the answer is read. The two ways alternate, so that whatever else the
machine does meets both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
JSON_TOKENS = 16
STREAM_CHUNKS = 200
WARM_UPS = 20
START_TIMEOUT_S = 60.0
SYSTEM = "You are the duty planner of a small harbour. Answer in one sentence and name the rule you used. " * 40


@dataclass(frozen=True)
class Case:
    """One kind of request. `name` is its key in the JSON report."""

    name: str
    title: str
    body: dict[str, Any]


CASES = (
    Case("json", f"JSON, {JSON_TOKENS} tokens", {"max_tokens": JSON_TOKENS}),
    Case("stream", f"stream, {STREAM_CHUNKS} chunks", {"max_tokens": STREAM_CHUNKS, "stream": True}),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="of each kind and way")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    if given.requests < 1:
        parser.error("--requests: at least 1")
    with stub() as upstream, proxy(upstream) as proxied:
        taken = measure(upstream, proxied, given.requests)
    report = summary(taken, given.requests)
    print(json.dumps(report, indent=2) if given.json else as_text(report))
    return 0


def measure(upstream: str, proxied: str, count: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of every request, by case and way; those that warm up are left out."""
    taken: dict[tuple[str, str], list[float]] = {}
    ways = [("direct", upstream), ("proxy", proxied)]
    for number in range(WARM_UPS + count):
        for case in CASES:
            for way, url in ways if number % 2 else reversed(ways):
                seconds = one_request(url, case, f"{way} {number}")
                if number >= WARM_UPS:
                    taken.setdefault((case.name, way), []).append(seconds)
    return taken


def one_request(url: str, case: Case, text: str) -> float:
    """Seconds from sending the request to having read all of its answer. Raises RuntimeError unless that is whole."""
    host, port = url.removeprefix("http://").split(":")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    body = json.dumps({"messages": messages, **case.body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        started = time.perf_counter()
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b""
        while not whole(answer):
            piece = connection.recv(1 << 16)
            if not piece:
                raise RuntimeError(f"{url} broke off: {answer[:300]!r}")
            answer += piece
        seconds = time.perf_counter() - started
    if not answer.startswith(b"HTTP/1.1 200") or answer.count(b"Fine.") < case.body["max_tokens"]:
        raise RuntimeError(f"{url} answered {answer[:300]!r}")
    return seconds


def whole(answer: bytes) -> bool:
    if b"\r\n\r\n" not in answer:
        return False
    length = re.search(rb"content-length: *(\d+)", answer[: answer.index(b"\r\n\r\n")], re.IGNORECASE)
    if length is None:
        return answer.endswith(b"\r\n0\r\n\r\n")
    return len(answer) >= answer.index(b"\r\n\r\n") + 4 + int(length[1])


def summary(taken: dict[tuple[str, str], list[float]], count: int) -> dict[str, Any]:
    """Milliseconds, p50 and p95, of each case and way, and what lies between the ways."""
    cases = {}
    for case in CASES:
        ways = {way: _quantiles(taken[case.name, way]) for way in ("direct", "proxy")}
        direct, proxied = ways["direct"]["p50_ms"], ways["proxy"]["p50_ms"]
        cases[case.name] = {"ratio_p50": proxied / direct, "added_p50_ms": proxied - direct, **ways}
    return {"requests": count, "python": platform.python_version(), "cores": os.cpu_count(), "cases": cases}


def _quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50_ms": statistics.median(ordered) * 1e3, "p95_ms": ordered[int(0.95 * (len(ordered) - 1))] * 1e3}


def as_text(report: dict[str, Any]) -> str:
    lines = [f"{'':20}  {'ratio p50':>9}  {'added p50':>10}  {'direct p50 / p95':>20}  {'proxy p50 / p95':>20}"]
    for case in CASES:
        found = report["cases"][case.name]
        ways = [f"{found[way]['p50_ms']:.2f} / {found[way]['p95_ms']:.2f} ms" for way in ("direct", "proxy")]
        ratio, added = f"{found['ratio_p50']:.2f}", f"{found['added_p50_ms']:.2f} ms"
        lines.append(f"{case.title:20}  {ratio:>9}  {added:>10}  {ways[0]:>20}  {ways[1]:>20}")
    about = f"{report['requests']} requests of each kind and way, in turn"
    return "\n".join([*lines, f"{about}; Python {report['python']}, {report['cores']} cores."])


@contextmanager
def stub(n_ctx_slot: int = 4096) -> Iterator[str]:
    """The stub upstream in a process of its own; its URL."""
    command = [sys.executable, str(HERE.parent / "stub_upstream.py"), "--ctx", str(n_ctx_slot)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _line(process.stdout).strip()
        finally:
            process.terminate()


@contextmanager
def proxy(upstream: str) -> Iterator[str]:
    """`prefixproxy serve` as a user would run it, but with nothing kept on disk; its URL once it is ready."""
    command = [sys.executable, "-m", "prefixproxy", "serve", "--upstream", upstream, "--port", "0"]
    environment = {**os.environ, "PREFIXPROXY_STATE__PATH": ":memory:"}
    command += ["--log-level", "warning"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            said = _line(process.stderr)
            found = re.search(r"listens on (http://\S+)", said)
            if found is None:
                raise RuntimeError(f"the proxy did not start: {said}")
            until_ready(found[1])
            yield found[1]
        finally:
            process.terminate()


def _line(stream: IO[str] | None) -> str:
    if stream is None:
        raise RuntimeError("the child has no pipe")
    return stream.readline()


def until_ready(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
