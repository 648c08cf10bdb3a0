"""What doctor asks of a server beyond what it tells: renderings, a trial if nobody uses it, the admission test."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from prefixproxy.backends.http import HttpUpstream
from prefixproxy.backends.llamacpp_idle import emptied
from prefixproxy.backends.llamacpp_memory import never_used
from prefixproxy.demo.prompt import BYTES_PER_TOKEN, briefing
from prefixproxy.doctor.admission import ASKED_TOKENS, CONTROL_TOKENS, HEADROOM_TOKENS, Answered
from prefixproxy.doctor.template import Rendered, bodies
from prefixproxy.doctor.trial import Trial, attempt
from prefixproxy.errors import ProxyError, UpstreamFailed
from prefixproxy.types import Api, Usage
from prefixproxy.usage import usage_from

TRIAL_S = 120.0
"""Some hundred tokens, on however slow a machine."""
ADMISSION_S = 3600.0
"""A whole slot's prefill, on however slow a machine."""
_SHORTEST_TEST = 64
_CALIBRATION_TOKENS = 200
_SLACK = 0.97
"""Tokens of an Ollama's prompt are counted by calibration, so the test stays a little below the limit."""


class LlamaProbe:
    """Questions to one llama-server."""

    def __init__(self, http: HttpUpstream) -> None:
        self._http = http

    async def rendered(self) -> Rendered | None:
        """None where the template cannot be rendered; that with tools is left out where only they fail."""
        try:
            first, second = [await self._render(body) for body in bodies(tools=False)]
        except ProxyError:
            return None
        try:
            one, other = [await self._render(body) for body in bodies(tools=True)]
        except ProxyError:
            return Rendered(first, second)
        return Rendered(first, second, (one, other))

    async def tried(self, n_slots: int, n_swa: int, *, can_save: bool, may_overwrite: bool) -> Trial:
        """Try what shows only by trying, unless somebody may need this server. `may_overwrite`: slots that were used
        may be."""
        trial = Trial()
        slots = await self._http.call("GET", "/slots")
        if not may_overwrite and not never_used(slots):
            trial.not_tried = "the server has been used, and trying overwrites slots"
            trial.emptied = emptied(slots)
        elif any(slot.get("is_processing") for slot in slots):
            trial.not_tried = "a slot is working"
        else:
            try:
                async with asyncio.timeout(TRIAL_S):
                    await attempt(_TrialServer(self._http), trial, n_slots, can_save=can_save, n_swa=n_swa)
            except TimeoutError:
                trial.not_tried = f"trying took longer than {TRIAL_S:.0f} s"
            except ProxyError as failure:
                trial.not_tried = f"trying failed: {failure.message}"
        return trial

    async def busy(self) -> bool:
        return any(slot.get("is_processing") for slot in await self._http.call("GET", "/slots"))

    async def admitted(self, n_ctx_slot: int) -> Answered:
        """The context admission test's prompt, and what came of it."""
        return await self._asked(n_ctx_slot - HEADROOM_TOKENS)

    async def control(self) -> Answered:
        """The same question on a short prompt."""
        return await self._asked(CONTROL_TOKENS)

    async def _asked(self, n_tokens: int) -> Answered:
        if n_tokens < _SHORTEST_TEST:
            return Answered(n_tokens, failure=f"a slot has no room for {n_tokens} tokens and an answer")
        text = briefing(secrets.token_hex(4), int(n_tokens * 1.5) + 500)
        try:
            told = await self._http.call("POST", "/tokenize", {"content": text, "add_special": True})
            body = {
                "prompt": told["tokens"][:n_tokens],
                "n_predict": ASKED_TOKENS,
                "return_tokens": True,
                "response_fields": ["timings", "tokens", "truncated", "stop_type", "tokens_evaluated"],
            }
            answer = await self._http.call("POST", "/completion", body, timeout_s=ADMISSION_S)
        except ProxyError as failure:
            return Answered(n_tokens, failure=failure.message)
        usage = usage_from(Api.COMPLETION, [answer])
        predicted = usage.predicted_tokens or 0
        ran_out = answer.get("stop_type") == "limit" and predicted < ASKED_TOKENS
        cut = bool(answer.get("truncated")) or ran_out
        return Answered(n_tokens, usage.prompt_tokens, predicted, cut, answer.get("tokens") or ())

    async def _render(self, body: Mapping[str, Any]) -> str:
        answer = await self._http.call("POST", "/apply-template", body)
        return str(answer["prompt"])


