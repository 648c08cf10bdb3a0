"""Looks at one upstream for doctor, and lets the checks judge what was seen."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prefixproxy.backends.http import HttpUpstream
from prefixproxy.backends.ollama_counts import version_of
from prefixproxy.capacity.read import header_of
from prefixproxy.capacity.shapes import TYPES, shape_of
from prefixproxy.doctor.admission import admission_findings, loops
from prefixproxy.doctor.checks import llama_server_findings, more_context
from prefixproxy.doctor.evidence import Demand, Evidence, ModelFile
from prefixproxy.doctor.findings import Finding, error, note
from prefixproxy.doctor.ollama import ollama_findings
from prefixproxy.doctor.probing import LlamaProbe, OllamaProbe
from prefixproxy.doctor.show import Examined
from prefixproxy.doctor.template import Rendered
from prefixproxy.doctor.trial import Trial
from prefixproxy.errors import UsageError
from prefixproxy.facts.gather import Sight
from prefixproxy.facts.process import LOOPBACK
from prefixproxy.facts.report import RunFacts
from prefixproxy.verdicts import Verdicts, needs_verdict

_DAYS = ("%d %b %Y", "%d %B %Y", "%B %d, %Y", "%b %d, %Y", "%Y-%m-%d", "%d/%m/%Y")
"""How templates spell the day."""
_ADMISSION_WHY = "Whether a prompt that fills a slot is answered is not known."


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller wants to know. `verdicts`: what `verify` has found. `may_overwrite`: slots that were used may be;
    `admission`: run that test too."""

    api_key: str = ""
    demand: Demand = field(default_factory=Demand)
    behind: Mapping[str, Any] = field(default_factory=dict)
    verdicts: Verdicts = field(default_factory=lambda: Verdicts({}))
    may_overwrite: bool = False
    admission: bool = False


async def examined(name: str, sight: Sight, asked: Asked) -> Examined:
    """All findings about one upstream that answers. Raises ProxyError when it stops answering."""
    async with _client(name, sight.url, asked.api_key) as http:
        facts = sight.facts
        if sight.upstream.kind == "llama-server":
            facts, findings = await _llama_server(http, sight, asked)
        elif sight.upstream.kind == "ollama":
            findings = await _ollama(http, sight, asked)
        else:
            findings = [_nothing_to_see(sight.facts)]
    if warning := asked.behind.get("warning"):
        findings.append(note("proxy-warning", str(warning), "The proxy in front of it says so."))
    return Examined(name, sight.url, facts, findings)


@asynccontextmanager
async def _client(name: str, url: str, api_key: str) -> AsyncIterator[HttpUpstream]:
    http = HttpUpstream(name, url, api_key)
    try:
        yield http
    finally:
        await http.close()


async def _llama_server(http: HttpUpstream, sight: Sight, asked: Asked) -> tuple[RunFacts, list[Finding]]:
    """Also the facts, with what trying has shown."""
    probe, awake = LlamaProbe(http), not sight.props.get("is_sleeping")
    can = sight.upstream.capabilities
    rendered: Rendered | None = await probe.rendered() if awake else None
    trial, model = Trial(), await asyncio.to_thread(_model_file, sight)
    if awake and can.observe:
        n_swa, may = model.n_swa if model else 0, asked.may_overwrite
        trial = await probe.tried(sight.upstream.n_slots, n_swa, can_save=can.snapshot, may_overwrite=may)
    seen = Evidence(
        facts=sight.facts,
        capabilities=can,
        demand=asked.demand,
        flags=sight.flags,
        log=sight.log,
        model=model,
        props=sight.props,
        reported=sight.reported,
        behind=asked.behind,
        template=str(sight.props.get("chat_template") or ""),
        rendered=rendered,
        today=_today(),
        trial=trial,
        verified=asked.verdicts.passed(replace(sight.upstream, kv_types=sight.facts.kv_types)),
        recorded_corruption=needs_verdict(sight.upstream, model.arch if model else ""),
        save_dir_open=_is_open(sight),
    )
    findings = llama_server_findings(seen)
    if asked.admission:
        findings += await _admission(probe, seen, awake=awake)
    return _with_trial(sight.facts, trial), findings


