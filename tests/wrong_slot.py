"""Stands before a real engine and restores the wrong slot: tokens of the file that was asked for, keys and values of
another conversation. The server notices nothing, as it would not of a corruption of its own.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from starlette.types import Receive, Scope, Send
from threads import in_thread

from prefixproxy.backends.http import HttpUpstream, end_to_end
from prefixproxy.server import Server
from prefixproxy.serving import bind

_WORD = 4
_HEAD = struct.Struct("<III")
"""Magic, version, words of tokens that follow (llama-context.cpp, llama_state_seq_save_file)."""
_PACKED = 3
"""Of these words, so many stand before the first token (server-common.cpp)."""
WRONG, SPLICED = "wrong.bin", "spliced.bin"


@dataclass(eq=False)
class WrongSlot:
    """`times`: so many restores go wrong, the first ones. `restored` counts those that were asked for."""

    engine: str
    save_dir: Path
    times: int = 1
    restored: int = 0
    url: str = field(default="", init=False)
    _splicing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        upstream = HttpUpstream("engine", self.engine)
        try:
            query = scope["query_string"].decode()
            if "action=restore" in query:
                self.restored += 1
                if self.restored <= self.times:
                    async with self._splicing:  # several are restored at once, and all use the same two files
                        body = await self._spliced(upstream, scope["path"], orjson.loads(body)["filename"])
                        await self._forward(upstream, scope, body, query, send)
                    return
            await self._forward(upstream, scope, body, query, send)
        finally:
            await upstream.close()

    async def _forward(self, upstream: HttpUpstream, scope: Scope, body: bytes, query: str, send: Send) -> None:
        headers = [(n, v) for n, v in end_to_end(scope["headers"]) if n not in (b"host", b"content-length")]
        headers.append((b"content-length", str(len(body)).encode()))
        target = scope["path"] + (f"?{query}" if query else "")
        response = await upstream.open(scope["method"], target, headers, body)
        try:
            kept = [(n.lower(), v) for n, v in end_to_end(response.headers)]
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            async for chunk in response.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.close()

    async def _spliced(self, upstream: HttpUpstream, path: str, file: str) -> bytes:
        """The body of a restore that reads the file's tokens with another conversation's keys and values. The slot is
        idle and about to be overwritten, so it may hold that conversation for a moment."""
        asked = (self.save_dir / file).read_bytes()
        magic, version, words = _HEAD.unpack_from(asked)
        end = _HEAD.size + words * _WORD
        tokens = struct.unpack_from(f"<{words}i", asked, _HEAD.size)[_PACKED : _PACKED + _token_count(asked)]
        foreign = [1000 + token * 7 % 30_000 for token in tokens]
        other = {"prompt": foreign, "id_slot": int(path.rpartition("/")[2]), "n_predict": 0, "cache_prompt": False}
        await upstream.call("POST", "/completion", other, timeout_s=60)
        await upstream.call("POST", f"{path}?action=save", {"filename": WRONG})
        wrong = (self.save_dir / WRONG).read_bytes()
        assert _HEAD.unpack_from(wrong) == (magic, version, words)
        assert len(wrong) == len(asked)
        (self.save_dir / SPLICED).write_bytes(asked[:end] + wrong[end:])
        return orjson.dumps({"filename": SPLICED})


def _token_count(saved: bytes) -> int:
    (count,) = struct.unpack_from("<i", saved, _HEAD.size + 2 * _WORD)
    assert isinstance(count, int)
    return count


@asynccontextmanager
async def _serving(wrong: WrongSlot) -> AsyncIterator[WrongSlot]:
    listener = bind("127.0.0.1", 0)
    wrong.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(wrong, lambda: None, 1.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        await server.up.wait()
        try:
            yield wrong
        finally:
            server.tell_to_stop()
    listener.close()


def wrong_slot(engine: str, save_dir: Path, times: int = 1) -> AbstractContextManager[WrongSlot]:
    """Runs it in a thread until the block ends."""
    return in_thread("wrong-slot", lambda: _serving(WrongSlot(engine, save_dir, times)))
