"""Wires the parts together: everything is built once, here, and handed on as arguments."""

from __future__ import annotations

import asyncio
import math
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from prefixproxy.admission import AdmissionControl, policy_of
from prefixproxy.advice import rule_advice
from prefixproxy.answers import AnswerMemory
from prefixproxy.backends import Backend
from prefixproxy.backends.auto import AutoUpstream
from prefixproxy.backends.llamacpp import LlamaServer
from prefixproxy.backends.ollama import Ollama
from prefixproxy.backends.openai import OpenAIServer
from prefixproxy.canary import ReuseMode
from prefixproxy.classify import History
from prefixproxy.context import ContextLimits
from prefixproxy.dispatch import Dispatcher
from prefixproxy.engine import Engine
from prefixproxy.errors import BadRequest, ProxyError, UsageError
from prefixproxy.events import Events
from prefixproxy.facts.flags import Flags
from prefixproxy.facts.process import flags_of
from prefixproxy.fleet import Fleet
from prefixproxy.gate import Gate
from prefixproxy.guard import ContextGuard, TenantLimits
from prefixproxy.hosts import Hosts
from prefixproxy.intake import until_stopped
from prefixproxy.journal import Journal
from prefixproxy.journal_rows import JournalRows
from prefixproxy.keeping import Keeping, SlotRows, VerdictRows, keeping_of
from prefixproxy.metrics import Metrics
from prefixproxy.microscope import Strips
from prefixproxy.passthrough import SLOT_TAKING, Passthrough
from prefixproxy.patience.beat import Pace
from prefixproxy.plan import Planner
from prefixproxy.relay import Parts, Relay
from prefixproxy.reply import Reply
from prefixproxy.schedule.scheduler import Scheduler
from prefixproxy.schedule.types import Policy, Share
from prefixproxy.settings import Settings, Upstream
from prefixproxy.settings_layers import is_loopback
from prefixproxy.stabilise.notes import count_tokens
from prefixproxy.stabilise.stabiliser import StabilisePolicy, Stabiliser
from prefixproxy.state import StateFile
from prefixproxy.status import OWN_PREFIX, PUBLIC, Status, status_snapshot
from prefixproxy.target import PathReader
from prefixproxy.telemetry import Telemetry
from prefixproxy.tools import ToolMemory
from prefixproxy.trend import Copy, Trend
from prefixproxy.types import API_OF_PATH, Usage
from prefixproxy.verdicts import Verdicts
from prefixproxy.volatile.files import load_rules
from prefixproxy.volatile.rules import RuleSet

EMBEDDED = "embedded"
NO_ROLLBACK_SHARE = 0.9
"""Of the tokens before a forgotten tail, this share or less was reused: the model's memory cannot be cut back to where
one likes. Plain attention keeps all of them; checkpoints keep some."""
_EMBEDDED_FLAGS = Flags((), n_parallel=1)
"""Of those that decide about reuse, no setting changes any; with any number of slots each has a KV cache of its own."""
EVENTS_PATH = "/prefixproxy/events"
MAX_TOOL_SETS, MAX_CALLS, MAX_MEMORY_BYTES = 1024, 16_384, 32 << 20


@dataclass(frozen=True, slots=True)
class Proxy:
    """The ASGI application, and the parts that a command may want to look at."""

    app: ASGIApp
    parts: Parts
    ending: Callable[[], None]
    """To be called when the server begins to stop."""


def create_app(settings: Settings, *, engine: Engine | None = None) -> Proxy:
    """The whole proxy for these settings; `engine` is the running embedded engine, if that is the upstream.

    Raises UsageError for a rule file that is wrong.
    """
    clock = time.monotonic
    metrics = Metrics()
    reuse = ReuseMode(settings.reuse.mode, settings.reuse.canary_fraction)
    live = partial(_policy, settings=settings, engine=engine)
    scheduler = Scheduler(live(policy_of(settings.admission)))
    trend = Trend(time.time())
    marker = f"prefixproxy-{secrets.token_hex(6)}"
    backends = _backends(settings, engine)
    for backend, _slots, _snapshots in backends:
        backend.marker = marker
    address = f"{settings.server.host}:{settings.server.port}"
    dispatcher = Dispatcher(scheduler, backends, _Watch(metrics, trend), clock, address=address)
    limits = _limits(settings)
    for keeper in dispatcher.keepers.values():
        keeper.limits = limits
    admission = AdmissionControl(
        settings.admission,
        lambda policy: dispatcher.set_policy(live(policy)),
        lambda: max(Counter(slot.id.upstream for slot in dispatcher.snapshot().slots).values(), default=0),
    )
    rules = _rules(settings)
    planner = _planner(settings, rules, dispatcher.fleet)
    telemetry, past = _telemetry(settings, metrics, trend, dispatcher, scheduler)
    keeping = _keeping(settings, scheduler, dispatcher, planner, past)
    parts = Parts(
        dispatcher=dispatcher,
        planner=planner,
        telemetry=telemetry,
        gate=Gate(_keys(settings)),
        guard=ContextGuard(
            dispatcher.fleet,
            limits,
            {one.name: TenantLimits(one.max_slots, one.max_context) for one in settings.tenants},
        ),
        max_body_bytes=settings.server.max_body_bytes,
        queue_timeout_s=admission.queue_timeout_s,
        clock=clock,
        unix_time=time.time,
        learned=keeping.changed,
        reuse=reuse,
        pace=Pace(settings.patience.after, settings.patience.every),
    )
    metrics.watch(lambda: status_snapshot(dispatcher, reuse=reuse.mode != "off"))
    events = Events(parts.telemetry.journal, parts.gate)
    status = Status(parts, admission, rule_advice(rules))
    entrance = _Entrance(parts, status, events, keeping, marker, _hosts(settings))
    return Proxy(entrance, parts, events.end)


