"""A scripted Ollama, built from its documented wire format: versions that report cached tokens, and older ones.

No model: a token is four bytes of the rendered prompt, an answer is "Fine." a few times. What the real one does with
its runners is kept: one for each model, reloaded when `num_ctx` differs, as many requests at once as
OLLAMA_NUM_PARALLEL and the others waiting without limit, the idle slot with the longest common prefix, old messages
dropped from prompts that do not fit and a single long one cut to half its context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ollama_openai as openai
import orjson
from stub_upstream import Exchange, StubUpstream, event

from prefixproxy.backends.ollama_counts import version_of

CREATED = "2026-08-21T10:00:00.000000Z"
NS_PER_TOKEN = 1_000_000
LOAD_NS, LOADED_NS = 2_000_000_000, 20_000_000
NUM_KEEP = 4
EVALUATED_ONLY = (0, 30, 0)
REPORTS_CACHED = (0, 33, 3)
ONE_SLOT = frozenset({"qwen35", "lfm2"})


@dataclass(eq=False)
class Slot:
    holds: bytes = b""
    busy: bool = False


@dataclass(eq=False)
class Runner:
    """One loaded model: a child process with its slots."""

    model: str
    n_ctx: int
    slots: list[Slot]
    turns: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.turns = asyncio.Semaphore(len(self.slots))


@dataclass(frozen=True)
class Count:
    """What one request cost, in tokens and nanoseconds."""

    prompt: int
    cached: int
    load_ns: int
    beside: int
    predicted: int

    @property
    def prompt_ns(self) -> int:
        return (self.prompt - self.cached) * NS_PER_TOKEN * (1 + self.beside)


class ScriptedOllama(StubUpstream):
    """`loads`: model and context of every load of a runner, in order. `most_at_once`: requests that were inside it at
    the same time, waiting ones counted. `may_prefill`: cleared, it holds every request before its first token.
    `silent_end`: the next answer ends without its last line, as the guard against repeated tokens ends one."""

    def __init__(
        self,
        version: str = "0.33.3",
        *,
        num_parallel: int = 2,
        n_ctx: int = 4096,
        models: Mapping[str, str] | None = None,
    ) -> None:
        """`models`: the family of each by its name."""
        super().__init__()
        self.version = version
        self.num_parallel = num_parallel
        self.n_ctx = n_ctx
        self.models = dict(models or {"tiny:latest": "llama"})
        self.loads: list[tuple[str, int]] = []
        self.runners: dict[str, Runner] = {}
        self.most_at_once = 0
        self.may_prefill = asyncio.Event()
        self.may_prefill.set()
        self.silent_end = False
        self.fails_with = ""
        self.says: list[dict[str, Any]] = [{"content": "Fine."}] * 3
        """What each line of an answer says, as the message of a native one; `logprobs` beside it."""
        self.meant: list[dict[str, Any]] = []
        """The native requests that were run, whatever path they came on."""
        self.max_n_ctx = 1 << 30
        """Memory for so much context; a model is not loaded with more."""
        self.shown_n_ctx = 0
        """What `/api/ps` says of every runner; 0: the truth."""
        self._inside = 0

    async def __aexit__(self, *error: object) -> None:
        self.may_prefill.set()
        await super().__aexit__(*error)

    async def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        host = (request.header(b"host") or b"").decode().rsplit(":", 1)[0]
        if host not in ("127.0.0.1", "localhost"):
            return await exchange.whole(403, b"")
        if request.path in self.routes:
            return await self.routes[request.path](exchange)
        if request.method == "POST" and b'"id_slot"' in request.body:
            self.violations.append(request)
        generating = {
            "/api/chat": self._native,
            "/api/generate": self._native,
            "/v1/chat/completions": self._openai,
            "/v1/completions": self._openai,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
        }
        if request.path in generating:
            return await generating[request.path](exchange)
        await self._told(exchange)

    async def _told(self, exchange: Exchange) -> None:
        answers: dict[str, Callable[[], dict[str, Any]]] = {
            "/api/version": lambda: {"version": self.version},
            "/api/tags": lambda: {"models": [_listed(name, family) for name, family in self.models.items()]},
            "/api/ps": lambda: {"models": [self._shown(runner) for runner in self.runners.values()]},
            "/v1/models": lambda: {"object": "list", "data": [{"id": n, "object": "model"} for n in self.models]},
            "/api/embed": lambda: {"embeddings": [[0.0]]},
            "/v1/embeddings": lambda: {"embeddings": [[0.0]]},
        }
        if exchange.request.path == "/":
            return await exchange.whole(200, b"Ollama is running", [(b"Content-Type", b"text/plain; charset=utf-8")])
        if exchange.request.path not in answers:
            return await exchange.whole(404, b"404 page not found", [(b"Content-Type", b"text/plain")])
        await exchange.json(200, answers[exchange.request.path]())

    def _shown(self, runner: Runner) -> dict[str, Any]:
        return _listed(runner.model, self.models[runner.model]) | {"context_length": self.shown_n_ctx or runner.n_ctx}

    def _model(self, body: dict[str, Any]) -> str | None:
        asked = str(body.get("model"))
        return next((name for name in (asked, f"{asked}:latest") if name in self.models), None)

    def _runner(self, model: str, num_ctx: int | None) -> tuple[Runner, int]:
        """The model's runner, loaded anew if its context is to be another; and how long that took."""
        known = self.runners.get(model)
        n_ctx = num_ctx or self.n_ctx
        if known is not None and known.n_ctx == n_ctx:
            return known, LOADED_NS
        self.loads.append((model, n_ctx))
        one = self.models[model] in ONE_SLOT
        runner = Runner(model, n_ctx, [Slot() for _ in range(1 if one else self.num_parallel)])
        self.runners[model] = runner
        return runner, LOAD_NS

    async def _run(self, model: str, num_ctx: int | None, messages: list[bytes]) -> Count:
        """Wait for a turn, prefill."""
        runner, load_ns = self._runner(model, num_ctx)
        self._inside += 1
        self.most_at_once = max(self.most_at_once, self._inside)
        try:
            async with runner.turns:
                prompt = fitted(messages, runner.n_ctx)
                idle = [slot for slot in runner.slots if not slot.busy]
                slot = max(idle, key=lambda slot: common(slot.holds, prompt))
                cached = max(0, min(common(slot.holds, prompt) // 4, len(prompt) // 4 - 1))
                slot.busy = True
                beside = sum(slot.busy for slot in runner.slots) - 1
                try:
                    await self.may_prefill.wait()
                    slot.holds = prompt
                finally:
                    slot.busy = False
        finally:
            self._inside -= 1
        return Count(len(prompt) // 4, cached, load_ns, beside, 3)

    async def _native(self, exchange: Exchange) -> None:
        body, chat = exchange.request.json(), exchange.request.path == "/api/chat"
        model = self._model(body)
        if model is None:
            return await exchange.json(404, {"error": f"model '{body.get('model')}' not found"})
        stream = body.get("stream") is not False
        if self.fails_with and not stream:
            return await exchange.json(500, {"error": self.fails_with})
        if ((body.get("options") or {}).get("num_ctx") or 0) > self.max_n_ctx:
            return await exchange.json(500, {"error": "model requires more system memory than is available"})
        lines, _ = await self._said(model, body, chat)
        if not stream:
            return await exchange.json(200, joined(lines))
        await exchange.head(200, [(b"Content-Type", b"application/x-ndjson")])
        for each in lines[:-1]:
            await exchange.send(openai.go_json(each) + b"\n")
        if self.fails_with:
            await exchange.send(orjson.dumps({"error": self.fails_with}) + b"\n")
        elif not self._ends_silently():
            await exchange.send(openai.go_json(lines[-1]) + b"\n")
        await exchange.end()

    async def _said(self, model: str, body: dict[str, Any], chat: bool) -> tuple[list[dict[str, Any]], Count]:
        """Run a native request: its answer as the lines of a stream, the counts in the last one."""
        self.meant.append(openai.meant(body))
        messages = rendered(body["messages"]) if chat else [str(body.get("prompt")).encode()]
        count = await self._run(model, (body.get("options") or {}).get("num_ctx"), messages)
        base = {"model": body["model"], "created_at": CREATED}
        lines = []
        for said in [*self.says, {"content": ""}]:
            logprobs = {"logprobs": said["logprobs"]} if "logprobs" in said else {}
            message = {"role": "assistant", **{key: value for key, value in said.items() if key != "logprobs"}}
            words = {"message": message} if chat else {"response": said["content"]}
            lines.append({**base, **words, "done": False, **logprobs})
        context = {} if chat or body.get("raw") else {"context": list(range(count.prompt))}
        lines[-1] |= {"done": True, "done_reason": "stop"} | context | self._counts(count)
        return lines, count

    def _ends_silently(self) -> bool:
        silent, self.silent_end = self.silent_end, False
        return silent

    def _counts(self, count: Count) -> dict[str, Any]:
        """The last line; a zero is an absent key, but for the cached count, whose absence means unknown."""
        version = version_of(self.version) or (0, 0, 0)
        shown = count.prompt - count.cached if version == EVALUATED_ONLY else count.prompt
        counts = {
            "total_duration": count.load_ns + count.prompt_ns,
            "load_duration": count.load_ns,
            "prompt_eval_count": shown,
            "prompt_eval_duration": count.prompt_ns,
            "eval_count": count.predicted,
            "eval_duration": NS_PER_TOKEN,
        }
        cached = {"prompt_eval_cached_count": count.cached} if version >= REPORTS_CACHED else {}
        return {key: n for key, n in counts.items() if n} | cached

    async def _openai(self, exchange: Exchange) -> None:
        """A layer over the native handler."""
        body, chat = exchange.request.json(), exchange.request.path == "/v1/chat/completions"
        model = self._model(body)
        if model is None:
            return await self._openai_error(exchange, 404, f"model '{body.get('model')}' not found")
        native = openai.from_chat(body) if chat else openai.from_completion(body)
        if self.fails_with and not body.get("stream"):
            return await self._openai_error(exchange, 500, self.fails_with)
        lines, count = await self._said(model, native, chat)
        usage = self._usage(count, "prompt_tokens")
        if not body.get("stream"):
            payload = openai.whole(chat, joined(lines), usage)
            return await exchange.whole(200, payload, [(b"Content-Type", b"application/json")])
        await exchange.stream_head()
        include = bool((body.get("stream_options") or {}).get("include_usage"))
        called, chunk = False, dict[str, Any]()
        silent = self._ends_silently()
        for line in lines[:-1] if silent else lines:
            for chunk in openai.chunks(chat, line, called, include):
                await exchange.send(b"data: " + openai.go_json(chunk) + b"\n\n")
            called = called or bool(line.get("message", {}).get("tool_calls"))
        if not silent:
            if include:
                await exchange.send(b"data: " + openai.go_json(chunk | {"choices": [], "usage": usage}) + b"\n\n")
            await exchange.send(b"data: [DONE]\n\n")
        await exchange.end()

    async def _openai_error(self, exchange: Exchange, status: int, message: str) -> None:
        await exchange.whole(status, openai.error(status, message), [(b"Content-Type", b"application/json")])

    def _usage(self, count: Count, prompt_key: str) -> dict[str, Any]:
        name = "completion_tokens" if prompt_key == "prompt_tokens" else "output_tokens"
        total = {"total_tokens": count.prompt + count.predicted} if prompt_key == "prompt_tokens" else {}
        usage: dict[str, Any] = {prompt_key: count.prompt, name: count.predicted, **total}
        if (version_of(self.version) or (0, 0, 0)) >= REPORTS_CACHED:
            usage[f"{prompt_key}_details"] = {"cached_tokens": count.cached}
        elif prompt_key == "input_tokens":
            usage["input_tokens_details"] = {"cached_tokens": 0}
        return usage

    async def _responses(self, exchange: Exchange) -> None:
        body = exchange.request.json()
        count = await self._run(str(self._model(body)), None, [str(body["input"]).encode()])
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Fine."}]}
        usage = self._usage(count, "input_tokens")
        await exchange.json(200, {"id": "resp_7", "object": "response", "output": [said], "usage": usage})

    async def _messages(self, exchange: Exchange) -> None:
        """Before 0.33.3 `input_tokens` is the whole prompt, and the first event of a stream has a mere estimate."""
        body = exchange.request.json()
        count = await self._run(str(self._model(body)), None, rendered(body["messages"]))
        usage: dict[str, Any] = {"input_tokens": count.prompt, "output_tokens": count.predicted}
        if (version_of(self.version) or (0, 0, 0)) >= REPORTS_CACHED:
            usage |= {"input_tokens": count.prompt - count.cached, "cache_read_input_tokens": count.cached}
        if not body.get("stream"):
            content = [{"type": "text", "text": "Fine."}]
            return await exchange.json(200, {"type": "message", "content": content, "usage": usage})
        guess = {"input_tokens": 1, "output_tokens": 0}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": {"role": "assistant", "content": [], "usage": guess}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Fine."}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
            {"type": "message_stop"},
        ]
        await exchange.stream_head()
        for each in events:
            await exchange.send(b"event: " + each["type"].encode() + b"\n" + event(each))
        await exchange.end()


def _listed(name: str, family: str) -> dict[str, Any]:
    return {"name": name, "model": name, "details": {"family": family, "format": "gguf"}}


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer in one object."""
    whole = {key: value for key, value in lines[-1].items() if key not in ("message", "response")}
    if "response" in lines[-1]:
        words: dict[str, Any] = {"response": "".join(line["response"] for line in lines)}
    else:
        said = [line["message"] for line in lines]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(each["content"] for each in said)}
        if thinking := "".join(each.get("thinking", "") for each in said):
            message["thinking"] = thinking
        if calls := [call for each in said for call in each.get("tool_calls", ())]:
            message["tool_calls"] = calls
        words = {"message": message}
    logprobs = [each for line in lines for each in line.get("logprobs", ())]
    return {**whole, **words} | ({"logprobs": logprobs} if logprobs else {})


def rendered(messages: list[dict[str, Any]]) -> list[bytes]:
    """One text for each message, as a template would have it."""
    return [f"<{each['role']}>{each.get('content')}\n".encode() for each in messages]


def fitted(messages: list[bytes], n_ctx: int) -> bytes:
    """The prompt that is evaluated: without the oldest messages if they do not fit, system messages and the last one
    stay; a rest that is still too long is cut to half the context, its front and its end kept."""
    kept = list(messages)
    while len(b"".join(kept)) // 4 > n_ctx:
        oldest = next((i for i, each in enumerate(kept[:-1]) if not each.startswith(b"<system>")), None)
        if oldest is None:
            break
        del kept[oldest]
    prompt = b"".join(kept)
    if len(prompt) // 4 <= n_ctx - 1:
        return prompt
    total = n_ctx - (n_ctx - NUM_KEEP) // 2
    return prompt[: 4 * NUM_KEEP] + prompt[-4 * (total - NUM_KEEP) :]


def common(a: bytes, b: bytes) -> int:
    """Length of their common prefix."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
