"""One value for all clients where different ones would reload a model: the largest anybody asked for.

Only for the keys the user named. `/v1` can carry neither: see `ollama_native`. A different `num_ctx` reloads the
model and all that was cached is lost; a shorter `keep_alive` unloads it sooner for everybody (server/sched.go).
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

from prefixproxy.backends.ollama_counts import n_ctx_of
from prefixproxy.prompt import Edit, SetKey
from prefixproxy.types import Api

NUM_CTX, KEEP_ALIVE = "num_ctx", "keep_alive"
MAX_MODELS = 64

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+)")


class LargestOptions:
    """What was asked for so far. `keys`: those that are made the same for all; none: nothing is ever changed."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = frozenset(keys)
        self._num_ctx: OrderedDict[str, int] = OrderedDict()
        self._served: dict[str, int] = {}
        self._refused: dict[str, int] = {}
        self._keep_alive: tuple[float, Any] | None = None

    def edits(self, api: Api, body: Mapping[str, Any], model: str, running: int | None) -> list[Edit]:
        """Take note of a request for `model`, which runs with a context of `running` tokens if it is known to, and
        return what to change in it. A request without a prompt (it loads or unloads a model) is a command, and left
        alone."""
        if not self._keys or not _has_prompt(api, body):
            return []
        edits = self._same_context(body, model, running or 0) if NUM_CTX in self._keys else []
        return edits + (self._longest_life(body) if KEEP_ALIVE in self._keys else [])

    def served(self, model: str, num_ctx: int) -> None:
        """A request that asked for `num_ctx` was answered."""
        if model in self._num_ctx:
            self._served[model] = max(num_ctx, self._served.get(model, 0))
        if num_ctx >= self._refused.get(model, num_ctx + 1):
            del self._refused[model]

    def refused(self, model: str, num_ctx: int) -> None:
        """A request that went out with `num_ctx` failed on the server. If none was ever answered with as much, the
        machine may lack the memory for it: who asks for that again gets it for itself alone, and the others what was
        the largest before."""
        if model not in self._num_ctx or num_ctx <= self._served.get(model, 0):
            return
        self._refused[model] = min(num_ctx, self._refused.get(model, num_ctx))
        if self._num_ctx[model] >= num_ctx:
            del self._num_ctx[model]
            if model in self._served:
                self._num_ctx[model] = self._served[model]

    @property
    def any_context(self) -> bool:
        """Whether contexts are made the same, and some client asked for one."""
        return bool(self._num_ctx)

    def context(self, model: str, running: int | None) -> int | None:
        """The context that requests for `model` go out with; None while nobody asked for one."""
        asked = self._num_ctx.get(model)
        return None if asked is None else max(asked, running or 0)

    def report(self) -> dict[str, Any]:
        """The values in force, by key."""
        kept = {} if self._keep_alive is None else {KEEP_ALIVE: self._keep_alive[1]}
        return ({NUM_CTX: dict(self._num_ctx)} if self._num_ctx else {}) | kept

    def _same_context(self, body: Mapping[str, Any], model: str, running: int) -> list[Edit]:
        """A request without `num_ctx` means the default, which is another value too once somebody asked for one."""
        asked, options = n_ctx_of(body), body.get("options")
        if not isinstance(options, dict | None) or (asked is None and NUM_CTX in (options or {})):
            return []
        if asked is not None and asked >= self._refused.get(model, asked + 1):
            return []
        if asked is not None:
            self._num_ctx[model] = max(asked, self._num_ctx.pop(model, 0))
            if len(self._num_ctx) > MAX_MODELS:
                self._forget(next(iter(self._num_ctx)))
        if model not in self._num_ctx:
            return []
        wanted = max(self._num_ctx[model], running)
        if asked == wanted:
            return []
        return [
            SetKey(("options",), NUM_CTX, wanted) if options is not None else SetKey((), "options", {NUM_CTX: wanted})
        ]

    def _forget(self, model: str) -> None:
        for known in (self._num_ctx, self._served, self._refused):
            known.pop(model, None)

    def _longest_life(self, body: Mapping[str, Any]) -> list[Edit]:
        """A request without one does not change what an earlier one set (sched.go), and needs none."""
        given = body.get(KEEP_ALIVE)
        seconds = seconds_of(given)
        if seconds is None:
            return []
        if self._keep_alive is None or seconds > self._keep_alive[0]:
            self._keep_alive = seconds, given
        return [SetKey((), KEEP_ALIVE, self._keep_alive[1])] if seconds < self._keep_alive[0] else []


def seconds_of(keep_alive: Any) -> float | None:
    """A `keep_alive` in seconds, infinity for a negative one; None for what is none (api/types.go, Duration): numbers
    are seconds, text needs a unit."""
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        return math.inf if keep_alive < 0 else float(keep_alive)
    found = _DURATION.fullmatch(keep_alive) if isinstance(keep_alive, str) else None
    if found is None:
        return None
    if found[1] == "-":
        return math.inf
    parts = re.findall(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)", found[2])
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def _has_prompt(api: Api, body: Mapping[str, Any]) -> bool:
    if api is Api.OLLAMA_CHAT:
        return bool(body.get("messages"))
    return api is Api.OLLAMA_GENERATE and bool(body.get("prompt"))