class _TrialServer:
    """The trial's view of a server. Whatever touches a slot looks first whether any is working."""

    def __init__(self, http: HttpUpstream) -> None:
        self._http = http

    async def evaluate(self, tokens: Sequence[int]) -> tuple[int, int]:
        body = {"prompt": list(tokens), "n_predict": 0, "cache_prompt": True}
        answer = await self._http.call("POST", "/completion", body, timeout_s=TRIAL_S)
        return int(answer["id_slot"]), usage_from(Api.COMPLETION, [answer]).cached_tokens or 0

    async def held(self) -> Mapping[int, int]:
        slots = await self._http.call("GET", "/slots")
        if any(slot.get("is_processing") for slot in slots):
            raise UpstreamFailed("somebody else began to use the server")
        return {int(slot["id"]): int(slot.get("n_prompt_tokens") or 0) for slot in slots}

    async def save(self, slot: int, file: str) -> int:
        return int((await self._action(slot, "save", {"filename": file}))["n_saved"])

    async def restore(self, slot: int, file: str) -> int:
        return int((await self._action(slot, "restore", {"filename": file}))["n_restored"])

    async def erase(self, slot: int) -> None:
        await self._action(slot, "erase", None)

    async def _action(self, slot: int, action: str, body: Any) -> Any:
        await self.held()
        return await self._http.call("POST", f"/slots/{slot}?action={quote(action)}", body)


class OllamaProbe:
    """Questions to one Ollama."""

    def __init__(self, http: HttpUpstream) -> None:
        self._http = http

    async def running(self) -> list[dict[str, Any]]:
        """What `/api/ps` lists."""
        listed = await self._http.call("GET", "/api/ps")
        rows = listed.get("models") if isinstance(listed, dict) else None
        return [row for row in rows or () if isinstance(row, dict)]

    async def admitted(self, model: str, n_ctx: int) -> Answered:
        """The context admission test, its length by this model's own count of a shorter prompt. Evaluates both."""
        n_tokens = int((n_ctx - HEADROOM_TOKENS) * _SLACK)
        if n_tokens < _SHORTEST_TEST:
            return Answered(n_tokens, failure=f"a context of {n_ctx} tokens has no room for a prompt and an answer")
        try:
            short = briefing(secrets.token_hex(4), _CALIBRATION_TOKENS)
            counted = (await self._generate(model, short, 1))[0].prompt_tokens
            per_token = len(short) / counted if counted else BYTES_PER_TOKEN
            text = briefing(secrets.token_hex(4), int(n_tokens * per_token / BYTES_PER_TOKEN * 1.2))
            usage, answer = await self._generate(model, text[: int(n_tokens * per_token)], ASKED_TOKENS)
        except ProxyError as failure:
            return Answered(n_tokens, failure=failure.message)
        # the last tenth is the calibration's own error
        arrived = None if usage.prompt_tokens is None else int(usage.prompt_tokens / 0.9)
        predicted = usage.predicted_tokens or 0
        cut = answer.get("done_reason") == "length" and predicted < ASKED_TOKENS
        return Answered(n_tokens, arrived, predicted, cut, str(answer.get("response") or "").split())

    async def _generate(self, model: str, prompt: str, n_predict: int) -> tuple[Usage, dict[str, Any]]:
        body = {
            "model": model,
            "prompt": prompt,
            "raw": True,
            "stream": False,
            "options": {"num_predict": n_predict},
        }
        answer = await self._http.call("POST", "/api/generate", body, timeout_s=ADMISSION_S)
        return usage_from(Api.OLLAMA_GENERATE, [answer]), answer
