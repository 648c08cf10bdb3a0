"""The command as a user types it: what it does, and one clear line with the right exit code when it cannot."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from scripted_ollama import ScriptedOllama
from stub_upstream import Exchange, StubUpstream
from threads import in_thread

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "prefixproxy"]
ENVIRONMENT = {**os.environ, "PREFIXPROXY_STATE__PATH": ":memory:"}
CHAT = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4, "temperature": 0}
PATIENCE_S = 120


def run(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command to its end, away from any settings file of this checkout."""
    here = Path(__file__).parents[2]
    env = {**ENVIRONMENT, "PYTHONPATH": str(here), **environment}
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@dataclass
class Served:
    """A running `prefixproxy serve`."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    listening: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"listens on (http://\S+)", line):
                self.url = found[1]
                self.listening.set()
        self.listening.set()


@contextmanager
def serve(*arguments: object, cwd: Path) -> Iterator[Served]:
    here = Path(__file__).parents[2]
    command = [*COMMAND, "serve", "--port", "0", *map(str, arguments)]
    env = {**ENVIRONMENT, "PYTHONPATH": str(here)}
    with subprocess.Popen(command, cwd=cwd, env=env, stderr=subprocess.PIPE, text=True) as process:
        served = Served(process)
        reader = threading.Thread(target=served.read)
        reader.start()
        try:
            assert served.listening.wait(PATIENCE_S)
            assert served.url, "".join(served.lines)
            yield served
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
            reader.join()


@contextmanager
def stub_process() -> Iterator[str]:
    """The stub upstream in a process of its own; its URL."""
    stub_file = Path(__file__).parents[1] / "stub_upstream.py"
    with subprocess.Popen([sys.executable, str(stub_file)], stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdout is not None
        try:
            yield stub.stdout.readline().strip()
        finally:
            stub.terminate()


def until_ready(client: httpx.Client) -> None:
    """Until the model is loaded; the proxy answers /readyz with 503 before."""
    status = 503
    while status == 503:
        status = client.get("/readyz").status_code
    assert status == 200


def until_refused(url: str) -> None:
    """Until no new connection is taken: two signals of one kind that come too close are one. A connection that waited
    to be taken is reset, or closed if it was taken in the last moment."""
    with suppress(httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        while httpx.get(f"{url}/healthz").status_code == 200:
            continue


def one_line(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """The command ended with this code and one line beside its log that says all of this; never a traceback."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    [line] = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert line.startswith("prefixproxy: ")
    for part in parts:
        assert part in line


@pytest.mark.engine
def test_serve_answers_and_ends_in_good_order_when_told_to(tiny_model: Path, tmp_path: Path) -> None:
    with (
        serve("--model", tiny_model, "--parallel", 2, "--ctx", 512, cwd=tmp_path) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        assert client.get("/healthz").status_code == 200
        until_ready(client)
        answer = client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
        [upstream] = client.get("/prefixproxy/status").json()["upstreams"]
        assert (upstream["up"], upstream["n_ctx_slot"], len(upstream["slots"])) == (True, 512, 2)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE_S) == 0
    assert not any("Traceback" in line for line in served.lines)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{upstream['url']}/health")


@pytest.mark.engine
def test_a_request_that_comes_while_the_model_loads_waits_for_it(tiny_model: Path, tmp_path: Path) -> None:
    with serve("--model", tiny_model, cwd=tmp_path) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_nobody_has_to_read_the_log(tmp_path: Path) -> None:
    """A pipe holds 64 KB: a proxy that waited for its reader would answer about seventy requests and no more."""
    env = {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])}
    with stub_process() as upstream:
        command = [*COMMAND, "serve", "--port", "0", "--upstream", upstream]
        with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            found = re.search(rb"listens on (http://\S+)", process.stderr.readline())
            assert found is not None
            with httpx.Client(base_url=found[1].decode(), timeout=30) as client:
                until_ready(client)
                answers = [client.post("/v1/chat/completions", json=CHAT).status_code for _ in range(200)]
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
    assert answers == [200] * 200


