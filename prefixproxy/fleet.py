"""All upstreams together: which of them is ready for a request, which one soon will be, and the wait for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from prefixproxy.backends import Backend
from prefixproxy.errors import UpstreamUnavailable
from prefixproxy.routing import answering, has_path, is_listed, serving, template_of
from prefixproxy.types import TemplateFacts, UpstreamFacts
from prefixproxy.upkeep import Health, Upkeep, UpstreamState


class Fleet:
    """Reads what `keepers` know. `loading_wait_s`: how long a request waits for an upstream that loads its model."""

    def __init__(
        self, keepers: Mapping[str, Upkeep], clock: Callable[[], float] = lambda: 0.0, loading_wait_s: float = 0.0
    ) -> None:
        self._keepers = keepers
        self._clock = clock
        self._loading_wait_s = loading_wait_s
        self._news = asyncio.Event()

    @property
    def is_several(self) -> bool:
        return len(self._keepers) > 1

    @property
    def is_up(self) -> bool:
        """Whether any upstream is ready to serve."""
        return any(state.health is Health.UP for state in self._states())

    def is_served(self, model: str = "", path: str = "") -> bool:
        """Whether one that may get such a request is up."""
        return bool(self.serving(model, path))

    def is_coming(self, model: str = "") -> bool:
        """Whether one that may get a request for `model` is about to be up, or was not asked yet. What one that was
        never up has, nobody knows: it may be what no other one lists."""
        listed = is_listed(model, self._facts())
        for state in self._states():
            if (state.health is Health.LOADING or _not_asked(state)) and (
                not listed or (state.facts is not None and model in state.facts.models)
            ):
                return True
        return False

    def serving(self, model: str, path: str = "") -> list[tuple[Backend, UpstreamFacts]]:
        """The upstreams that may get such a request now, as the scheduler sees it."""
        states = {name: keeper.state for name, keeper in self._keepers.items()}
        up = [s.facts for s in states.values() if s.health is Health.UP and s.facts is not None]
        down = [s.facts for s in states.values() if s.health is not Health.UP and s.facts is not None]
        return [(states[one.name].backend, one) for one in serving(model, path, up, down)]

    def backend_for(self, model: str, path: str) -> Backend:
        """For requests that take no slot: the first that may get it. Raises UpstreamUnavailable."""
        found = self.serving(model, path)
        if not found:
            raise self.unavailable(model)
        return min(found, key=lambda each: each[1].rank)[0]

    def elsewhere(self, model: str, path: str) -> Backend | None:
        """The upstream that would hand such a request on to somebody else's machine, if it would go to one."""
        found = self.serving(model, path) if model else []
        return next((backend for backend, _ in found if backend.forwards(model)), None)

    def listing(self, path: str) -> list[Backend]:
        """Every upstream that is up and may have `path`, in the order of the settings."""
        live = [state for state in self._states() if state.health is Health.UP]
        return [state.backend for state in live if state.facts is not None and has_path(path, state.facts)]

    def model_of(self, upstream: str) -> str:
        """The model an upstream says it runs, "" if that is not known."""
        keeper = self._keepers.get(upstream)
        return keeper.state.facts.model if keeper and keeper.state.facts else ""

    def answering(self, model: str) -> str:
        """The name of the model that answers a request for `model`, whichever of its upstreams are up."""
        return answering(model, self._facts())

    def template_of(self, model: str) -> TemplateFacts:
        """What is known of the template that renders a request for `model`."""
        return template_of(model, self._facts())

    async def until_served(self, model: str, path: str, deadline: float) -> bool:
        """Waits for an upstream that is loading, within a bound; one that is down is no reason to wait. Nor is one that
        loads, where another one lists the model. Whether it had to. Raises UpstreamUnavailable."""
        if self._may_go(model, path):
            return False
        patience_s = min(self._loading_wait_s, deadline - self._clock())
        try:
            async with asyncio.timeout(patience_s):
                while not self._may_go(model, path):
                    if not self.is_coming(model):
                        raise self.unavailable(model)
                    await self._news.wait()
        except TimeoutError:
            if not self.is_served(model, path):
                raise self.unavailable(model) from None
        return True

    async def until_asked(self, model: str, path: str, limit_s: float, *, all_of_them: bool = False) -> None:
        """In the proxy's first moments: until an upstream that may get such a request is up, or `all_of_them` were
        asked what they are; no longer than `limit_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while any(_not_asked(state) for state in self._states()):
                    if not all_of_them and self.is_served(model, path):
                        return
                    await self._news.wait()

    def tell_news(self) -> None:
        """Wakes whoever waits for an upstream, to look again."""
        self._news.set()
        self._news = asyncio.Event()

    def unavailable(self, model: str = "") -> UpstreamUnavailable:
        told = [f"{state.backend.name}: {state.failure}" for state in self._states() if state.failure]
        what = f"no upstream that serves {model!r} is ready" if self.is_up and model else "no upstream is ready"
        return UpstreamUnavailable(f"{what} ({'; '.join(told or ['starting'])})", retry_after_s=5)

    def _may_go(self, model: str, path: str) -> bool:
        """Not to one that merely takes any name while the one that may be meant is loading."""
        if not self.is_served(model, path):
            return False
        return not model or is_listed(model, self._facts()) or not self._unknown_one_loads()

    def _unknown_one_loads(self) -> bool:
        """Not for longer than anybody would wait for it: a gateway before a dead server may say so for ever."""
        loading = [s for s in self._states() if s.health is Health.LOADING and s.facts is None]
        return any(self._clock() < state.loading_since + self._loading_wait_s for state in loading)

    def _states(self) -> list[UpstreamState]:
        return [keeper.state for keeper in self._keepers.values()]

    def _facts(self) -> list[UpstreamFacts]:
        return [state.facts for state in self._states() if state.facts is not None]


def _not_asked(state: UpstreamState) -> bool:
    """Whether its first probe has not come back."""
    return state.health is Health.STARTING and not state.failure
