"""llama-server: probe, slots, warm, save and restore. Facts in docs/explanation/llama-server.md.

Every request of ours names a slot 0 .. total_slots-1 (an id out of range wraps silently, server-context.cpp) and is
sent only when the scheduler knows that slot idle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote

import orjson

from prefixproxy.backends import NO_TASK, NOT_YET, CopyResult, SlotReading, WarmCost
from prefixproxy.backends.http import HttpUpstream
from prefixproxy.backends.llamacpp_idle import Idle, idle_slots, shows_clearing
from prefixproxy.backends.llamacpp_memory import never_used, rolls_back
from prefixproxy.backends.llamacpp_model import architecture_of
from prefixproxy.backends.llamacpp_template import template_facts
from prefixproxy.errors import OtherKind, ProxyError, UpstreamFailed
from prefixproxy.types import DEFAULT_RAM_MIB, Api, Capabilities, SlotId, TemplateFacts, UpstreamFacts, Usage
from prefixproxy.usage import usage_from

_REFUSED_NAME = "no/such.bin"
_NOT_SUPPORTED = 501
_SAYS_OF_ITSELF = ("total_slots", "model_alias", "model_path", "build_info", "endpoint_slots")
_TRIAL_S = 10.0
"""How long finding out about the memory may keep requests waiting: some 60 tokens, on however slow a machine."""
_ANY_TOKEN = 0
"""Every vocabulary has it."""
_COUNTING = {
    Api.CHAT: "/v1/chat/completions/input_tokens",
    Api.RESPONSES: "/v1/responses/input_tokens",
    Api.MESSAGES: "/v1/messages/count_tokens",
}

LOADING_BYTES = 1024
"""More than its answer while it loads its model has."""

log = logging.getLogger(__name__)


def says_loading(body: bytes) -> bool:
    """Whether the body of a 503 is what every route answers while the model loads (server-http.cpp). Other 503s, of a
    gateway before the server too, say nothing about its state."""
    try:
        error = orjson.loads(body)["error"]
        return bool(error["type"] == "unavailable_error" and "loading model" in error["message"].lower())
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return False


class CommandLine(Protocol):
    """What the flags of a server say that it tells nobody."""

    @property
    def kv_types(self) -> tuple[str, str]: ...

    @property
    def cache_prompt(self) -> bool | None: ...

    @property
    def ram_mib(self) -> int: ...

    @property
    def clears_idle(self) -> bool: ...


class LlamaServer(HttpUpstream):
    """A `Backend` over a running llama-server. `build` tells what it was built from where its own answer does not: a
    build from source says "b0-unknown". `shared`: whether anybody else may know its address. `tries`: whether a probe
    may find out about the memory of a server that nobody has used, which costs it up to 120 tokens. `flags` is
    asked for its command line, in a thread, at each probe."""

    def __init__(
        self,
        name: str,
        url: str,
        api_key: str = "",
        build: Callable[[], str] | None = None,
        *,
        shared: bool = True,
        tries: bool = True,
        flags: Callable[[], CommandLine | None] = lambda: None,
    ) -> None:
        super().__init__(name, url, api_key)
        self._shared = shared
        self._tries = tries
        self._build = build
        self._flags = flags
        self._rolls_back: dict[str, bool | None] = {}
        self._idle = Idle()
        self._architecture = ("", "")
        self._templates: dict[str, TemplateFacts] = {}

    async def probe(self) -> UpstreamFacts:
        props = await self.call("GET", "/props")
        if not isinstance(props, dict) or "total_slots" not in props:
            raise OtherKind(f"upstream {self.name} does not answer like llama-server", retry_after_s=5)
        observe = bool(props.get("endpoint_slots", True)) and await self._lists_slots()
        snapshot = observe and await self._saves_slots()
        modalities = props.get("modalities") or {}
        flags = await asyncio.to_thread(self._flags)
        tried: dict[int, Usage] = {}
        if observe and self._tries:
            await self._try_out(props, tried, tries_idle=flags is None)
        return UpstreamFacts(
            name=self.name,
            kind="llama-server",
            n_slots=int(props["total_slots"]),
            n_ctx_slot=(props.get("default_generation_settings") or {}).get("n_ctx"),
            model=str(props.get("model_alias") or props.get("model_path") or ""),
            models=await self._models(),
            build=self._build() if self._build else str(props.get("build_info") or ""),
            capabilities=Capabilities(
                pin=observe,
                observe=observe,
                snapshot=snapshot,
                warm=observe,
                reports_cached=True,
                tokenize=True,
                template=True,
                native=True,
                rolls_back=self._rolls_back.get(_model_in(props)) if observe and self._tries else None,
                host_cache=flags.ram_mib != 0 if flags is not None else self._idle.host_cache,
                clears_idle=flags.clears_idle if flags is not None else self._idle.clears,
            ),
            multimodal=any(modalities.values()) if isinstance(modalities, dict) else False,
            shared=self._shared,
            architecture=await self._architecture_at(str(props.get("model_path") or "")),
            template=await self._facts_of(_template_in(props)),
            ram_mib=flags.ram_mib if flags is not None else 0 if self._idle.host_cache is False else DEFAULT_RAM_MIB,
            kv_types=flags.kv_types if flags is not None else None,
            reuses_unasked=self._idle.reuses_unasked if flags is None else flags.cache_prompt is not False,
            tried=tried,
        )

    async def _facts_of(self, template: str) -> TemplateFacts:
        """Asked once for each template that answers; that of the last probe is kept."""
        if template not in self._templates:
            try:
                self._templates = {template: await template_facts(self._rendered, template)}
            except ProxyError as failure:
                log.info("upstream %s: its chat template could not be asked: %r", self.name, failure)
                return TemplateFacts()
        return self._templates[template]

    async def _rendered(self, body: Mapping[str, Any]) -> str:
        answer = await self.call("POST", "/apply-template", body)
        if not isinstance(prompt := self._part(answer, "prompt", "/apply-template"), str):
            raise UpstreamFailed(f"upstream {self.name} answered /apply-template with a prompt that is no text")
        return prompt

    async def _architecture_at(self, model_path: str) -> str:
        """Read once for each file."""
        if self._architecture[0] != model_path:
            self._architecture = model_path, await asyncio.to_thread(architecture_of, model_path)
        return self._architecture[1]

    async def _try_out(self, props: Mapping[str, Any], tried: dict[int, Usage], *, tries_idle: bool) -> None:
        """Whether memory can be cut back, and what becomes of idle slots, tried out on a server that nobody has used
        and that is awake; later probes of the same model get the same answers. What is tried is sent without a slot, so
        it waits for one that is free and overwrites nothing, whoever else may come in that moment; what that costs is
        added to `tried`."""
        model, evaluate = _model_in(props), partial(self._try, tried)
        if model not in self._rolls_back:
            self._rolls_back, self._idle = {model: None}, Idle()
        if props.get("is_sleeping"):
            return
        look = partial(self.call, "GET", "/slots")
        try:
            async with asyncio.timeout(_TRIAL_S):
                slots = await look()
                if not never_used(slots):
                    shown = shows_clearing(slots)
                    self._idle.clears = self._idle.clears if shown is None else shown
                    return
                if self._rolls_back[model] is None:
                    self._rolls_back[model] = await rolls_back(evaluate)
                self._idle = Idle()
                if tries_idle:
                    unasked = partial(self._try, tried, asks=False)
                    await idle_slots(self._idle, evaluate, unasked, look, tried, len(slots))
                    if self._rolls_back[model] is None and not self._idle.host_cache:
                        self._idle.host_cache = None  # of a sliding window so short a prompt is not reused either way
        except (ProxyError, TimeoutError, AttributeError, KeyError, TypeError) as failure:
            log.info("upstream %s: what becomes of its slots could not be tried: %r", self.name, failure)

    async def _try(
        self, tried: dict[int, Usage], tokens: Sequence[int], *, asks: bool = True
    ) -> tuple[int, int | None]:
        body = {"prompt": list(tokens), "n_predict": 0, **({"cache_prompt": True} if asks else {})}
        answer = await self.call("POST", "/completion", body, timeout_s=None)
        slot, usage = int(answer["id_slot"]), usage_from(Api.COMPLETION, [answer])
        tried[slot] = _sum(tried.get(slot), usage)
        return slot, usage.cached_tokens

    async def health(self) -> object:
        """/props is refused while it loads, like /health, and wakes it as little (server-context.cpp)."""
        props = await self.call("GET", "/props")
        if not isinstance(props, dict) or "total_slots" not in props:
            raise UpstreamFailed(f"upstream {self.name} does not answer like llama-server any more")
        n_ctx = (props.get("default_generation_settings") or {}).get("n_ctx")
        return (n_ctx, *(props.get(name) for name in _SAYS_OF_ITSELF))

    async def slots(self) -> Mapping[int, SlotReading]:
        listed = await self.call("GET", "/slots")
        try:
            return {s["id"]: _reading(s) for s in listed}
        except (KeyError, TypeError) as failure:
            raise UpstreamFailed(f"upstream {self.name} answered /slots with an unknown shape") from failure

    async def tokens(self, path: str, body: Mapping[str, Any]) -> list[int]:
        """Chat bodies are rendered by the server's own template first; it tokenizes just that text
        (server-context.cpp: add_special and parse_special on)."""
        asked = {"content": await self._rendered(body), "add_special": True, "parse_special": True}
        answer = await self.call("POST", "/tokenize", asked)
        return list(self._part(answer, "tokens", "/tokenize"))

    async def count_tokens(self, api: Api, body: Mapping[str, Any], sent: bytes) -> int | None:
        """The server's counting endpoints render and tokenize as the real ones do; older servers have none, there a
        chat is rendered and tokenized in two steps. Raw prompts are tokenized as they are."""
        if api in _COUNTING:
            try:
                counted = await self.call("POST", _COUNTING[api], orjson.Fragment(sent))
                return int(self._part(counted, "input_tokens", _COUNTING[api]))
            except UpstreamFailed:
                return len(await self.tokens("", orjson.loads(sent))) if api is Api.CHAT else None
        prompt = body.get("prompt")
        if api in (Api.COMPLETION, Api.COMPLETIONS) and isinstance(prompt, str):
            asked = {"content": prompt, "add_special": True, "parse_special": True}
            return len(self._part(await self.call("POST", "/tokenize", asked), "tokens", "/tokenize"))
        return None

    async def warm(self, slot: SlotId, tokens: Sequence[int]) -> WarmCost:
        """`n_predict: 0` samples one token and drops it: the slot then holds exactly `tokens`
        (server-context.cpp, handle_last_sampled_token). How long that may take is the caller's to say: leaving the
        connection stops it."""
        body = {
            "prompt": list(tokens),
            "id_slot": slot.slot,
            "n_predict": 0,
            "cache_prompt": True,
            "response_fields": ["timings", "id_slot", "tokens_cached"],
        }
        answer = await self.call("POST", "/completion", body, timeout_s=None)
        held = answer.get("tokens_cached")
        if held != len(tokens):
            raise UpstreamFailed(f"upstream {self.name}: slot {slot.slot} holds {held} tokens, not {len(tokens)}")
        return WarmCost(len(tokens), usage_from(Api.COMPLETION, [answer]))

    async def decode_one(self, slot: SlotId | None) -> Usage:
        where = {} if slot is None else {"id_slot": slot.slot}
        body = {"prompt": [_ANY_TOKEN], "n_predict": 0, "cache_prompt": False, "response_fields": ["timings"]}
        return usage_from(Api.COMPLETION, [await self.call("POST", "/completion", body | where)])

    async def save(self, slot: SlotId, file: str) -> CopyResult:
        answer = await self._slot_action(slot, "save", file)
        return self._copied(answer, "n_saved", "n_written", "save_ms")

    async def restore(self, slot: SlotId, file: str) -> CopyResult:
        answer = await self._slot_action(slot, "restore", file)
        return self._copied(answer, "n_restored", "n_read", "restore_ms")

    async def _slot_action(self, slot: SlotId, action: str, file: str) -> Any:
        return await self.call("POST", f"/slots/{slot.slot}?action={quote(action)}", {"filename": file})

    def _copied(self, answer: Any, tokens: str, size: str, took: str) -> CopyResult:
        n_tokens, n_bytes, timings = (self._part(answer, name, "a slot action") for name in (tokens, size, "timings"))
        return CopyResult(n_tokens, n_bytes, self._part(timings, took, "a slot action") / 1e3)

    def _part(self, answer: Any, name: str, asked: str) -> Any:
        if not isinstance(answer, dict) or name not in answer:
            raise UpstreamFailed(f"upstream {self.name} answered {asked} without {name!r}")
        return answer[name]

    async def _lists_slots(self) -> bool:
        return await self.status_of("GET", "/slots") == 200

    async def _saves_slots(self) -> bool:
        """Without --slot-save-path the server says 501; with it, it refuses a file name with a slash (400). Either
        way no slot is touched."""
        status = await self.status_of("POST", "/slots/0?action=save", {"filename": _REFUSED_NAME})
        return status != _NOT_SUPPORTED

    async def _models(self) -> tuple[str, ...]:
        listed = await self.call("GET", "/v1/models")
        rows = listed.get("data") if isinstance(listed, dict) else None
        named = [row for row in rows or () if isinstance(row, dict) and "id" in row]
        names = [name for row in named for name in (row["id"], *(row.get("aliases") or ()))]
        return tuple(dict.fromkeys(str(name) for name in names if name))


def _template_in(props: Mapping[str, Any]) -> str:
    """The source of its chat template, and of the one for tools where that is another."""
    sources = (props.get("chat_template"), props.get("chat_template_tool_use"))
    return "\n".join(source for source in sources if isinstance(source, str))


def _model_in(props: Mapping[str, Any]) -> str:
    """What decides about its memory."""
    return f"{props.get('model_path')} {props.get('build_info')}"


def _reading(slot: Mapping[str, Any]) -> SlotReading:
    """The number of its newest task stays when that has ended, and is not there before the first one
    (server-context.cpp server_slot::to_json)."""
    busy, n_tokens = bool(slot["is_processing"]), slot.get("n_prompt_tokens")
    task = slot.get("id_task", None if busy or n_tokens is not None else NO_TASK)
    return SlotReading(busy, n_tokens, task, *((_reused(slot), _sampled(slot)) if busy else ()))


def _reused(slot: Mapping[str, Any]) -> int | None:
    """Both counts are 0 until the prompt has been looked at, and again once the answer is over
    (server-context.cpp, server_slot::to_json)."""
    reused, evaluated = slot.get("n_prompt_tokens_cache"), slot.get("n_prompt_tokens_processed")
    if not isinstance(reused, int) or not isinstance(evaluated, int):
        return None
    return reused if reused or evaluated else NOT_YET


def _sampled(slot: Mapping[str, Any]) -> int | None:
    match slot.get("next_token"):
        case [{"n_decoded": int(sampled)}, *_]:
            return sampled
    return None


def _sum(before: Usage | None, more: Usage) -> Usage:
    if before is None:
        return more
    cached = (before.cached_tokens or 0) + (more.cached_tokens or 0)
    return replace(
        more, cached_tokens=cached, evaluated_tokens=(before.evaluated_tokens or 0) + (more.evaluated_tokens or 0)
    )
