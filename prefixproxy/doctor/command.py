"""`prefixproxy doctor`: looks at a server, or at the upstreams of the settings, and says what defeats reuse."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from prefixproxy.backends.http import HttpUpstream
from prefixproxy.doctor.evidence import Demand
from prefixproxy.doctor.findings import Finding, error, note
from prefixproxy.doctor.look import Asked, examined
from prefixproxy.doctor.show import Examined, Report, as_json, report_lines
from prefixproxy.ending import run_until_told
from prefixproxy.engine import Engine, EngineSettings
from prefixproxy.errors import ProxyError, UpstreamLoading, UsageError
from prefixproxy.facts.gather import Sight, look, look_at_engine, look_behind, proxy_status
from prefixproxy.facts.log import read_log
from prefixproxy.facts.startup import log_lines
from prefixproxy.settings import Settings, Upstream
from prefixproxy.state import MEMORY, StateFile
from prefixproxy.types import Kind
from prefixproxy.verdicts import ROWS, Verdicts

_KEY_WANTED = (401, 403)
START_TIMEOUT_S = 300.0
_TELLING = {"verbosity": 4}
"""At this verbosity the embedded engine's log has what it allocated."""
_SEEN_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """`server`: what to look at, None for the upstreams of the settings. `engine`: the embedded engine these ask for,
    None with upstreams. `may_overwrite`: slots that were used may be, to try what shows only by trying."""

    server: Upstream | None = None
    log: Path | None = None
    admission: bool = False
    may_overwrite: bool = False
    json: bool = False
    settings: Settings = field(default_factory=Settings)
    engine: EngineSettings | None = None


def run(options: DoctorOptions) -> int:
    """Look, print the report and return the exit code. Raises UsageError for what is wrong with the options."""
    log = log_lines(options.log) if options.log is not None else ()
    with _doing():
        report = run_until_told(_examine(options, log))
    if options.json:
        sys.stdout.buffer.write(orjson.dumps(as_json(report), option=orjson.OPT_INDENT_2) + b"\n")
    else:
        sys.stdout.write("\n".join(report_lines(report)) + "\n")
    return 0 if report.ok else 1


async def _examine(options: DoctorOptions, log: Sequence[str]) -> Report:
    asked = Asked(
        demand=Demand(min_n_ctx_slot=options.settings.context.min_n_ctx_slot),
        verdicts=_verdicts(options.settings.state.path),
        may_overwrite=options.may_overwrite,
        admission=options.admission,
    )
    if options.server is not None:
        return await _at(options.server, options.settings, asked, log)
    if options.engine is None:
        found = [await _one(upstream, asked, log) for upstream in options.settings.upstreams]
        return Report((), found)
    own = _own_url(options.settings)
    key = _key_for(own, options.settings)
    try:
        status = await proxy_status(own, key)
    except ProxyError:
        status = None
    if status is not None:
        return await _behind(own, key, status, options.settings, asked, log)
    return await _embedded(options.engine, asked)


async def _at(server: Upstream, settings: Settings, asked: Asked, log: Sequence[str]) -> Report:
    """One server, or, if that is a prefixproxy, its upstreams."""
    key = server.api_key or _key_for(server.url, settings)
    try:
        status = await proxy_status(server.url, key)
    except ProxyError as failure:
        return Report((), [_unreachable(server.name, server.url, failure)])
    if status is not None:
        return await _behind(server.url, key, status, settings, asked, log)
    if server.api_key:
        return Report((), [await _one(server, asked, log)])
    known = next((one for one in settings.upstreams if one.url == server.url), server)
    return Report((), [await _one(known, asked, log)])


async def _behind(
    url: str, key: str, status: Mapping[str, Any], settings: Settings, asked: Asked, log: Sequence[str]
) -> Report:
    """The upstreams that a prefixproxy names, with what it has seen of their use. `key` is for the proxy."""
    records = await _records(url, key)
    about = [f"{url} is prefixproxy {status['version']}; these are its upstreams."]
    found = []
    for one in status["upstreams"]:
        if not one["up"]:
            failure = str(one.get("failure") or one.get("health") or "it is not up")
            found.append(Examined(one["name"], one["url"], None, [_down(one["url"], failure)]))
            continue
        own_key = _key_for(one["url"], settings)
        here = replace(asked, behind=one, demand=_demand(records, one["name"], asked.demand))
        try:
            sight = await look_behind(url, key, one, str(status["version"]), upstream_key=own_key, log=log)
            here = replace(here, api_key=key if sight.url == url else own_key)
            found.append(await examined(one["name"], sight, here))
        except ProxyError as failure:
            found.append(_unreachable(one["name"], one["url"], failure))
    return Report(about, found)


async def _one(upstream: Upstream, asked: Asked, log: Sequence[str]) -> Examined:
    try:
        sight = await look(upstream.url, upstream.api_key, name=upstream.name, kind=upstream.kind, log=log)
        sight = _as_set(sight, upstream)
        found = await examined(upstream.name, sight, replace(asked, api_key=upstream.api_key))
    except ProxyError as failure:
        return _unreachable(upstream.name, upstream.url, failure)
    return _with_log_note(found, log)


