"""When a waiting client gets a sign of life."""

from __future__ import annotations

from dataclasses import dataclass

from prefixproxy.exchange import Exchange
from prefixproxy.reply import Reply


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds without an answer before the first sign of life (0: none is ever sent), and between two of them."""

    after_s: float = 20.0
    every_s: float = 10.0


class Patience:
    """Beats for one request (`intake.Meanwhile`), if it is one for a stream. Nothing else about it changes: the same
    request waits in the same place and is answered once."""

    def __init__(self, pace: Pace, exchange: Exchange, reply: Reply) -> None:
        self._exchange = exchange
        self._reply = reply
        read_timeout_s = exchange.hints.read_timeout_s or float("inf")
        self._every_s = min(pace.every_s, read_timeout_s / 3)
        self.pause_s: float | None = min(pace.after_s, read_timeout_s / 2) if pace.after_s else None

    async def beat(self) -> None:
        exchange = self._exchange
        waits = exchange.streaming
        if waits:
            model = str(exchange.plan.body.data.get("model") or "") if exchange.plan else ""
            waits = await self._reply.alive(exchange.api, exchange.id, model, int(exchange.unix_time))
        self.pause_s = self._every_s if waits else None
