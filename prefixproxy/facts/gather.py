"""Gathers the facts of a running server: its own answers, its command line where that can be read, its startup log.

Nothing is sent that a slot would have to work on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from prefixproxy.backends import Backend
from prefixproxy.backends.auto import AutoUpstream
from prefixproxy.backends.http import HttpUpstream
from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.backends.ollama import Ollama
from prefixproxy.backends.openai import OpenAIServer
from prefixproxy.engine import Engine, EngineSettings
from prefixproxy.errors import ProxyError, UpstreamFailed, UpstreamLoading
from prefixproxy.facts.flags import DEFAULT_KV_TYPE, KV_TYPE_NUMBERS, Flags, read_flags
from prefixproxy.facts.log import LogFacts, read_log
from prefixproxy.facts.process import flags_of, flags_of_children
from prefixproxy.facts.report import UNKNOWN, RunFacts
from prefixproxy.types import UpstreamFacts

STATUS_PATH = "/prefixproxy/status"
_LOG, _PROCESS, _EMBEDDED = "startup log", "process table", "embedded engine"
_REPORTED = "reported by the server"
_INFERRED = "inferred, as this version does not report cached tokens"
_KINDS = ("llama-server", "ollama", "openai")


@dataclass(frozen=True, slots=True)
class Sight:
    """All that was seen of one server. `props` is llama-server's own answer, `status` that of a prefixproxy in between,
    `reported` what the adapter shows of it beside its facts."""

    facts: RunFacts
    upstream: UpstreamFacts
    url: str
    props: Mapping[str, Any] = field(default_factory=dict)
    reported: Mapping[str, Any] = field(default_factory=dict)
    flags: Flags | None = None
    log: LogFacts | None = None


async def gather(url: str, api_key: str = "", *, kind: str = "auto", log: Iterable[str] = ()) -> RunFacts:
    """The facts of the server at `url`; of the first upstream that is up, if a prefixproxy answers there.

    `log`: the lines of its startup log, if there is one. Raises ProxyError when nothing is there that answers.
    """
    status = await proxy_status(url, api_key)
    if status is None:
        return (await look(url, api_key, kind=kind, log=log)).facts
    up = next((one for one in status["upstreams"] if one["up"]), None)
    if up is None:
        raise UpstreamFailed(f"the prefixproxy at {url} has no upstream that is up")
    return (await look_behind(url, api_key, up, str(status["version"]), log=log)).facts


async def gather_engine(engine: Engine, settings: EngineSettings) -> RunFacts:
    """The facts of the embedded engine, which must be ready."""
    return (await look_at_engine(engine, settings)).facts


async def look(
    url: str,
    api_key: str = "",
    *,
    name: str = "upstream",
    kind: str = "auto",
    log: Iterable[str] = (),
    through: str = "",
    flags: Flags | None = None,
    build: str = "",
) -> Sight:
    """All that can be seen of the server at `url` without giving it work. `flags` and `build`, where the caller knows
    them better than the server tells. Raises ProxyError when it does not answer."""
    async with connected(url, api_key, name=name, kind=kind) as backend:
        upstream = await backend.probe()
        reported = dict(backend.report())
    upstream = replace(upstream, build=build) if build else upstream
    props = await _props(url, api_key) if upstream.kind == "llama-server" else {}
    source = _EMBEDDED
    if flags is None:
        flags, source = await asyncio.to_thread(_flags_here, url, upstream.kind), _PROCESS
    lines = list(log)
    told = read_log(lines) if lines else None
    facts = _facts(url, upstream, reported, through)
    facts = facts if flags is None else _with_flags(facts, flags, source)
    facts = facts if told is None else _with_log(facts, told)
    return Sight(facts, upstream, url, props, reported, flags, told)


async def look_behind(
    proxy_url: str,
    api_key: str,
    upstream: Mapping[str, Any],
    version: str,
    *,
    upstream_key: str = "",
    log: Iterable[str] = (),
) -> Sight:
    """An upstream as the status of a prefixproxy names it: looked at itself, or, where only the proxy reaches it or has
    its key, through the proxy. `api_key` is for the proxy."""
    lines, kind, name = list(log), upstream.get("kind") or "auto", str(upstream["name"])
    build = str(upstream.get("build") or "")
    try:
        return await look(upstream["url"], upstream_key, name=name, kind=kind, log=lines, through=version, build=build)
    except ProxyError:
        return await look(proxy_url, api_key, name=name, kind=kind, log=lines, through=version, build=build)


async def look_at_engine(engine: Engine, settings: EngineSettings) -> Sight:
    """The same of the embedded engine, with what its settings and its own log say."""
    return await look(
        engine.url,
        name="embedded",
        kind="llama-server",
        log=engine.startup_log,
        flags=engine_flags(settings, str(engine.save_dir)),
        build=engine.build,
    )


def _flags_here(url: str, kind: str) -> Flags | None:
    if kind == "llama-server":
        return flags_of(url)
    return flags_of_children(url) if kind == "ollama" else None


@asynccontextmanager
async def connected(
    url: str, api_key: str = "", *, name: str = "upstream", kind: str = "auto"
) -> AsyncIterator[Backend]:
    """An adapter that gives a server no work of its own, closed at the end. `kind` as in `[[upstreams]]`."""
    candidates: list[Backend] = [_adapter(each, name, url, api_key) for each in ([kind] if kind in _KINDS else _KINDS)]
    backend = candidates[0] if len(candidates) == 1 else AutoUpstream(candidates)
    try:
        yield backend
    finally:
        await backend.close()


async def proxy_status(url: str, api_key: str = "") -> Mapping[str, Any] | None:
    """The status of the prefixproxy at `url`, None if something else answers there. Raises ProxyError when nothing
    does."""
    http = HttpUpstream("server", url, api_key)
    try:
        answer = await http.call("GET", STATUS_PATH)
    except (UpstreamFailed, UpstreamLoading):
        return None
    finally:
        await http.close()
    known = isinstance(answer, dict) and isinstance(answer.get("upstreams"), list) and "version" in answer
    return answer if known else None


def engine_flags(settings: EngineSettings, save_dir: str) -> Flags:
    """The command line that would make a llama-server of the embedded engine."""
    argv = ["-m", settings.model.name, "-np", str(settings.parallel), "-c", str(settings.ctx), "--slots", "--metrics"]
    if not settings.stock:
        argv += ["--no-kv-unified", "--slot-save-path", save_dir]
    read = read_flags(argv)
    extra = settings.extra
    return replace(
        read,
        argv=(*read.argv, *(f"{name}={value}" for name, value in extra.items())),
        type_k=_kv_type(extra.get("cache_type_k")),
        type_v=_kv_type(extra.get("cache_type_v")),
        cache_ram_mib=_int(extra.get("cache_ram_mib")),
        kv_unified=bool(extra["kv_unified"]) if "kv_unified" in extra else read.kv_unified,
        cache_idle_slots=_bool(extra.get("cache_idle_slots")),
        swa_full=_bool(extra.get("swa_full")),
        sleep_s=_int(extra.get("sleep_idle_seconds")),
    )


def _adapter(kind: str, name: str, url: str, api_key: str) -> Backend:
    if kind == "llama-server":
        return LlamaServer(name, url, api_key, tries=False)
    return Ollama(name, url, api_key) if kind == "ollama" else OpenAIServer(name, url, api_key)


async def _props(url: str, api_key: str) -> Mapping[str, Any]:
    http = HttpUpstream("server", url, api_key)
    try:
        answer = await http.call("GET", "/props")
    finally:
        await http.close()
    return answer if isinstance(answer, dict) else {}


def _facts(url: str, upstream: UpstreamFacts, reported: Mapping[str, Any], through: str) -> RunFacts:
    running = [one for one in reported.get("running", ()) if isinstance(one, dict)]
    names = ", ".join(str(one["name"]) for one in running)
    contexts = {one["n_ctx"] for one in running}
    told_by = {"n_slots": str(reported["slots_from"])} if "slots_from" in reported else {}
    return RunFacts(
        url=url,
        kind=upstream.kind,
        build=upstream.build or None,
        model=_short(upstream.model) or names or None,
        n_slots=upstream.n_slots if upstream.kind != "openai" else None,
        n_ctx_slot=upstream.n_ctx_slot or (contexts.pop() if len(contexts) == 1 else None),
        tokens=_REPORTED if upstream.capabilities.reports_cached else _tokens_of(upstream),
        through=through,
        told_by=told_by,
    )


def _short(model: str) -> str:
    """A server without an alias calls its model by the path of the file."""
    return PurePath(model).name if model.endswith(".gguf") else model


def _tokens_of(upstream: UpstreamFacts) -> str:
    return _INFERRED if upstream.kind == "ollama" else UNKNOWN


def _with_flags(facts: RunFacts, flags: Flags, source: str) -> RunFacts:
    """What the command line decides; what it leaves open has the server's default."""
    told_by = {**facts.told_by, "flags": source, "kv_unified": source}
    told_by["kv_type_k"] = source if flags.type_k or flags.type_v else f"default, by the {source}"
    told_by["flash_attention"] = source if flags.flash_attention else f"default, by the {source}"
    return replace(
        facts,
        flags=flags.argv,
        kv_unified=flags.unified,
        kv_type_k=flags.type_k or DEFAULT_KV_TYPE,
        kv_type_v=flags.type_v or DEFAULT_KV_TYPE,
        flash_attention=flags.flash_attention or "auto",
        told_by=told_by,
    )


def _with_log(facts: RunFacts, log: LogFacts) -> RunFacts:
    """What the server said it made of its flags is stronger than the flags. A log of a server with other slots is of
    another run, and tells nothing of this one."""
    if log.n_slots is not None and (log.n_slots, log.n_ctx_slot) != (facts.n_slots, facts.n_ctx_slot):
        return facts
    k, v = log.kv_types or (None, None)
    found = {
        "kv_unified": log.kv_unified,
        "kv_type_k": k,
        "kv_type_v": v,
        "flash_attention": log.flash_attention,
    }
    known = {name: value for name, value in found.items() if value is not None}
    told_by = {**facts.told_by, **dict.fromkeys(known, _LOG)}
    return replace(facts, told_by=told_by, **known)  # type: ignore[arg-type]


def _kv_type(number: object) -> str | None:
    return KV_TYPE_NUMBERS.get(number) if isinstance(number, int) else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