def test_a_stream_that_runs_is_ended_before_the_process_ends(tmp_path: Path) -> None:
    """SIGTERM lets a running answer finish."""
    with (
        stub_process() as upstream,
        serve("--upstream", upstream, cwd=tmp_path) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        until_ready(client)
        body = {**CHAT, "stream": True, "max_tokens": 2000}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            chunks = answer.iter_raw()
            got = next(chunks)
            served.process.send_signal(signal.SIGTERM)
            got += b"".join(chunks)
        assert served.process.wait(PATIENCE_S) == 0
    assert got.count(b'"Fine."') == 2000
    assert got.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("signals", [[signal.SIGINT, signal.SIGINT], [signal.SIGHUP, signal.SIGTERM]])
def test_a_second_signal_ends_it_at_once_and_whoever_waits_is_told(signals: list[int], tmp_path: Path) -> None:
    with (
        in_thread("stub", StalledUpstream.running) as stub,
        serve("--upstream", stub.url, cwd=tmp_path) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
        ThreadPoolExecutor() as pool,
    ):
        until_ready(client)
        answer = pool.submit(client.post, "/v1/chat/completions", json=CHAT)
        assert stub.busy.wait(PATIENCE_S)
        first, second = signals
        served.process.send_signal(first)
        until_refused(served.url)
        served.process.send_signal(second)
        assert answer.result().status_code == 503
        assert answer.result().json()["error"]["code"] == "upstream_unavailable"
        assert served.process.wait(PATIENCE_S) == 0
    assert not any("Traceback" in line or " ERROR " in line for line in served.lines)


@dataclass
class StalledUpstream:
    """A server that never answers what it generates."""

    url: str
    busy: threading.Event = field(default_factory=threading.Event)

    @classmethod
    @asynccontextmanager
    async def running(cls) -> AsyncIterator[StalledUpstream]:
        async with StubUpstream() as stub:
            found = cls(stub.url)

            async def stall(exchange: Exchange) -> None:
                found.busy.set()
                await exchange.request.connection_gone.wait()

            stub.next_answers.append(stall)
            yield found


def test_a_hangup_that_nohup_keeps_away_changes_nothing(tmp_path: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serve("--upstream", "http://127.0.0.1:9", cwd=tmp_path) as served:
            served.process.send_signal(signal.SIGHUP)
            assert httpx.get(f"{served.url}/healthz").status_code == 200
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_an_upstream_that_is_not_there_does_not_keep_the_proxy_from_starting(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        with serve("--upstream", nobody, cwd=tmp_path) as served, httpx.Client(base_url=served.url) as client:
            assert client.get("/readyz").status_code == 503
            answer = client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "upstream_unavailable"
            assert int(answer.headers["retry-after"]) >= 1
    assert not any("Traceback" in line for line in served.lines)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--upstream", "http://127.0.0.1:9", "--port", port, cwd=tmp_path)
    one_line(result, 2, f"cannot listen on 127.0.0.1:{port}", "server.port")


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_model_that_is_no_gguf(command: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"PK\x03\x04 a zip file")
    one_line(run(command, "--model", model, cwd=tmp_path), 2, "model.gguf is no GGUF model")
    one_line(run(command, "--model", tmp_path / "absent.gguf", cwd=tmp_path), 2, "absent.gguf: No such file")


@pytest.mark.engine
@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("demo",), ("demo", "--json")])
@pytest.mark.parametrize("kept_bytes", [0, 40_000])
def test_a_gguf_that_the_engine_cannot_load(
    command: tuple[str, ...], kept_bytes: int, tiny_model: Path, tmp_path: Path
) -> None:
    """The right magic, then nothing of use; and a file that was cut off."""
    model = tmp_path / "broken.gguf"
    whole = tiny_model.read_bytes()
    assert len(whole) > kept_bytes + 1000
    model.write_bytes(whole[:kept_bytes] or b"GGUF\x03\x00\x00\x00" + bytes(64))
    result = run(*command, "--model", model, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    told = [line for line in result.stderr.splitlines() if "broken.gguf" in line]
    assert len(told) == 1
    assert told == result.stderr.splitlines()[-1:]
    assert told[0].startswith(f"prefixproxy: the engine cannot run {model}: it failed: ")
    assert [word for word in (" ERROR ", " WARNING ", "Traceback") if word in result.stderr] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[server]\nprot = 8100\n", ["server.prot", "port"]),
        ("[server]\nport = 'high'\n", ["server.port"]),
        ("[serverr]\nport = 1\n", ["serverr"]),
        ("[server\n", ["not valid TOML"]),
        ("[stabilise]\nrules = ['absent.toml']\n", ["stabilise.rules", "absent.toml"]),
        ("[[upstreams]]\nname = 'a'\nurl = 'ftp://x'\n", ["url", "ftp://x"]),
    ],
)
def test_a_settings_file_that_is_wrong(text: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    one_line(run("serve", "--config", file, cwd=tmp_path), 2, *parts)


def test_a_state_file_that_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    result = run("serve", "--upstream", "http://127.0.0.1:9", cwd=tmp_path, PREFIXPROXY_STATE__PATH="notes.txt")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("prefixproxy: state.path: notes.txt exists and is no state file")
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_an_unknown_variable_in_the_environment(tmp_path: Path) -> None:
    one_line(run("serve", cwd=tmp_path, PREFIXPROXY_SERVER__PROT="1"), 2, "server.prot", "server.port", "environment")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--upstream", "http://x", "--model", "y"], "exclude each other"),
        (["serve", "--upstream", "not a url"], "url"),
        (["serve", "--log-level", "loud"], "--log-level"),
        (["demo", "--lanes", "0"], "--lanes"),
    ],
)
def test_options_that_are_wrong(arguments: list[str], part: str, tmp_path: Path) -> None:
    one_line(run(*arguments, cwd=tmp_path), 2, part)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["serve", "--port", "abc"], "'--port'"),
        (["serve", "--parallel", "abc"], "'--parallel'"),
        (["serve", "--port"], "'--port'"),
        (["serve", "--no-such-option"], "--no-such-option"),
        (["serve", "more"], "more"),
        (["no-such-command"], "'no-such-command'"),
        (["lint"], "FILE"),
    ],
)
def test_arguments_that_are_none(arguments: list[str], part: str, tmp_path: Path) -> None:
    one_line(run(*arguments, cwd=tmp_path), 2, part)


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["serve", "--help"], 0), ([], 2)])
def test_help_is_shown_as_such(arguments: list[str], code: int, tmp_path: Path) -> None:
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == code
    assert "Usage: " in result.stdout
    assert "prefixproxy: " not in result.stderr


