"""The scripted Ollama as a client's upstream, with a record of what each prompt cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from acted_engine import NUMBER, Asked, prompt_of
from running import Run, Sent, recorded_proxy
from scripted_ollama import Count, ScriptedOllama
from speaking import Counts, Words
from stub_upstream import Exchange
from threads import in_thread

from prefixproxy.types import Api

SAID = "Fine." * 3


class AskedOllama(ScriptedOllama):
    """`asked`: the prompts of /api/chat that came, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self._counted: list[Count] = []

    async def _run(self, model: str, num_ctx: int | None, messages: list[bytes]) -> Count:
        count = await super()._run(model, num_ctx, messages)
        self._counted.append(count)
        return count

    async def _native(self, exchange: Exchange) -> None:
        await super()._native(exchange)
        count, request = self._counted[-1], exchange.request
        counts, number = Counts(count.cached, count.prompt - count.cached), request.header(NUMBER)
        prompt, words = prompt_of(Api.OLLAMA_CHAT, request.body), Words(len(self.asked), SAID)
        told = int(number) if number else None
        self.asked.append(Asked(Api.OLLAMA_CHAT, request.body, prompt, counts, words, told))


@contextmanager
def to_ollama() -> Iterator[tuple[str, Run]]:
    with in_thread("ollama", AskedOllama) as ollama:
        yield ollama.url, Run(ollama.asked)


@contextmanager
def through_ollama() -> Iterator[tuple[str, Run]]:
    sent: dict[int, Sent] = {}
    with (
        in_thread("ollama", AskedOllama) as ollama,
        in_thread("proxy", lambda: recorded_proxy(ollama.url, sent)) as proxy,
    ):
        yield proxy.url, Run(ollama.asked, sent)
