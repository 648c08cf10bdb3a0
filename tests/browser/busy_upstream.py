"""A stub server whose slots remember their prompts, so that there is something to see: a token is a byte, and what a
prompt shares with the one its slot held before is reported as cached."""

from __future__ import annotations

import asyncio
from typing import Any

from stub_upstream import Exchange, StubUpstream, event

TOKENS_PER_SECOND = 20_000
ANSWER_S = 0.05


class BusyUpstream(StubUpstream):
    """`answer_s`: how long an answer is generated."""

    def __init__(self, *, n_slots: int = 4, answer_s: float = ANSWER_S) -> None:
        super().__init__(n_slots=n_slots, n_ctx_slot=1 << 17)
        self._answer_s = answer_s
        self._resident: dict[int, bytes] = {}
        self._saved: dict[str, bytes] = {}

    async def answer(self, exchange: Exchange) -> None:
        body = exchange.request.json()
        slot = int(body.get("id_slot", 0))
        warming = exchange.request.path == "/completion"
        prompt = bytes(body["prompt"]) if warming else _text(body)
        counts = self._prefilled(slot, prompt)
        await asyncio.sleep(counts["prompt_ms"] / 1e3)
        if warming:
            await exchange.json(200, {"tokens_cached": len(prompt), "timings": counts})
        else:
            await self._stream(exchange, counts)

    def _prefilled(self, slot: int, prompt: bytes) -> dict[str, Any]:
        """The server's timings for a prompt in this slot; at least the last token is evaluated."""
        held = self._resident.get(slot, b"")
        same = next(
            (i for i, (a, b) in enumerate(zip(prompt, held, strict=False)) if a != b), min(len(prompt), len(held))
        )
        cached = min(same, len(prompt) - 1)
        self._resident[slot] = prompt
        self.slots[slot].n_prompt_tokens = len(prompt)
        evaluated = len(prompt) - cached
        milliseconds = evaluated / TOKENS_PER_SECOND * 1e3
        return {
            "cache_n": cached,
            "prompt_n": evaluated,
            "prompt_ms": milliseconds,
            "predicted_n": 4,
            "predicted_ms": 1.0,
        }

    async def _stream(self, exchange: Exchange, counts: dict[str, Any]) -> None:
        await exchange.stream_head()
        await exchange.send(event({**_chunk({"role": "assistant", "content": "So"}), "timings": counts}))
        await asyncio.sleep(self._answer_s)
        await exchange.send(event({**_chunk({}, "stop"), "timings": counts}))
        await exchange.send(b"data: [DONE]\n\n")
        await exchange.end()

    async def _slot_action(self, exchange: Exchange) -> None:
        path, _, query = exchange.request.target.partition("?")
        slot, name = int(path.rsplit("/", 1)[1]), exchange.request.json()["filename"]
        if query == "action=save":
            self._saved[name] = self._resident.get(slot, b"")
        elif query == "action=restore":
            self._resident[slot] = self._saved.get(name, b"")
        await super()._slot_action(exchange)


def _text(body: dict[str, Any]) -> bytes:
    return "\n".join(str(message["content"]) for message in body["messages"]).encode()


def _chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "chatcmpl-busy",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "stub",
        "choices": [choice],
    }
