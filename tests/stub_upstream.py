"""A scripted stand-in for llama-server: the HTTP surface a proxy needs, faults on command, a record of every request.

No model: a token is four bytes of the body, every answer is `max_tokens` times "Fine." unless a script says otherwise.
A script is a coroutine function that writes one answer byte by byte and may wait for whatever event the test holds. As
in the real server, the connection is closed behind every streamed answer, and one request at a time runs in a slot; a
pin to a busy slot is written down in `violations`.

    async with StubUpstream() as stub: ...      # in the test's own event loop
    python tests/stub_upstream.py               # alone; prints its URL
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import orjson

GENERATING = frozenset(
    f"{prefix}{path}"
    for path in ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings")
    for prefix in ("", "/v1")
) | {"/completion", "/infill", "/api/chat", "/api/generate"}
NOT_FOUND = {"error": {"code": 404, "message": "File Not Found", "type": "not_found_error"}}
WRONG_KEY = {"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}
LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}

Headers = list[tuple[bytes, bytes]]
Script = Callable[["Exchange"], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Seen:
    """One request as it arrived: header names in lower case, a chunked body joined."""

    method: str
    target: str
    headers: Headers
    body: bytes = b""
    connection_gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the other side has closed its end before the answer's."""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    def has_key(self, key: str) -> bool:
        return self.header(b"authorization") == b"Bearer " + key.encode()

    def json(self) -> dict[str, Any]:
        value = orjson.loads(self.body)
        assert isinstance(value, dict)
        return value


