"""The proxy's own endpoints: health, metrics, status, journal, explain, admission."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prefixproxy import __version__
from prefixproxy.admission import AdmissionControl
from prefixproxy.body import Body
from prefixproxy.dispatch import Dispatcher
from prefixproxy.errors import BadRequest, ProxyError, UsageError
from prefixproxy.intake import read_body
from prefixproxy.journal import record_json
from prefixproxy.metrics import StatusSnapshot, UpstreamStatus
from prefixproxy.plan import Plan
from prefixproxy.relay import Parts
from prefixproxy.schedule_types import SchedulerSnapshot
from prefixproxy.types import API_OF_PATH, SlotState
from prefixproxy.upkeep import Health, UpstreamState

DEFAULT_LIMIT, LARGEST_LIMIT = 100, 10_000
OWN_PREFIX = "/prefixproxy/"
PUBLIC = frozenset({"/metrics", "/healthz", "/readyz"})
"""Paths that need no key: what monitoring asks, and nothing that a prompt says."""

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


class Status:
    """The endpoints over the parts they show. None of them changes how a request is served, but PATCH admission."""

    def __init__(self, parts: Parts, admission: AdmissionControl) -> None:
        self._parts = parts
        self._admission = admission

    def routes(self) -> list[Route]:
        own = [
            ("/prefixproxy/status", self.status, ["GET"]),
            ("/prefixproxy/requests", self.requests, ["GET"]),
            ("/prefixproxy/requests/{id}", self.request, ["GET"]),
            ("/prefixproxy/explain", self.explain, ["POST"]),
            ("/prefixproxy/admission", self.admission, ["GET", "PATCH"]),
        ]
        open_to_all = [
            ("/metrics", self.metrics, ["GET"]),
            ("/healthz", self.healthz, ["GET"]),
            ("/readyz", self.readyz, ["GET"]),
        ]
        return [
            *(Route(path, self._guarded(endpoint), methods=methods) for path, endpoint, methods in own),
            *(Route(path, endpoint, methods=methods) for path, endpoint, methods in open_to_all),
        ]

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """Our errors in our shape, and the same key as for requests."""

        async def guarded(request: Request) -> Response:
            try:
                self._parts.gate.tenant(request.scope)
                return await endpoint(request)
            except ProxyError as failure:
                headers = {name.decode(): value.decode() for name, value in failure.headers()}
                return Response(failure.body(request.url.path), failure.status, headers)

        return guarded

    async def healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def readyz(self, request: Request) -> Response:
        states = {name: keeper.state.health.value for name, keeper in self._parts.dispatcher.keepers.items()}
        ready = Health.UP.value in states.values()
        return JSONResponse({"status": "ready" if ready else "not ready", "upstreams": states}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._parts.telemetry.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def status(self, request: Request) -> Response:
        snapshot = self._parts.dispatcher.snapshot()
        upstreams = [_upstream(k.state, snapshot) for k in self._parts.dispatcher.keepers.values()]
        return _json(
            {
                "version": __version__,
                "upstreams": upstreams,
                "queue": {
                    "depth": dict(snapshot.queue_depth),
                    "waiting": [asdict(waiting) for waiting in snapshot.waiting],
                    "rejected": dict(snapshot.rejected),
                },
                "running": snapshot.running,
                "roots": [asdict(root) for root in snapshot.roots],
                "families": self._parts.telemetry.families(),
            }
        )

    async def requests(self, request: Request) -> Response:
        journal = self._parts.telemetry.journal
        if request.query_params.get("format") == "jsonl":
            return Response(b"".join(journal.jsonl()), headers={"content-type": "application/x-ndjson"})
        limit = _limit(request.query_params.get("limit"))
        return _json({"requests": [record_json(record) for record in journal.newest(limit)]})

    async def request(self, request: Request) -> Response:
        record = self._parts.telemetry.journal.get(request.path_params["id"])
        if record is None:
            raise BadRequest("no such request in the journal (it keeps the newest)", code="not_found", status=404)
        return _json(record_json(record))

    async def explain(self, request: Request) -> Response:
        """What would be sent upstream for a body, and why; nothing is sent, nothing is remembered."""
        raw = await read_body(request.scope, request.receive, self._parts.max_body_bytes)
        asked = Body.parse(raw).data
        path, body = asked.get("path", "/v1/chat/completions"), asked.get("body")
        if path not in API_OF_PATH:
            raise BadRequest(f"path: one of {', '.join(sorted(API_OF_PATH))}")
        if not isinstance(body, dict):
            raise BadRequest("body: the request body to explain, as a JSON object")
        parsed = Body.parse(orjson.dumps(body))
        plan = self._parts.planner.explain(API_OF_PATH[path], parsed, self._parts.clock())
        return _json(explanation(plan, self._parts.dispatcher))

    async def admission(self, request: Request) -> Response:
        if request.method == "PATCH":
            raw = await read_body(request.scope, request.receive, self._parts.max_body_bytes)
            try:
                self._admission.change(Body.parse(raw).data)
            except UsageError as failure:
                raise BadRequest(str(failure), code="invalid_setting") from failure
        return _json(self._admission.shown())


def explanation(plan: Plan, dispatcher: Dispatcher) -> dict[str, Any]:
    """A plan as JSON: the body to send, what was moved, where the prompt's parts stand."""
    segments = plan.canonical.segments if plan.canonical else ()
    return {
        "body": orjson.loads(plan.rendered()),
        "changed": bool(plan.edits),
        "relocations": [asdict(relocation) for relocation in plan.relocations],
        "family": plan.family,
        "understood": plan.prompt is not None,
        "prompt_bytes": plan.chain.n_bytes,
        "prompt_tokens_estimate": dispatcher.estimate_tokens(plan.chain),
        "segments": [{"segment": label, "start": start, "end": end} for label, start, end in segments],
    }