class _Watch:
    """Counts what the dispatcher does besides requests: for the metrics, and for the page's trend."""

    def __init__(self, metrics: Metrics, trend: Trend) -> None:
        self._trend = trend
        self._metrics = metrics
        self.no_effect = metrics.no_effect

    def warmup(self, upstream: str, outcome: str, model: str, slot: int | None, usage: Usage | None) -> None:
        self._metrics.warmup(upstream, outcome, model, slot, usage)
        self._trend.warmup(upstream, slot, outcome, usage, time.time())

    def fork(self, upstream: str, outcome: str, seconds: float, slot: int, source: int | None) -> None:
        self._metrics.fork(upstream, outcome, seconds)
        self._trend.copy(Copy(upstream, slot, source, outcome, time.time(), seconds))

    def tried(self, upstream: str, model: str, slot: int | None, usage: Usage) -> None:
        self._metrics.tried(upstream, model, slot, usage)
        self._trend.tokens(usage.cached_tokens or 0, usage.evaluated_tokens or 0, time.time())

    def cut_short(self, upstream: str, model: str, slot: int, family: str, cached: int, evaluated: int) -> None:
        self._metrics.cut_short(upstream, model, slot, family, cached, evaluated)
        self._trend.tokens(cached, evaluated, time.time())


_LOOP = BadRequest(
    "this request was sent by this proxy itself: the url of an upstream leads back here (upstreams[].url)",
    code="loop_detected",
    status=508,
)