class Exchange:
    """One request and the answer a script writes to it."""

    def __init__(self, request: Seen, writer: asyncio.StreamWriter) -> None:
        self.request = request
        self._writer = writer
        self._chunked = False
        self.keep_open = True
        self.cache_n = 0

    async def head(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, chunked: bool = True) -> None:
        self._chunked = chunked
        lines = [b"HTTP/1.1 %d Stub" % status, *(name + b": " + value for name, value in headers)]
        if chunked:
            lines.append(b"Transfer-Encoding: chunked")
        self._writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        await self._writer.drain()

    async def send(self, data: bytes) -> None:
        """A part of the body; with chunked coding, one chunk of its own."""
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)
        await self._writer.drain()

    async def end(self) -> None:
        if self._chunked:
            self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def whole(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        length = [] if status in (204, 304) else [(b"Content-Length", b"%d" % len(body))]
        await self.head(status, [*headers, *length], chunked=False)
        if self.request.method != "HEAD":
            await self.send(body)

    async def json(self, status: int, value: object) -> None:
        await self.whole(status, orjson.dumps(value), [(b"Content-Type", b"application/json; charset=utf-8")])

    async def stream_head(self) -> None:
        self.keep_open = False
        await self.head(200, [(b"Content-Type", b"text/event-stream")])

    def cut(self) -> None:
        """End the connection in good order, in the middle of the answer."""
        self._writer.close()

    def reset(self) -> None:
        """Break the connection with a TCP reset."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


@dataclass(slots=True)
class StubSlot:
    id: int
    busy: bool = False
    n_prompt_tokens: int = 0
    held: bytes = b""


def event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def timings_of(n_tokens: int, cache_n: int = 0, predicted_n: int = 1) -> dict[str, Any]:
    return {
        "cache_n": cache_n,
        "prompt_n": n_tokens - cache_n,
        "prompt_ms": 1.0,
        "predicted_n": predicted_n,
        "predicted_ms": 1.0,
    }


class StubUpstream:
    """One stub server. `requests` are all that came, oldest first; `next_answers` scripts for the generating requests
    to come, first in first out; `routes` scripts for a path, whatever the method. `loading` more requests get the
    503 of a server that is loading its model. With `api_key` set, all but /health wants it. `may_drain`, if
    cleared, keeps a slot busy after its client has left. `reuses`: whether an answer reports as cached what its
    body has in common with the one before it in its slot. `model` and its `aliases` are what /v1/models lists."""

    def __init__(
        self,
        *,
        n_slots: int = 2,
        n_ctx_slot: int = 4096,
        port: int = 0,
        reuses: bool = False,
        model: str = "stub",
        aliases: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.aliases = list(aliases)
        self.slots = [StubSlot(number) for number in range(n_slots)]
        self.n_ctx_slot = n_ctx_slot
        self._port = port
        self._reuses = reuses
        self.requests: list[Seen] = []
        self.next_answers: deque[Script] = deque()
        self.routes: dict[str, Script] = {}
        self.loading = 0
        self.api_key = ""
        self.violations: list[Seen] = []
        self.may_drain = asyncio.Event()
        self.may_drain.set()
        self.url = ""
        self._files: dict[str, int] = {}
        self._arrived = asyncio.Condition()
        self._failures: list[Exception] = []
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.may_drain.set()
        self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()
        if self._connections:
            await asyncio.wait(self._connections)
        await self._server.wait_closed()
        for failure in self._failures:
            raise failure

    def generating(self) -> list[Seen]:
        """The prompts that came, warm-ups not counted."""
        return [seen for seen in self.requests if seen.path in GENERATING and b'"n_predict":0' not in seen.body]

    async def arrived(self, count: int) -> Seen:
        """Wait until `count` prompts have come; the last of them."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.generating()) >= count)
        return self.generating()[count - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._exchange(reader, writer):
                    continue
        finally:
            del self._connections[task]
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection may carry another."""
        request = await _read_request(reader)
        async with self._arrived:
            self.requests.append(request)
            self._arrived.notify_all()
        exchange = Exchange(request, writer)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_watch(reader, request.connection_gone))
            try:
                await self._answer(exchange)
            except ConnectionError:
                exchange.keep_open = False
            except Exception as failure:  # noqa: BLE001 - raised in the test, at the end
                self._failures.append(failure)
                exchange.keep_open = False
            finally:
                watch.cancel()
        return exchange.keep_open and not writer.is_closing()

    async def _answer(self, exchange: Exchange) -> None:
        request, path = exchange.request, exchange.request.path
        if self.loading > 0:
            self.loading -= 1
            await exchange.json(503, LOADING)
        elif self.api_key and path != "/health" and not request.has_key(self.api_key):
            await exchange.json(401, WRONG_KEY)
        elif path in self.routes:
            await self.routes[path](exchange)
        elif path in GENERATING and exchange.request.method == "POST":
            await self._generate(exchange)
        elif path.startswith("/slots/"):
            await self._slot_action(exchange)
        else:
            await self._plain(exchange)

    async def _generate(self, exchange: Exchange) -> None:
        request = exchange.request
        wanted = request.json().get("id_slot") if request.body.startswith(b"{") else None
        slot = self.slots[wanted] if isinstance(wanted, int) else next((s for s in self.slots if not s.busy), None)
        if slot is None or slot.busy:
            self.violations.append(request)
            return await exchange.json(500, {"error": {"code": 500, "message": "no idle slot", "type": "server_error"}})
        slot.busy, slot.n_prompt_tokens = True, len(request.body) // 4
        if self._reuses:
            exchange.cache_n, slot.held = _common(slot.held, request.body) // 4, request.body
        warming = b'"n_predict":0' in request.body
        script = self.next_answers.popleft() if self.next_answers and not warming else self.answer
        try:
            await script(exchange)
        finally:
            if request.connection_gone.is_set():
                await self.may_drain.wait()
            slot.busy = False

    async def answer(self, exchange: Exchange) -> None:
        """The script of a healthy server."""
        body = exchange.request.json()
        if exchange.request.path.endswith("/embeddings"):
            return await exchange.json(501, {"error": {"code": 501, "message": "no", "type": "not_supported_error"}})
        if exchange.request.path == "/completion" and body.get("n_predict") == 0:
            n_tokens = len(body["prompt"])
            return await exchange.json(200, {"tokens_cached": n_tokens, "timings": timings_of(n_tokens)})
        if not body.get("stream"):
            return await exchange.json(200, self.chat_answer(exchange.request, exchange.cache_n))
        await exchange.stream_head()
        for chunk in self.chat_events(exchange.request, exchange.cache_n):
            await exchange.send(chunk)
            await asyncio.sleep(0)
        await exchange.end()

    def chat_answer(self, request: Seen, cache_n: int = 0) -> dict[str, Any]:
        """The whole answer of /v1/chat/completions."""
        n_tokens, n_answer = len(request.body) // 4, _answer_length(request)
        message = {"role": "assistant", "content": "Fine." * n_answer}
        return {
            **_chat_base("chat.completion"),
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": _usage(n_tokens, n_answer, cache_n),
            "timings": timings_of(n_tokens, cache_n, n_answer),
        }

    def chat_events(self, request: Seen, cache_n: int = 0) -> list[bytes]:
        """The events of a streamed chat answer, one for each chunk sent."""
        n_tokens, n_answer, body = len(request.body) // 4, _answer_length(request), request.json()
        timings = timings_of(n_tokens, cache_n, n_answer)
        out = []
        if body.get("return_progress"):
            progress = {"total": n_tokens, "cache": cache_n, "processed": cache_n, "time_ms": 0}
            out.append(_chat_event({"role": "assistant", "content": None}, prompt_progress=progress))
        out.append(_chat_event({"role": "assistant", "content": None}))
        out += [_chat_event({"content": "Fine."}) for _ in range(n_answer)]
        asked = (body.get("stream_options") or {}).get("include_usage")
        out.append(_chat_event({}, "stop", **({} if asked else {"timings": timings})))
        if asked:
            usage = {"choices": [], "usage": _usage(n_tokens, n_answer, cache_n), "timings": timings}
            out.append(event({**_chat_base("chat.completion.chunk"), **usage}))
        return [*out, b"data: [DONE]\n\n"]

    async def _slot_action(self, exchange: Exchange) -> None:
        path, _, query = exchange.request.target.partition("?")
        slot, name = self.slots[int(path.rsplit("/", 1)[1])], exchange.request.json()["filename"]
        if "/" in name:
            return await exchange.json(400, {"error": {"code": 400, "message": "Invalid filename", "type": "x"}})
        if slot.busy:
            self.violations.append(exchange.request)
        if query == "action=save":
            self._files[name] = slot.n_prompt_tokens
        slot.n_prompt_tokens = self._files[name]
        verb = query.removeprefix("action=")
        counts = {f"n_{verb}d": slot.n_prompt_tokens, "n_written": 1, "n_read": 1, "timings": {f"{verb}_ms": 0.1}}
        await exchange.json(200, {"id_slot": slot.id, "filename": name, **counts})

    async def _plain(self, exchange: Exchange) -> None:
        request = exchange.request
        answers: dict[str, Callable[[], object]] = {
            "/health": lambda: {"status": "ok"},
            "/props": self._props,
            "/slots": lambda: [
                {"id": s.id, "is_processing": s.busy, "n_prompt_tokens": s.n_prompt_tokens} for s in self.slots
            ],
            "/v1/models": lambda: {
                "object": "list",
                "data": [{"id": self.model, "aliases": self.aliases, "object": "model"}],
            },
            "/apply-template": lambda: {"prompt": _rendered(request.json())},
            "/tokenize": lambda: {"tokens": list(request.json()["content"].encode())},
        }
        if request.path in answers:
            await exchange.json(200, answers[request.path]())
        else:
            await exchange.json(404, NOT_FOUND)

    def _props(self) -> dict[str, Any]:
        return {
            "total_slots": len(self.slots),
            "default_generation_settings": {"n_ctx": self.n_ctx_slot},
            "model_alias": self.model,
            "model_path": "stub.gguf",
            "build_info": "b11434-stub",
            "modalities": {"vision": False},
            "endpoint_slots": True,
        }


async def _read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    method, target, _version = head[0].decode("latin-1").split(" ")
    pairs = [line.partition(b":") for line in head[1:]]
    request = Seen(method, target, [(name.lower(), value.strip()) for name, _, value in pairs])
    if (request.header(b"transfer-encoding") or b"").lower() == b"chunked":
        while size := int(await reader.readline(), 16):
            request.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    elif length := int(request.header(b"content-length") or 0):
        request.body = await reader.readexactly(length)
    return request


async def _watch(reader: asyncio.StreamReader, gone: asyncio.Event) -> None:
    with suppress(ConnectionError):
        if await reader.read(1):
            raise AssertionError("bytes came before the answer was over")
    gone.set()


def _common(a: bytes, b: bytes, step: int = 64) -> int:
    """Bytes that both begin with, in whole steps."""
    starts = range(0, min(len(a), len(b)), step)
    return next((at for at in starts if a[at : at + step] != b[at : at + step]), min(len(a), len(b)))


def _answer_length(request: Seen) -> int:
    """Tokens of the answer, each an event of its own in a stream."""
    return int(request.json().get("max_tokens") or 1)


def _chat_base(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-stub", "object": kind, "created": 1, "model": "stub", "system_fingerprint": "b11434-stub"}


def _chat_event(delta: dict[str, Any], finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({**_chat_base("chat.completion.chunk"), "choices": [choice], **more})


def _usage(n_prompt: int, n_predicted: int, cache_n: int) -> dict[str, Any]:
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_predicted,
        "total_tokens": n_prompt + n_predicted,
        "prompt_tokens_details": {"cached_tokens": cache_n},
    }


async def _alone(n_slots: int, n_ctx_slot: int) -> None:
    async with StubUpstream(n_slots=n_slots, n_ctx_slot=n_ctx_slot, reuses=True) as stub:
        print(stub.url, flush=True)
        await asyncio.Event().wait()


def _rendered(body: Mapping[str, Any]) -> str:
    """As most templates do it: the tools stand in front."""
    return "\n".join([*(str(tool) for tool in body.get("tools", ())), *(str(m["content"]) for m in body["messages"])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--ctx", type=int, default=4096, help="tokens of each slot")
    given = parser.parse_args()
    with suppress(KeyboardInterrupt):
        asyncio.run(_alone(given.slots, given.ctx))
