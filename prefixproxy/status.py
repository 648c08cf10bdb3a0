"""The proxy's own endpoints: health, metrics, status, journal, explain, admission."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prefixproxy import __version__
from prefixproxy.admission import AdmissionControl
from prefixproxy.body import Body
from prefixproxy.compaction import price, spike, turns_of
from prefixproxy.dispatch import Dispatcher
from prefixproxy.errors import BadRequest, ProxyError, UpstreamTimedOut, UsageError
from prefixproxy.intake import read_body
from prefixproxy.journal import record_json
from prefixproxy.metrics import StatusSnapshot, UpstreamStatus
from prefixproxy.microscope import explain, tokens_before
from prefixproxy.page import load_page
from prefixproxy.plan import Plan
from prefixproxy.relay import Parts
from prefixproxy.reply import RETRY_AFTER_S
from prefixproxy.schedule.types import SchedulerSnapshot
from prefixproxy.types import API_OF_PATH, RequestRecord, SlotState
from prefixproxy.upkeep import Health, UpstreamState

DEFAULT_LIMIT, LARGEST_LIMIT = 100, 10_000
MOST_DIGITS = 10
FORMATS = ("json", "jsonl")
SCRAPE_TIMEOUT_S = 10.0
RECORD_TIMEOUT_S = 1.0
"""How long a record is waited for: it is made when the answer's last byte has left, and a quick client asks before."""
OWN_PREFIX = "/prefixproxy/"
PUBLIC = frozenset({"/metrics", "/healthz", "/readyz"})
"""Paths that need no key: what monitoring asks, and nothing that a prompt says."""

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