def _with_trial(facts: RunFacts, trial: Trial) -> RunFacts:
    if facts.kv_unified is not None or trial.keeps_idle is None:
        return facts
    return replace(facts, kv_unified=not trial.keeps_idle, told_by={**facts.told_by, "kv_unified": "by trying"})


async def _admission(probe: LlamaProbe, seen: Evidence, *, awake: bool) -> list[Finding]:
    n_ctx_slot = seen.facts.n_ctx_slot
    if not awake or n_ctx_slot is None:
        why = "the server sleeps" if not awake else "the server does not tell n_ctx_slot"
        return [error("admission-not-run", why, _ADMISSION_WHY)]
    if seen.capabilities.observe and await probe.busy():
        return [error("admission-not-run", "a slot is working", _ADMISSION_WHY, "run it when nobody uses the server")]
    answer = await probe.admitted(n_ctx_slot)
    control = await probe.control() if loops(answer.pieces) else None
    return admission_findings(answer, control, more_context(seen, 2 * n_ctx_slot))


async def _ollama(http: HttpUpstream, sight: Sight, asked: Asked) -> list[Finding]:
    probe = OllamaProbe(http)
    rows = await probe.running()
    seen = Evidence(
        facts=sight.facts,
        capabilities=sight.upstream.capabilities,
        demand=asked.demand,
        reported=sight.reported,
        behind=asked.behind,
        verified=asked.verdicts.passed(sight.upstream),
    )
    findings = ollama_findings(seen, version_of(sight.upstream.build), _unloads_in(rows))
    if asked.admission:
        findings += await _ollama_admission(probe, sight.reported.get("running") or ())
    return findings


async def _ollama_admission(probe: OllamaProbe, running: Sequence[Mapping[str, Any]]) -> list[Finding]:
    told = [model for model in running if model["n_ctx"]]
    if not told:
        return [error("admission-not-run", "no model is loaded", _ADMISSION_WHY, "ask it something first")]
    found: list[Finding] = []
    for model in told:
        answer = await probe.admitted(model["name"], model["n_ctx"])
        found += admission_findings(answer, None, f"OLLAMA_CONTEXT_LENGTH={2 * model['n_ctx']}")
    return found


def _nothing_to_see(facts: RunFacts) -> Finding:
    return note(
        "nothing-to-see",
        f"{facts.url} is an OpenAI-compatible server of another kind",
        "Its API tells nothing about slots or its cache.",
    )


def _model_file(sight: Sight) -> ModelFile | None:
    """The model's own header, if the server runs on this machine and its file can be read."""
    name = str(sight.props.get("model_path") or "")
    if not name or urlsplit(sight.url).hostname not in LOOPBACK:
        return None
    try:
        shape = shape_of(header := header_of(Path(name)))
    except UsageError:
        return None
    if isinstance(shape, str):
        return ModelFile(header.arch, header.whole("context_length"), header.whole("attention.sliding_window") or 0)
    types = sight.facts.kv_types or ("f16", "f16")
    per_token = float(shape.bytes_per_token(*types)) if set(types) <= set(TYPES) else None
    return ModelFile(shape.arch, shape.n_ctx_train, shape.n_swa, per_token)


def _is_open(sight: Sight) -> bool:
    """Whether others can read the directory of saved slots, as far as it is there to look at."""
    path = sight.flags.save_path if sight.flags is not None else None
    if not path or urlsplit(sight.url).hostname not in LOOPBACK:
        return False
    try:
        return bool(Path(path).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))
    except OSError:
        return False


def _today() -> Sequence[str]:
    now = datetime.now().astimezone()
    return tuple(now.strftime(day) for day in _DAYS)


def _unloads_in(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds until the first model is unloaded, None without any that says so."""
    left = [seconds for row in rows if (seconds := _seconds_left(row.get("expires_at"))) is not None]
    return min(left, default=None)


def _seconds_left(when: object) -> float | None:
    try:
        return (datetime.fromisoformat(str(when)) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return None
