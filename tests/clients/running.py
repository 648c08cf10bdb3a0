"""One client's whole run: its processes, the engine behind it, and the proxy between the two or not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from acted_engine import NUMBER, ActedEngine, Asked, Script
from running_engine import running_engine
from running_proxy import RunningProxy, listening, until_quiet
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from threads import in_thread

from prefixproxy.app import create_app
from prefixproxy.engine import EngineSettings
from prefixproxy.settings import load_settings, packaged_config
from prefixproxy.types import API_OF_PATH, Api

N_SLOTS, N_CTX_SLOT = 4, 32768
SESSION_S = 600
"""How long one process of a client may take; the longest prompts take minutes on two busy cores."""

TEMPLATE = r"""{%- set ns = namespace(rest=messages) %}{%- if messages[0].role == "system" %}<|im_start|>system
{{ messages[0].content }}{%- set ns.rest = messages[1:] %}<|im_end|>
{% endif %}{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
For each call return <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{%- for message in ns.rest %}{%- if message.role == "assistant" %}<|im_start|>assistant
{{ message.content }}{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}
<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>{%- endfor %}{%- endif %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""System text, then tools, then the rest, as most models' templates have it; a system message may stand anywhere."""


@dataclass(frozen=True)
class Sent:
    """One body as the client sent it to the proxy."""

    api: Api
    body: bytes


@dataclass
class Run:
    """What one client did: `sent` to the proxy, by the number each request was given (empty without a proxy), `asked`
    of the engine, beside warm-ups of so many tokens, and `said` to its user."""

    asked: list[Asked]
    sent: dict[int, Sent] = field(default_factory=dict)
    warmed: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


class Recorder:
    """Writes down the prompts that come, and a number onto each."""

    def __init__(self, app: ASGIApp, sent: dict[int, Sent]) -> None:
        self._app = app
        self._sent = sent
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = API_OF_PATH.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if api is None:
            return await self._app(scope, receive, send)
        number = self._count
        self._count += 1
        parts: list[bytes] = []

        async def recorded() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                self._sent[number] = Sent(api, b"".join(parts))
            return message

        await self._app({**scope, "headers": [*scope["headers"], (NUMBER, b"%d" % number)]}, recorded, send)


@asynccontextmanager
async def recorded_proxy(upstream: str, sent: dict[int, Sent], replay_limit: int = 64) -> AsyncIterator[RunningProxy]:
    """A proxy that keeps what it was sent."""
    overrides: dict[str, Any] = {"state.path": ":memory:", "upstreams": [{"name": "local", "url": upstream}]}
    overrides["stabilise.replay_limit"] = replay_limit
    proxy = create_app(load_settings(packaged_config("default.toml"), overrides, {}))
    async with listening(replace(proxy, app=Recorder(proxy.app, sent))) as running:
        yield running
        await until_quiet(running)


def engine_settings(model: Path, *, stock: bool) -> EngineSettings:
    extra: dict[str, int | str] = {"cpuparams.n_threads": 1, "chat_template": TEMPLATE}
    return EngineSettings(model, parallel=N_SLOTS, ctx=N_SLOTS * N_CTX_SLOT, stock=stock, extra=extra)


@contextmanager
def straight(model: Path, script: Script) -> Iterator[tuple[str, Run]]:
    """A URL of the engine alone, as a plain llama-server runs it, and what will have come to it."""
    with (
        running_engine(engine_settings(model, stock=True)) as engine,
        in_thread("acted", lambda: ActedEngine(engine.url, script)) as acted,
    ):
        yield acted.url, Run(acted.asked)


@contextmanager
def through(model: Path, script: Script, replay_limit: int = 64) -> Iterator[tuple[str, Run]]:
    """A URL of a proxy before an engine of its own."""
    sent: dict[int, Sent] = {}
    with (
        running_engine(engine_settings(model, stock=False)) as engine,
        in_thread("acted", lambda: ActedEngine(engine.url, script)) as acted,
        in_thread("proxy", lambda: recorded_proxy(acted.url, sent, replay_limit)) as proxy,
    ):
        yield proxy.url, Run(acted.asked, sent, acted.warmed)


OFFLINE = {
    "NO_PROXY": "127.0.0.1,localhost",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "DO_NOT_TRACK": "1",
    "OTEL_SDK_DISABLED": "true",
    "NO_COLOR": "1",
}
"""Nothing but the loopback address can be reached, and nothing should be tried."""


def command_output(command: list[str], folder: Path, home: Path, environment: dict[str, str]) -> str:
    """Run one process of a client to its end; what it wrote to stdout. It and all it started are gone afterwards."""
    node = [str(Path(found).parent)] if (found := shutil.which("node")) else []
    path = os.pathsep.join([*node, "/usr/local/bin", "/usr/bin", "/bin"])
    given = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb", **OFFLINE, **environment}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=given,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=SESSION_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            raise AssertionError(f"{command[0]} took more than {SESSION_S} s: {errors[-2000:]}") from None
        finally:
            _kill_group(process.pid)
    assert process.returncode == 0, f"{command}: {process.returncode}\n{out[-2000:]}\n{errors[-3000:]}"
    return out


def _kill_group(pid: int) -> None:
    """What a client leaves behind (helpers, hubs) must not outlive it; all of it is in the process group we made."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