class _Entrance:
    """The first fork: our own pages, prompts, and everything else. Prompts meet no middleware."""

    def __init__(
        self, parts: Parts, status: Status, events: Events, keeping: Keeping, marker: str, hosts: Hosts | None
    ) -> None:
        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            async with asyncio.TaskGroup() as group, keeping.running(), parts.dispatcher.running():
                # Its first call loads the vocabulary, which would hold up whichever request came to need it.
                group.create_task(asyncio.to_thread(count_tokens, ""))
                yield
                parts.telemetry.settle()

        self._own = Starlette(
            routes=status.routes(),
            lifespan=lifespan,
            exception_handlers={404: status.no_route, 405: status.no_route},
        )
        self._events = events
        self._passthrough = Passthrough(parts)
        self._relay = Relay(parts, self._passthrough.elsewhere)
        self._marker = marker.encode()
        self._hosts = hosts
        self._taking_slots = PathReader([*API_OF_PATH, *SLOT_TAKING])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._hosts is not None and scope["type"] == "http":
            try:
                self._hosts.require_known(scope["headers"])
            except BadRequest as failure:
                await Reply(send, scope["path"]).error(failure)
                return
        if scope["type"] == "http" and scope["path"] == EVENTS_PATH and scope["method"] == "GET":
            await self._events(scope, receive, send)
        elif scope["type"] != "http":
            await self._own(scope, receive, send)
        elif scope["path"] in PUBLIC or f"{scope['path']}/".startswith(OWN_PREFIX):
            await self._own_answer(scope, receive, send)
        else:
            await self._upstreams(scope, receive, send)

    async def _upstreams(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`scope["path"]` becomes the path that is meant, whatever its spelling; what is forwarded is `raw_path`."""
        if any(self._marker in value for name, value in scope["headers"] if name == b"via"):
            await Reply(send, scope["path"]).error(_LOOP)
            return
        if scope["method"] == "POST" and (meant := self._taking_slots.meant(scope["raw_path"])):
            scope = {**scope, "path": meant}
        if scope["method"] == "POST" and scope["path"] in API_OF_PATH:
            await self._relay(scope, receive, send)
        else:
            await self._passthrough(scope, receive, send)

    async def _own_answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with until_stopped():
                await self._own(scope, receive, send)
        except ProxyError as failure:
            await Reply(send, scope["path"]).error(failure)


def _backends(settings: Settings, engine: Engine | None) -> list[tuple[Backend, int, bool]]:
    if engine is not None:
        embedded = LlamaServer(
            EMBEDDED, engine.url, build=lambda: engine.build, shared=False, flags=lambda: _EMBEDDED_FLAGS
        )
        return [(embedded, 0, True)]
    return [(backend_of(u), u.slots, u.snapshots == "auto") for u in settings.upstreams]


def backend_of(upstream: Upstream) -> Backend:
    """The adapter for an upstream's kind; for "auto", one that asks."""
    where = upstream.name, upstream.url, upstream.api_key
    kinds: dict[str, Callable[[], Backend]] = {
        "llama-server": lambda: LlamaServer(*where, flags=partial(flags_of, upstream.url)),
        "ollama": lambda: Ollama(*where, upstream.normalise),
        "openai": lambda: OpenAIServer(*where),
    }
    make = kinds.get(upstream.kind)
    return make() if make else AutoUpstream([each() for each in kinds.values()])


def _limits(settings: Settings) -> ContextLimits:
    context = settings.context
    return ContextLimits(context.min_n_ctx_slot, context.min_generation, context.on_exceed == "reject")


def _tenants(settings: Settings) -> Mapping[str, TenantLimits]:
    return {one.name: TenantLimits(one.max_slots, one.max_context) for one in settings.tenants}


def _rules(settings: Settings) -> RuleSet:
    stabilise = settings.stabilise
    return load_rules([(name, _rule_file(name)) for name in stabilise.rules], frozenset(stabilise.disabled))


def _planner(settings: Settings, rules: RuleSet, fleet: Fleet) -> Planner:
    stabilise = settings.stabilise
    policy = StabilisePolicy(learned=stabilise.learned, replay_limit_tokens=stabilise.replay_limit)
    tools, answers = ToolMemory(MAX_TOOL_SETS, MAX_MEMORY_BYTES), AnswerMemory(MAX_CALLS, MAX_MEMORY_BYTES)
    stabiliser = Stabiliser(rules, policy)
    return Planner(
        stabiliser,
        tools,
        answers,
        stabilise.mode,
        compat=stabilise.compat,
        answering=fleet.answering,
        template_of=fleet.template_of,
    )


def _rule_file(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise UsageError(f"stabilise.rules: cannot read {name}: {failure}") from None


def _policy(policy: Policy, *, settings: Settings, engine: Engine | None) -> Policy:
    """With the tenants' shares. Without reuse no root is worth warming or copying. The embedded engine's snapshots,
    most likely in memory, take half of what is free at the most."""
    policy = replace(policy, shares={one.name: Share(one.weight, one.max_slots) for one in settings.tenants})
    if engine is not None:
        half = shutil.disk_usage(engine.save_dir).free // 2
        policy = replace(policy, max_snapshot_bytes=min(policy.max_snapshot_bytes, half))
    return policy if settings.reuse.mode != "off" else replace(policy, fork=False, root_threshold_s=math.inf)


def _cannot_roll_back(scheduler: Scheduler) -> Callable[[str], bool]:
    """Whether an upstream was seen to lose what its slots held when only a tail had to go."""

    def asked(upstream: str) -> bool:
        server = scheduler.servers.get(upstream)
        return server is not None and server.slots.kept_share(can_fork=False) <= NO_ROLLBACK_SHARE

    return asked


def _telemetry(
    settings: Settings, metrics: Metrics, trend: Trend, dispatcher: Dispatcher, scheduler: Scheduler
) -> tuple[Telemetry, JournalRows]:
    """What watches, and what of it outlives the process: nothing unless the settings say so."""
    journal = Journal(settings.journal.keep)
    strips = Strips(settings.journal.keep, store_text=settings.journal.store_text)
    past = JournalRows(journal, strips, settings.journal.keep if settings.journal.on_disk else 0)
    model_of, cannot_roll_back = dispatcher.fleet.model_of, _cannot_roll_back(scheduler)
    return Telemetry(metrics, journal, History(), model_of, strips, trend, cannot_roll_back), past


def _keeping(
    settings: Settings, scheduler: Scheduler, dispatcher: Dispatcher, planner: Planner, past: JournalRows
) -> Keeping:
    state, verdicts = StateFile(settings.state.path), VerdictRows(partial(_judge_reuse, dispatcher))
    slots = SlotRows(scheduler, [upstream.name for upstream in settings.upstreams])
    memories = planner.stabiliser, planner.tools, planner.answers
    keeping = keeping_of(state, *memories, slots, past, verdicts=verdicts)
    if settings.journal.on_disk:
        past.journal.listen(keeping.changed)
    return keeping


def _judge_reuse(dispatcher: Dispatcher, verdicts: Verdicts) -> None:
    """What `verify` found decides, on each upstream, whether anything is reused there."""
    for keeper in dispatcher.keepers.values():
        keeper.against_reuse = verdicts.against_reuse
        keeper.reconsider()


def _hosts(settings: Settings) -> Hosts | None:
    """None where keys keep web pages out, or where other machines may call the proxy by whatever name they have."""
    alone = is_loopback(settings.server.host) and not _keys(settings)
    return Hosts(settings.server.hosts) if alone else None


def _keys(settings: Settings) -> Mapping[str, str]:
    named = {tenant.api_key: tenant.name for tenant in settings.tenants}
    return {**dict.fromkeys(settings.server.api_keys, ""), **named}