async def _embedded(engine: EngineSettings, asked: Asked) -> Report:
    """The embedded engine, started for this."""
    about = ["No upstream is set and no proxy runs: this is the embedded engine, started to be looked at."]
    settings = replace(engine, extra={**engine.extra, **_TELLING})
    async with _started(settings) as running:
        sight = await look_at_engine(running, settings)
        return Report(about, [await examined("embedded", sight, asked)])


@asynccontextmanager
async def _started(settings: EngineSettings) -> AsyncIterator[Engine]:
    async with Engine(settings) as engine:
        await engine.wait_ready(START_TIMEOUT_S)
        yield engine


def _as_set(sight: Sight, upstream: Upstream) -> Sight:
    """With the number of slots that the settings state, where they do."""
    if not upstream.slots:
        return sight
    told_by = {**sight.facts.told_by, "n_slots": "upstreams.slots"}
    return replace(sight, facts=replace(sight.facts, n_slots=upstream.slots, told_by=told_by))


def _with_log_note(found: Examined, log: Sequence[str]) -> Examined:
    """Says so where the log that was given tells of another run, or of none."""
    if not log or found.facts is None or found.facts.kind != "llama-server":
        return found
    told = read_log(log)
    if told.n_slots is None:
        name, evidence = "log-tells-nothing", "--log has no line that tells n_slots and n_ctx_slot"
    elif (told.n_slots, told.n_ctx_slot) != (found.facts.n_slots, found.facts.n_ctx_slot):
        name = "log-of-another-run"
        evidence = f"--log tells of {told.n_slots} slots of {told.n_ctx_slot} tokens, the server has others"
    else:
        return found
    why = "It was not used for the facts above."
    return replace(found, findings=[*found.findings, note(name, evidence, why, "the log of the server that runs now")])


def _key_for(url: str, settings: Settings) -> str:
    """The key that the settings have for a server: an upstream's, or the proxy's own. Nobody else gets one."""
    known = next((one.api_key for one in settings.upstreams if one.url == url), "")
    return known or (next(iter(settings.server.api_keys), "") if url == _own_url(settings) else "")


def _own_url(settings: Settings) -> str:
    host = settings.server.host
    loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{loopback}:{settings.server.port}"


async def _records(url: str, key: str) -> Sequence[Mapping[str, Any]]:
    """The newest requests a prefixproxy has seen; none where it does not tell."""
    http = HttpUpstream("server", url, key)
    try:
        answer = await http.call("GET", f"/prefixproxy/requests?limit={_SEEN_REQUESTS}")
    except ProxyError:
        return ()
    finally:
        await http.close()
    return answer.get("requests") or () if isinstance(answer, dict) else ()


def _demand(records: Sequence[Mapping[str, Any]], upstream: str, demand: Demand) -> Demand:
    """What the conversations on one upstream take together, each at its longest."""
    longest: dict[str, int] = {}
    for record in records:
        tokens = record.get("prompt_tokens")
        if record.get("upstream") == upstream and tokens and record.get("kind") != Kind.SIDE:
            name = f"{record.get('model')} {record.get('lane') or record.get('family') or record.get('id')}"
            longest[name] = max(longest.get(name, 0), int(tokens))
    return replace(
        demand,
        conversations=len(longest),
        conversation_tokens=sum(longest.values()),
        longest_prompt=max(longest.values(), default=0),
    )


def _unreachable(name: str, url: str, failure: ProxyError) -> Examined:
    """Why there is nothing to say: it wants a key, it answers like nothing that is known, or nobody answers."""
    cause = failure.__cause__
    statuses = [one.details.get("upstream_status") for one in (failure, cause) if isinstance(one, ProxyError)]
    if any(status in _KEY_WANTED for status in statuses):
        why = "Nothing can be said about a server that tells nothing without its key."
        found = error("key-wanted", failure.message, why, "--api-key KEY, or upstreams[].api_key in the settings")
    elif isinstance(cause, OSError):
        found = _down(url, f"{failure.message} ({cause.strerror or cause})")
    elif isinstance(failure, UpstreamLoading):
        found = _down(url, failure.message)
    else:
        why = "Nothing can be said about what is no llama-server, Ollama or OpenAI-compatible server."
        found = error("unknown-server", failure.message, why, "the base URL, such as http://127.0.0.1:8080")
    return Examined(name, url, None, [found])


def _down(url: str, why: str) -> Finding:
    return error("unreachable", why, "Nothing can be said about a server that does not answer.", f"start it at {url}")


def _verdicts(path: str) -> Verdicts:
    """What `verify` has found, if there is a state file; none is made."""
    if path == MEMORY or not Path(path).exists():
        return Verdicts({})
    try:
        with StateFile(path) as state:
            return Verdicts(state.rows(ROWS))
    except UsageError:
        return Verdicts({})


@contextmanager
def _doing() -> Iterator[None]:
    """A line on stderr while it looks, on a terminal only."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield
        return
    with console.status("looking ..."):
        yield