def status_snapshot(dispatcher: Dispatcher) -> StatusSnapshot:
    """What the gauges show."""
    snapshot = dispatcher.snapshot()
    upstreams = tuple(_gauges_of(keeper.state, snapshot) for keeper in dispatcher.keepers.values())
    return StatusSnapshot(queue_depth=snapshot.queue_depth, upstreams=upstreams)


def _gauges_of(state: UpstreamState, snapshot: SchedulerSnapshot) -> UpstreamStatus:
    slots = [slot for slot in snapshot.slots if slot.id.upstream == state.backend.name]
    facts = state.facts
    return UpstreamStatus(
        name=state.backend.name,
        kind=facts.kind if facts else "unknown",
        up=state.health is Health.UP,
        build=facts.build if facts else "",
        model=facts.model if facts else "",
        n_slots=len(slots),
        n_ctx_slot=facts.n_ctx_slot if facts else None,
        slots={each: sum(slot.state is each for slot in slots) for each in SlotState},
        slot_tokens={slot.id.slot: slot.tokens for slot in slots},
    )


def _upstream(state: UpstreamState, snapshot: SchedulerSnapshot) -> dict[str, Any]:
    facts = state.facts
    views = {view.name: asdict(view) for view in snapshot.upstreams}
    slots = [slot for slot in snapshot.slots if slot.id.upstream == state.backend.name]
    return {
        "name": state.backend.name,
        "url": state.backend.url,
        "up": state.health is Health.UP,
        "health": state.health.value,
        "failure": state.failure,
        "kind": facts.kind if facts else None,
        "build": facts.build if facts else None,
        "model": facts.model if facts else None,
        "models": list(facts.models) if facts else [],
        "n_ctx_slot": facts.n_ctx_slot if facts else None,
        "capabilities": asdict(facts.capabilities) if facts else {},
        "scheduler": views.get(state.backend.name, {}),
        "slots": [{**asdict(slot), "id": slot.id.slot} for slot in slots],
    }


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_LIMIT
    if not given.isdigit() or not 1 <= int(given) <= LARGEST_LIMIT:
        raise BadRequest(f"limit: a whole number from 1 to {LARGEST_LIMIT}")
    return int(given)


def _json(value: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), headers={"content-type": "application/json"})
