"""Ollama: version, running models, what its counts mean in which version. Facts in docs/explanation/ollama.md.

Every running model has its own llama-server, with as many slots as OLLAMA_NUM_PARALLEL says and a queue without limit
in front of them. No slot can be named, seen or saved from outside. The number of slots is in no answer of the API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import orjson

from prefixproxy.backends import Answer, RawHeaders, Reading, Rendered
from prefixproxy.backends.http import HttpResponse
from prefixproxy.backends.ollama_counts import Counts, Version, n_ctx_of, version_of
from prefixproxy.backends.ollama_local import slots_of_children
from prefixproxy.backends.ollama_native import CHAT_PATH, COMPLETIONS_PATH, NATIVE_PATHS, Native, native_of
from prefixproxy.backends.ollama_options import LargestOptions
from prefixproxy.backends.ollama_reply import SpokenResponse
from prefixproxy.backends.slotless import SlotlessUpstream
from prefixproxy.errors import OtherKind, UpstreamFailed
from prefixproxy.prompt import Edit
from prefixproxy.types import Api, Capabilities, UpstreamFacts

DEFAULT_SLOTS = 1
"""OLLAMA_NUM_PARALLEL where it is not set, since 0.10.0 (envconfig/config.go)."""
REPORTS_CACHED_SINCE: Version = (0, 33, 3)
ONE_SLOT_FAMILIES = frozenset(
    {
        "mllama",
        "qwen3vl",
        "qwen3vlmoe",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "nemotron_h_omni",
    }
)
"""Run with one slot whatever OLLAMA_NUM_PARALLEL says (server/sched.go)."""
SAME_HANDLER_SINCE: Version = (0, 30, 0)
"""The oldest version of which it was read how `/v1` makes a native request of its own."""
MAX_TOLD = 64
SERVER_ERROR = 500
_WITHOUT_OPTIONS = frozenset({CHAT_PATH, COMPLETIONS_PATH, "/v1/responses", "/v1/messages"})
"""Paths that generate and cannot carry `options`."""
_LATEST = ":latest"
_CLOUD = (":cloud", "-cloud")
"""How models are called that Ollama forwards to its own cloud (server/cloud_proxy.go)."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningModel:
    """One entry of `/api/ps`. `n_ctx`: tokens of context for each request; `one_slot`: it runs one at a time."""

    name: str
    family: str
    n_ctx: int | None
    one_slot: bool


