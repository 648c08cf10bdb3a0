"""What stands behind a URL that a command was given: a server, or this proxy with its upstreams behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from prefixproxy.app import backend_of
from prefixproxy.backends.http import HttpUpstream
from prefixproxy.engine import Engine, EngineSettings
from prefixproxy.errors import ProxyError, UsageError
from prefixproxy.facts.gather import gather, gather_engine, proxy_status
from prefixproxy.facts.report import RunFacts
from prefixproxy.settings import Upstream, upstream_values
from prefixproxy.types import Capabilities, UpstreamFacts

ADMISSION = "/prefixproxy/admission"
ASSUMED_RATE = 200.0
"""Prompt tokens per second, as the proxy assumes before it has measured (schedule.types)."""
_CAPABILITIES = {field.name for field in fields(Capabilities)}


@dataclass(frozen=True, slots=True)
class Served:
    """`told`: the facts to print. `proxied`: the URL is a prefixproxy's, and `upstreams` are those behind it that are
    up; else the server itself. `worth_tokens`: shared tokens from which on the proxy warms a root, as fast as its
    upstreams are by now."""

    url: str
    told: RunFacts
    proxied: bool
    upstreams: tuple[UpstreamFacts, ...]
    worth_tokens: int = 0

    @property
    def facts(self) -> UpstreamFacts:
        """The one server it is, or the one the proxy's servers are all like."""
        return self.upstreams[0]


async def served_at(url: str, api_key: str = "", log: Sequence[str] = ()) -> Served:
    """Asks. `log`: the lines of the server's startup log.

    Raises UsageError in one line where nothing answers, or nothing that is known here."""
    upstream = _upstream(url, api_key)
    try:
        told = await gather(upstream.url, api_key, log=log)
        status = await proxy_status(upstream.url, api_key)
        if status is not None:
            worth = _worth_tokens(status, await _admission(upstream.url, api_key))
            behind = tuple(replace(one, kv_types=told.kv_types) for one in _upstreams_of(status, upstream.url))
            return Served(upstream.url, told, True, behind, worth)
        return Served(upstream.url, told, False, (replace(await _probed(upstream), kv_types=told.kv_types),))
    except ProxyError as failure:
        raise UsageError(f"{upstream.url}: {failure.message}") from None


async def served_by(engine: Engine, settings: EngineSettings) -> Served:
    """The embedded engine, once it is ready. Raises ProxyError when it does not answer."""
    told = await gather_engine(engine, settings)
    facts = await _probed(_upstream(engine.url, ""))
    return Served(engine.url, told, False, (replace(facts, build=engine.build, kv_types=told.kv_types),))


async def _probed(upstream: Upstream) -> UpstreamFacts:
    backend = backend_of(upstream)
    try:
        return await backend.probe()
    finally:
        await backend.close()


async def _admission(url: str, api_key: str) -> Any:
    client = HttpUpstream("server", url, api_key)
    try:
        return await client.call("GET", ADMISSION)
    finally:
        await client.close()


def _upstream(url: str, api_key: str) -> Upstream:
    try:
        return Upstream.model_validate({**upstream_values([url])[0], "name": "server", "api_key": api_key})
    except ValueError:
        raise UsageError(f"{url} is no URL of a server: one like http://127.0.0.1:8080 is expected") from None


def _upstreams_of(status: Mapping[str, Any], url: str) -> tuple[UpstreamFacts, ...]:
    live = tuple(_facts_of(entry) for entry in status["upstreams"] if entry.get("up"))
    if not live:
        raise UsageError(f"{url}: none of the proxy's upstreams is up")
    return live


def _worth_tokens(status: Mapping[str, Any], admission: Any) -> int:
    rates = [(one.get("scheduler") or {}).get("prefill_tokens_per_s") or ASSUMED_RATE for one in status["upstreams"]]
    threshold_s = admission.get("root_threshold", 0.0) if isinstance(admission, dict) else 0.0
    return int(max(rates, default=ASSUMED_RATE) * float(threshold_s))


def _facts_of(entry: Mapping[str, Any]) -> UpstreamFacts:
    can = {name: value for name, value in (entry.get("capabilities") or {}).items() if name in _CAPABILITIES}
    return UpstreamFacts(
        name=str(entry["name"]),
        kind=str(entry.get("kind")),
        n_slots=len(entry.get("slots") or ()),
        n_ctx_slot=entry.get("n_ctx_slot"),
        model=str(entry.get("model") or ""),
        models=tuple(entry.get("models") or ()),
        build=str(entry.get("build") or ""),
        capabilities=Capabilities(**can),
        reuse_off=str(entry.get("reuse_off") or ""),
    )
