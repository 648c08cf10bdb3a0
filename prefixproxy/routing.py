"""Which upstreams a request may go to: by the model it names, and by the path, which not every kind of server has.

A name that an upstream lists goes there and nowhere else, also while that upstream is down: llama-server answers to any
name with the one model it has, so another one would answer in silence with the wrong model.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefixproxy.types import TemplateFacts, UpstreamFacts

_OLLAMA_PATHS = "/api/"
_COMMON_PATHS = "/v1/"


def serving(model: str, path: str, up: Sequence[UpstreamFacts], down: Sequence[UpstreamFacts]) -> list[UpstreamFacts]:
    """The upstreams that may get a request, of those that are `up`; `down`: what is known of those that are not.

    Those that list its model. For a name that only one that is down lists: none. For no name, or one that nobody lists:
    those that have the path and take any name, as long as they run the same model as the first of them in the settings,
    so that it is always the same model that answers; else whoever is up, and its own error tells the client more.
    """
    named = [one for one in up if model and model in one.models]
    if named:
        return [one for one in named if has_path(path, one)] or named
    if model and any(model in one.models for one in down):
        return []
    left = [one for one in up if has_path(path, one)] or list(up)
    left = [one for one in left if one.capabilities.native or not one.models] or left
    first = min(left, key=lambda one: (one.rank, one.name), default=None)
    return [one for one in left if first is not None and _runs_the_same(one, first)]


def answering(model: str, known: Sequence[UpstreamFacts]) -> str:
    """The name of the model that answers a request for `model`: llama-server answers to any name with its only one, so
    that two clients who name it differently share its slots."""
    found = next(iter(serving(model, "", known, ())), None)
    return found.model if found is not None and found.capabilities.native and found.model else model


def template_of(model: str, known: Sequence[UpstreamFacts]) -> TemplateFacts:
    """What is known of the template of the model that answers a request for `model`."""
    found = next(iter(serving(model, "", known, ())), None)
    return found.template if found is not None else TemplateFacts()


def is_listed(model: str, upstreams: Sequence[UpstreamFacts]) -> bool:
    return any(model in one.models for one in upstreams)


def has_path(path: str, upstream: UpstreamFacts) -> bool:
    """llama-server knows nothing below /api/, Ollama nothing but that and /v1/, nor do others (`/completion`,
    `/tokenize`, `/props`)."""
    if not path or path.startswith(_COMMON_PATHS):
        return True
    return upstream.kind == "ollama" if path.startswith(_OLLAMA_PATHS) else upstream.kind == "llama-server"


def _runs_the_same(one: UpstreamFacts, other: UpstreamFacts) -> bool:
    if one.model and other.model:
        return one.model == other.model
    return one.models == other.models