class Ollama(SlotlessUpstream):
    """A `Backend` over a running Ollama. `normalise`: options made the same for all clients; `find_slots` looks for
    its slot count on this machine."""

    def __init__(
        self,
        name: str,
        url: str,
        api_key: str = "",
        normalise: Collection[str] = (),
        find_slots: Callable[[], int | None] = slots_of_children,
    ) -> None:
        super().__init__(name, url, api_key)
        self._options = LargestOptions(normalise)
        self._find_slots = find_slots
        self._counts = Counts()
        self._running: Mapping[str, RunningModel] = {}
        self._slots_from = ""
        self._truncated = 0
        self._told: set[str] = set()
        self._sent_natively = self._sent_without_context = 0
        self._told_without: set[tuple[str, str]] = set()

    async def probe(self) -> UpstreamFacts:
        answer = await self.call("GET", "/api/version")
        version = answer.get("version") if isinstance(answer, dict) else None
        if not isinstance(version, str):
            raise OtherKind(f"upstream {self.name} does not answer like Ollama", retry_after_s=5)
        self._counts.version = version_of(version)
        names = await self._names()
        await self._look()
        found = await asyncio.to_thread(self._find_slots) if urlsplit(self.url).hostname in _LOOPBACK else None
        self._slots_from = "OLLAMA_NUM_PARALLEL's default" if found is None else "the running llama-server"
        return UpstreamFacts(
            name=self.name,
            kind="ollama",
            n_slots=found or DEFAULT_SLOTS,
            models=tuple(name for each in names for name in dict.fromkeys((each, each.removesuffix(_LATEST)))),
            build=version,
            capabilities=Capabilities(reports_cached=(self._counts.version or (0,)) >= REPORTS_CACHED_SINCE),
        )

    async def health(self) -> object:
        await self._look()
        return self._counts.version, await self._names()

    async def open(
        self,
        method: str,
        target: str,
        headers: RawHeaders = (),
        body: bytes | AsyncIterator[bytes] = b"",
        read_timeout_s: float | None = None,
    ) -> HttpResponse:
        """A request on `/v1` that has to carry a context goes to the path that `/v1` itself stands on, where it is
        surely the same request there."""
        native = self._native(method, target, body) if isinstance(body, bytes) else None
        if native is None:
            response = await super().open(method, target, headers, body, read_timeout_s)
            if response.status == SERVER_ERROR and isinstance(body, bytes):
                self._failed(_object_in(body))
            return response
        length = (b"content-length", str(len(native.payload)).encode())
        headers = [*(each for each in headers if each[0].lower() != b"content-length"), length]
        response = await super().open(method, native.path, headers, native.payload, read_timeout_s)
        if response.status == SERVER_ERROR:
            self._failed(native.body)
        return SpokenResponse(response, native, f"chatcmpl-{token_hex(8)}" if native.chat else f"cmpl-{token_hex(8)}")

    def _failed(self, body: Mapping[str, Any]) -> None:
        """The server failed at this request: perhaps at its context."""
        num_ctx = n_ctx_of(body)
        if num_ctx is not None:
            self._options.refused(_tagged(str(body.get("model") or "")), num_ctx)

    def _native(self, method: str, target: str, raw: bytes) -> Native | None:
        """The native request in place of one on `/v1`; None where it goes out as it is."""
        path = target.partition("?")[0]
        wanted = self._context_of(self._options, path, raw) if method == "POST" else None
        if wanted is None:
            return None
        native = self._native_with(target, raw, wanted[1])
        if native is not None:
            self._sent_natively += 1
            return native
        self._sent_without_context += 1
        model, num_ctx = wanted
        if (model, path) not in self._told_without and len(self._told_without) < MAX_TOLD:
            self._told_without.add((model, path))
            log.warning(
                "upstream %s may have to load %s anew: %s cannot carry the num_ctx of %d that others have",
                self.name,
                model,
                path,
                num_ctx,
            )
        return None

    def _context_of(self, options: LargestOptions, path: str, raw: bytes) -> tuple[str, int] | None:
        """The model and the context that a request should carry on a path that cannot; None where there is none."""
        if path not in _WITHOUT_OPTIONS or not options.any_context:
            return None
        model = _tagged(str(_object_in(raw).get("model") or ""))
        running = self._running.get(model)
        num_ctx = options.context(model, running.n_ctx if running else None)
        return None if num_ctx is None or self.forwards(model) else (model, num_ctx)

    def _native_with(self, target: str, raw: bytes, num_ctx: int) -> Native | None:
        known = target in NATIVE_PATHS and (self._counts.version or (0,)) >= SAME_HANDLER_SINCE
        return native_of(target, raw, num_ctx) if known else None

    def shown(self, api: Api, path: str, body: Mapping[str, Any], rendered: Rendered) -> tuple[str, bytes]:
        options = deepcopy(self._options)
        sent = rendered(self._edits(options, api, body))
        wanted = self._context_of(options, path, sent)
        native = self._native_with(path, sent, wanted[1]) if wanted else None
        return (native.path, native.payload) if native else (path, sent)

    def control(self, api: Api, body: Mapping[str, Any]) -> Sequence[Edit]:
        return self._edits(self._options, api, body)

    def _edits(self, options: LargestOptions, api: Api, body: Mapping[str, Any]) -> Sequence[Edit]:
        running = self._running_as(body)
        model = running.name if running else _tagged(str(body.get("model") or ""))
        return options.edits(api, body, model, running.n_ctx if running else None)

    def forwards(self, model: str) -> bool:
        return model.endswith(_CLOUD)

    def interpret(self, answer: Answer) -> Reading:
        reading = self._counts.read(answer, self._n_ctx(answer.body))
        if (num_ctx := n_ctx_of(answer.body)) is not None:
            self._options.served(_tagged(str(answer.body.get("model") or "")), num_ctx)
        if reading.truncated:
            self._truncated += 1
            log.warning(
                "upstream %s cut a prompt of %s: about %d tokens came, %s were evaluated or reused. Raise its context "
                "(OLLAMA_CONTEXT_LENGTH, or num_ctx for /api/chat and /api/generate)",
                self.name,
                answer.body.get("model"),
                answer.estimated_tokens,
                reading.usage.prompt_tokens,
            )
        return reading

    def report(self) -> Mapping[str, Any]:
        """`slots_from`: where the number of slots comes from unless `upstreams.slots` says it. `sent_natively`: how
        many requests on `/v1` went to a path of Ollama's own, to carry a context; `sent_without_context`: how many had
        to go without one."""
        return {
            "running": [asdict(model) for model in self._running.values()],
            "slots_from": self._slots_from,
            "truncated_prompts": self._truncated,
            "normalised": self._options.report(),
            "sent_natively": self._sent_natively,
            "sent_without_context": self._sent_without_context,
        }

    def _n_ctx(self, body: Mapping[str, Any]) -> int | None:
        """The context this request ran with: its own `num_ctx`, clamped to what the model was trained with, which shows
        only in what runs; else what runs."""
        running = self._running_as(body)
        known = [n for n in (n_ctx_of(body), running.n_ctx if running else None) if n is not None]
        return min(known, default=None)

    def _running_as(self, body: Mapping[str, Any]) -> RunningModel | None:
        """The model a request asks for, if it was seen running."""
        return self._running.get(_tagged(str(body.get("model") or "")))

    async def _look(self) -> None:
        """Which models run."""
        rows = await self._listed("/api/ps")
        running = [_running_model(row) for row in rows if isinstance(row.get("name"), str)]
        self._running = {model.name: model for model in running}
        for model in running:
            if model.one_slot and model.name not in self._told:
                self._told.add(model.name)
                log.warning(
                    "upstream %s runs %s (%s) one request at a time, whatever OLLAMA_NUM_PARALLEL says",
                    self.name,
                    model.name,
                    model.family,
                )
        self._told &= set(self._running)

    async def _names(self) -> tuple[str, ...]:
        """Every model it has, in its own spelling."""
        return tuple(str(row["name"]) for row in await self._listed("/api/tags") if "name" in row)

    async def _listed(self, path: str) -> list[dict[str, Any]]:
        answer = await self.call("GET", path)
        rows = answer.get("models") if isinstance(answer, dict) else None
        if not isinstance(rows, list | None) or not isinstance(answer, dict):
            raise UpstreamFailed(f"upstream {self.name} answered {path} with an unknown shape")
        return [row for row in rows or () if isinstance(row, dict)]


def _object_in(raw: bytes) -> dict[str, Any]:
    """A body as JSON; empty if it is none."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _tagged(model: str) -> str:
    """A model's whole name: without a tag, the latest is meant."""
    return model if ":" in model.rpartition("/")[2] else model + _LATEST


def _running_model(row: dict[str, Any]) -> RunningModel:
    details = row.get("details")
    family = str(details.get("family") or "") if isinstance(details, dict) else ""
    n_ctx = row.get("context_length")
    return RunningModel(
        name=row["name"],
        family=family,
        n_ctx=n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else None,
        one_slot=family in ONE_SLOT_FAMILIES,
    )