def test_version(tmp_path: Path) -> None:
    result = run("--version", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"prefixproxy \d+\.\d+.*\n", result.stdout)


@pytest.mark.engine
def test_the_demo_tells_in_json_what_the_servers_reported(tiny_model: Path, tmp_path: Path) -> None:
    result = run("demo", "--quick", "--json", "--model", tiny_model, "--lanes", 3, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    report: dict[str, Any] = orjson.loads(result.stdout)
    assert report["ok"] is True
    assert [wave["name"] for wave in report["waves"]] == ["straight", "cold", "known"]
    root = report["root_tokens"]
    assert 750 < root < 1000
    for wave in report["waves"]:
        assert len(wave["lanes"]) == 3
        assert all(lane["slot"] in range(4) and lane["state"] == "done" for lane in wave["lanes"])
        told = sum(lane["prompt_n"] for lane in wave["lanes"])
        assert wave["evaluated_tokens"] == told + wave["evaluated_beside_lanes_tokens"]
    straight, _cold, known = report["waves"]
    assert (straight["roots_evaluated"], straight["lanes_that_reused"]) == (3, 0)
    assert known["lanes_that_reused"] >= 1
    assert "through prefixproxy, cold" in result.stderr


@pytest.mark.parametrize("by_settings", [True, False])
def test_the_shipped_settings_for_ollama_serve_one(tmp_path: Path, *, by_settings: bool) -> None:
    """As shipped but for the address; and without any settings, the kind found by asking."""
    with in_thread("ollama", ScriptedOllama) as ollama:
        shipped = (Path(__file__).parents[2] / "config" / "ollama.toml").read_text(encoding="utf-8")
        assert "http://127.0.0.1:11434" in shipped
        config = tmp_path / "ollama.toml"
        config.write_text(shipped.replace("http://127.0.0.1:11434", ollama.url), encoding="utf-8")
        arguments = ("--config", config) if by_settings else ("--upstream", ollama.url)
        with serve(*arguments, cwd=tmp_path) as served, httpx.Client(base_url=served.url, timeout=60) as client:
            until_ready(client)
            body = {"model": "tiny", "messages": CHAT["messages"]}
            lines = client.post("/api/chat", json=body).text.splitlines()
            assert orjson.loads(lines[-1])["done"] is True
            assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3
            [upstream] = client.get("/prefixproxy/status").json()["upstreams"]
            assert (upstream["kind"], upstream["build"]) == ("ollama", "0.33.3")
            assert len(upstream["slots"]) == (4 if by_settings else 1)
        assert ollama.violations == []
