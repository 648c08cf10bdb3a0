"""Warm-ups, saves and restores as calls to a server. One that fails is reported as such, never raised."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prefixproxy.backends import Backend, CopyResult
from prefixproxy.errors import ProxyError, UpstreamFailed, UpstreamUnavailable
from prefixproxy.lease import Watch
from prefixproxy.prefix import blocks_within
from prefixproxy.schedule.types import COPY_WORK_S, WARM_WORK_S, Decode, Restore, Save, Warm, WarmResult
from prefixproxy.types import Usage
from prefixproxy.warming import Rendering, root_tokens, tokens_up_to, whole_tokens

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Report:
    """How a job ended, as the metrics say it."""

    outcome: str = "failed"


class SlotWork:
    """`lost` is told which server could not be reached."""

    def __init__(
        self, watch: Watch, lost: Callable[[Backend, ProxyError], None], model_of: Callable[[str], str]
    ) -> None:
        self._watch = watch
        self._lost = lost
        self._model_of = model_of

    async def warm(self, backend: Backend, effect: Warm, lanes: Sequence[Rendering]) -> WarmResult:
        result = WarmResult(ok=False)
        usage: Usage | None = None
        async with self._reporting(backend, "a warm-up", WARM_WORK_S) as report:
            tokens, blocks = await _tokens(backend, effect, lanes)
            cost = await backend.warm(effect.slot, tokens)
            usage = cost.usage
            seconds = (usage.prompt_ms or 0.0) / 1e3
            result = WarmResult(True, cost.n_tokens, seconds, blocks, usage.evaluated_tokens)
        self._watch.warmup(backend.name, report.outcome, self._model_of(backend.name), effect.slot.slot, usage)
        return result

    async def decode(self, backend: Backend, effect: Decode) -> bool:
        async with self._reporting(backend, "a decode behind several answers", COPY_WORK_S) as report:
            slot = effect.slot if effect.pinned else None
            cost = await backend.decode_one(slot)
            self._watch.tried(backend.name, self._model_of(backend.name), None if slot is None else slot.slot, cost)
        return report.outcome == "ok"

    async def save(self, backend: Backend, effect: Save) -> CopyResult | None:
        done = None
        async with self._reporting(backend, "a save", COPY_WORK_S):
            done = await backend.save(effect.slot, effect.file)
        return done

    async def restore(self, backend: Backend, effect: Restore) -> CopyResult | None:
        done = None
        async with self._reporting(backend, "a restore", COPY_WORK_S) as report:
            read = await backend.restore(effect.slot, effect.file)
            if effect.n_bytes not in (None, read.n_bytes):
                raise UpstreamFailed(f"{effect.file} has {read.n_bytes} bytes, not the {effect.n_bytes} saved there")
            done = read
        source = None if effect.source is None else effect.source.slot
        seconds = 0.0 if done is None else done.seconds
        self._watch.fork(backend.name, report.outcome, seconds, effect.slot.slot, source)
        return done

    @asynccontextmanager
    async def _reporting(self, backend: Backend, what: str, limit_s: float) -> AsyncIterator[_Report]:
        """A job that fails or takes too long leaves its report as it stood; the scheduler decides what that means."""
        report = _Report()
        try:
            async with asyncio.timeout(limit_s):
                yield report
            report.outcome = "ok"
        except TimeoutError:
            report.outcome = "timed_out"
            log.warning("%s on %s took longer than %g s", what, backend.name, limit_s)
        except UpstreamUnavailable as failure:
            log.warning("%s on %s failed: %s", what, backend.name, failure.message)
            self._lost(backend, failure)
        except (ProxyError, KeyError, TypeError, ValueError) as failure:
            log.warning("%s on %s failed: %s", what, backend.name, failure)


async def _tokens(backend: Backend, effect: Warm, lanes: Sequence[Rendering]) -> tuple[list[int], int | None]:
    """What to evaluate, and the blocks of the first ticket's chain that it covers, if these may be fewer than the
    root's."""
    if effect.whole:
        return await whole_tokens(backend, lanes), None
    if not effect.n_bytes or len(lanes) > 1:
        return await root_tokens(backend, lanes), None
    if not lanes:
        raise UpstreamFailed("nobody waits for this root any more")
    tokens, covered = await tokens_up_to(backend, lanes[0], effect.n_bytes)
    return tokens, blocks_within(covered)