class Status:
    """The endpoints over the parts they show. None of them changes how a request is served, but PATCH admission."""

    def __init__(self, parts: Parts, admission: AdmissionControl, rule_advice: Mapping[str, str]) -> None:
        """`rule_advice`: what a client could do itself, by the name of the rule that does it."""
        self._parts = parts
        self._admission = admission
        self._rule_advice = rule_advice

    def routes(self) -> list[Route]:
        own = [
            ("/prefixproxy/status", self.status, ["GET"]),
            ("/prefixproxy/requests", self.requests, ["GET"]),
            ("/prefixproxy/requests/{id}", self.request, ["GET"]),
            ("/prefixproxy/explain", self.explain, ["POST"]),
            ("/prefixproxy/trend", self.trend, ["GET"]),
            ("/prefixproxy/admission", self.admission, ["GET", "PATCH"]),
            ("/prefixproxy/upstreams/{name}/metrics", self.upstream_metrics, ["GET"]),
            ("/prefixproxy/admission/schema", self.admission_schema, ["GET"]),
        ]
        open_to_all = [
            (OWN_PREFIX, self.page, ["GET"]),
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
                return _error(request, failure)
            except RecursionError:
                return _error(request, BadRequest("nested deeper than this proxy reads", code="invalid_json"))
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                return _error(request, ProxyError("the proxy failed on this request; its log says why"))

        return guarded

    async def no_route(self, request: Request, failure: Exception) -> Response:
        """A path under ours that leads nowhere, or a method it does not have."""
        headers = failure.headers if isinstance(failure, HTTPException) and failure.headers else {}
        if allowed := headers.get("Allow"):
            methods = ", ".join(sorted(allowed.split(", ")))
            error = BadRequest(f"{request.url.path} takes {methods}", code="method_not_allowed", status=405)
        else:
            error = BadRequest(f"{request.url.path} is no page of this proxy", code="not_found", status=404)
        return Response(error.body(""), error.status, {**headers, "content-type": "application/json"})

    async def page(self, request: Request) -> Response:
        """Open to all, as it holds nothing: it asks for a key itself, and shows what the endpoints answer to that."""
        page = load_page()
        if request.headers.get("if-none-match") == page.headers["etag"]:
            return Response(b"", 304, page.headers)
        return Response(page.body, headers=page.headers)

    async def healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    async def readyz(self, request: Request) -> Response:
        keepers = self._parts.dispatcher.keepers
        states = {name: keeper.state.health.value for name, keeper in keepers.items()}
        reasons = {name: keeper.state.failure for name, keeper in keepers.items() if keeper.state.failure}
        ready = Health.UP.value in states.values()
        body = {"status": "ready" if ready else "not ready", "upstreams": states, "reasons": reasons}
        return JSONResponse(body, 200) if ready else JSONResponse(body, 503, {"retry-after": str(RETRY_AFTER_S)})

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._parts.telemetry.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def upstream_metrics(self, request: Request) -> Response:
        """The upstream's own /metrics, whose place on this port the proxy's have taken."""
        keeper = self._parts.dispatcher.keepers.get(request.path_params["name"])
        if keeper is None:
            raise BadRequest("no upstream has this name", code="not_found", status=404)
        headers = [(b"accept", request.headers.get("accept", "*/*").encode("latin-1"))]
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                response = await keeper.state.backend.open("GET", "/metrics", headers, b"")
                try:
                    body = b"".join([chunk async for chunk in response.chunks()])
                finally:
                    await response.close()
        except TimeoutError:
            raise UpstreamTimedOut("the upstream did not tell its metrics in time") from None
        kept = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        return Response(body, response.status, {"content-type": kept.get("content-type", "text/plain")})

    async def status(self, request: Request) -> Response:
        snapshot = self._parts.dispatcher.snapshot()
        upstreams = [_upstream(k.state, snapshot) for k in self._parts.dispatcher.keepers.values()]
        return _json(
            {
                "version": __version__,
                "time": self._parts.unix_time(),
                "upstreams": upstreams,
                "queue": {
                    "depth": dict(snapshot.queue_depth),
                    "waiting": [asdict(waiting) for waiting in snapshot.waiting],
                    "rejected": dict(snapshot.rejected),
                },
                "running": snapshot.running,
                "roots": [asdict(root) for root in snapshot.roots],
                "families": self._parts.telemetry.families(),
                "suggestions": self._suggestions(),
            }
        )

    def _suggestions(self) -> list[dict[str, Any]]:
        """Rules to paste, the one that was needed last first."""
        now, found = self._parts.clock(), self._parts.planner.stabiliser.suggestions()
        shown = [{**asdict(one), "seconds_ago": max(0.0, now - one.last_seen)} for one in found]
        for one in shown:
            del one["last_seen"]
        return sorted(shown, key=lambda one: float(one["seconds_ago"]))

    async def trend(self, request: Request) -> Response:
        """The last hour in steps; `?since=` leaves out those before that time."""
        return _json(
            self._parts.telemetry.trend.shown(_since(request.query_params.get("since")), self._parts.unix_time())
        )

    async def requests(self, request: Request) -> Response:
        journal = self._parts.telemetry.journal
        form = request.query_params.get("format", "json")
        if form not in FORMATS:
            raise BadRequest(f"format: one of {', '.join(FORMATS)}")
        if form == "jsonl":
            asked = request.query_params.get("limit")
            newest = len(journal) if asked is None else _limit(asked)
            lines = journal.jsonl(self._parts.telemetry.strips.body, newest)
            return Response(b"".join(lines), headers={"content-type": "application/x-ndjson"})
        limit = _limit(request.query_params.get("limit"))
        return _json({"requests": [record_json(record) for record in journal.newest(limit)], "last": journal.last})

    async def request(self, request: Request) -> Response:
        telemetry, planner = self._parts.telemetry, self._parts.planner
        record = await self._record(request.path_params["id"])
        explained = explain(
            record,
            telemetry.strips,
            telemetry.metrics.seconds_per_token(record.model),
            self._rule_advice,
            observing=planner.mode == "observe",
        )
        turns = turns_of(record, telemetry.journal.get)
        explained |= {"re_evaluated_tokens": spike(turns), "compaction": self._compaction(turns)}
        return _json({**record_json(record), "explain": explained})

    async def _record(self, request_id: str) -> RequestRecord:
        """The record of a request that is over, or about to be."""
        telemetry, news = self._parts.telemetry, asyncio.Event()
        stop = telemetry.journal.listen(news.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECORD_TIMEOUT_S):
                    while telemetry.is_open(request_id):
                        news.clear()
                        await news.wait()
        finally:
            stop()
        record = telemetry.journal.get(request_id)
        if record is not None:
            return record
        if telemetry.is_open(request_id):
            raise BadRequest("this request still runs: its record is made at its end", code="not_found", status=404)
        raise BadRequest("no such request in the journal (it keeps the newest)", code="not_found", status=404)

    def _compaction(self, turns: Sequence[RequestRecord]) -> dict[str, Any] | None:
        """What going on costs, and what compacting now; None for what is no long conversation."""
        record = turns[0]
        strip = self._parts.telemetry.strips.strip(record.id)
        keeper = self._parts.dispatcher.keepers.get(record.upstream)
        if strip is None or record.prompt_tokens is None or keeper is None:
            return None
        root_tokens = tokens_before(strip.head_bytes, strip.n_bytes, record.prompt_tokens)
        n_ctx_slot = keeper.state.facts.n_ctx_slot if keeper.state.facts else None
        return price(turns, root_tokens, n_ctx_slot, keeper.limits.min_generation)

    async def explain(self, request: Request) -> Response:
        """What would be sent upstream for a body, and why; nothing is sent, nothing is remembered."""
        raw = await read_body(request.scope, request.receive, self._parts.max_body_bytes)
        asked = Body.parse(raw)
        path = asked.data.get("path", "/v1/chat/completions")
        if not isinstance(path, str) or path not in API_OF_PATH:
            raise BadRequest(f"path: one of {', '.join(sorted(API_OF_PATH))}")
        if not isinstance(asked.data.get("body"), dict):
            raise BadRequest("body: the request body to explain, as a JSON object")
        parsed = Body.parse(asked.member("body"))
        for _ in self._parts.planner.read_ahead(API_OF_PATH[path], parsed):
            await asyncio.sleep(0)
        plan = self._parts.planner.explain(API_OF_PATH[path], parsed, self._parts.clock())
        sent, told = plan.rendered(), {**explanation(plan, self._parts.dispatcher), "path": path}
        found = self._parts.dispatcher.fleet.serving(str(plan.body.data.get("model") or ""), path)
        if found:
            backend = min(found, key=lambda each: each[1].rank)[0]
            told["path"], sent = backend.shown(API_OF_PATH[path], path, parsed.data, plan.rendered)
        # in the bytes that would be sent: read and written again, numbers would come out in another spelling
        return _answer(b'{"body":' + sent + b"," + _json_bytes(told).removeprefix(b"{"))

    async def admission(self, request: Request) -> Response:
        if request.method == "PATCH":
            raw = await read_body(request.scope, request.receive, self._parts.max_body_bytes)
            try:
                self._admission.change(Body.parse(raw).data, by=self._who(request))
            except UsageError as failure:
                raise BadRequest(str(failure), code="invalid_setting") from failure
        return _json(self._admission.shown())

    def _who(self, request: Request) -> str:
        """The client's address, and its tenant where there are any."""
        tenant = self._parts.gate.tenant(request.scope)
        return (request.client.host if request.client else "a socket") + (f" ({tenant})" if tenant else "")

    async def admission_schema(self, request: Request) -> Response:
        """What each admission setting means and which values it takes, as JSON Schema."""
        return _json(self._admission.schema())


def explanation(plan: Plan, dispatcher: Dispatcher) -> dict[str, Any]:
    """A plan as JSON, all but the body to send: what was moved, where the prompt's parts stand."""
    segments = plan.canonical.segments if plan.canonical else ()
    return {
        "changed": bool(plan.edits),
        "relocations": [asdict(relocation) for relocation in plan.relocations],
        "family": plan.family,
        "understood": plan.prompt is not None,
        "prompt_bytes": plan.chain.n_bytes,
        "prompt_tokens_estimate": dispatcher.estimate_tokens(plan.chain),
        "segments": [{"segment": label, "start": start, "end": end} for label, start, end in segments],
    }


def status_snapshot(dispatcher: Dispatcher, *, reuse: bool) -> StatusSnapshot:
    """What the gauges show."""
    snapshot = dispatcher.snapshot()
    upstreams = tuple(_gauges_of(keeper.state, snapshot, reuse) for keeper in dispatcher.keepers.values())
    return StatusSnapshot(queue_depth=snapshot.queue_depth, upstreams=upstreams)


def _gauges_of(state: UpstreamState, snapshot: SchedulerSnapshot, reuse: bool) -> UpstreamStatus:
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
        reuse_enabled=reuse and not (facts is not None and facts.reuse_off),
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
        "warning": state.warning,
        "reuse_off": facts.reuse_off if facts else "",
        "kind": facts.kind if facts else None,
        "build": facts.build if facts else None,
        "model": facts.model if facts else None,
        "models": list(facts.models) if facts else [],
        "n_ctx_slot": facts.n_ctx_slot if facts else None,
        "capabilities": asdict(facts.capabilities) if facts else {},
        "reported": dict(state.backend.report()),
        "scheduler": views.get(state.backend.name, {}),
        "slots": [{**asdict(slot), "id": slot.id.slot} for slot in slots],
    }


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_LIMIT
    if not (given.isascii() and given.isdigit() and len(given) < MOST_DIGITS) or not 1 <= int(given) <= LARGEST_LIMIT:
        raise BadRequest(f"limit: a whole number from 1 to {LARGEST_LIMIT}")
    return int(given)


def _since(given: str | None) -> float:
    try:
        since = float(given or 0.0)
    except ValueError:
        since = math.nan
    if not math.isfinite(since):
        raise BadRequest("since: Unix seconds")
    return since


def _json(value: Mapping[str, Any]) -> Response:
    return _answer(_json_bytes(value))


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:  # a client's text with a lone surrogate
        return json.dumps(value, separators=(",", ":")).encode()


def _answer(body: bytes) -> Response:
    return Response(body, headers={"content-type": "application/json"})


def _error(request: Request, failure: ProxyError) -> Response:
    headers = {name.decode(): value.decode() for name, value in failure.headers()}
    return Response(failure.body(request.url.path), failure.status, headers)
