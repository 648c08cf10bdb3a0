"""Which upstreams a request may go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from prefixproxy.listing import merged
from prefixproxy.routing import answering, serving, template_of
from prefixproxy.types import Capabilities, TemplateFacts, UpstreamFacts


def llama(name: str, *models: str, rank: int = 0) -> UpstreamFacts:
    return UpstreamFacts(
        name, "llama-server", 2, model=models[0], models=models, capabilities=Capabilities(native=True), rank=rank
    )


SMALL, LARGE, TWIN = llama("s", "small"), llama("l", "large", "big", rank=1), llama("t", "small", rank=2)
OLLAMA = UpstreamFacts("o", "ollama", 1, models=("tiny", "large"), rank=3)
VLLM = UpstreamFacts("v", "openai", 4, model="qwen", models=("qwen",), rank=4)
OPEN = UpstreamFacts("x", "openai", 4, rank=5)
ALL = (SMALL, LARGE, TWIN, OLLAMA, VLLM)
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("model", "path", "up", "names"),
    [
        ("small", CHAT, ALL, "st"),
        ("big", CHAT, ALL, "l"),
        ("large", CHAT, ALL, "lo"),
        ("large", "/api/chat", ALL, "o"),
        ("large", "/completion", ALL, "l"),
        ("tiny", "/completion", ALL, "o"),
        ("qwen", CHAT, ALL, "v"),
        ("gpt-4o", CHAT, ALL, "st"),
        ("", CHAT, ALL, "st"),
        ("", "/completion", (OLLAMA, LARGE), "l"),
        ("", "/api/chat", ALL, "o"),
        ("", "/api/chat", (SMALL, VLLM), "s"),
        ("", CHAT, (VLLM, OLLAMA), "o"),
        ("", CHAT, (LARGE, SMALL), "s"),
        ("gpt-4o", CHAT, (OLLAMA, OPEN), "x"),
        ("small", CHAT, (LARGE, OLLAMA), ""),
        ("big", CHAT, (SMALL, OLLAMA), ""),
        ("small", CHAT, (LARGE, TWIN), "t"),
        ("gpt-4o", CHAT, (), ""),
    ],
)
def test_who_may_get_it(model: str, path: str, up: Sequence[UpstreamFacts], names: str) -> None:
    down = [one for one in ALL if one not in up]
    assert "".join(one.name for one in serving(model, path, up, down)) == names


@pytest.mark.parametrize(
    ("model", "known", "answers"),
    [
        ("gpt-4o", ALL, "small"),
        ("", ALL, "small"),
        ("big", ALL, "large"),
        ("tiny", ALL, "tiny"),
        ("qwen", ALL, "qwen"),
        ("gpt-4o", (OPEN,), "gpt-4o"),
        ("gpt-4o", (), "gpt-4o"),
    ],
)
def test_which_model_answers(model: str, known: Sequence[UpstreamFacts], answers: str) -> None:
    assert answering(model, known) == answers


def test_lists_of_models_are_joined_each_model_once() -> None:
    llama_list = {"object": "list", "data": [{"id": "a", "meta": 1}], "models": [{"name": "a"}]}
    others = {"object": "list", "data": [{"id": "b"}, {"id": "a"}, "?"], "extra": True}
    assert merged([llama_list, others, {"data": None}]) == {
        "object": "list",
        "data": [{"id": "a", "meta": 1}, {"id": "b"}],
        "models": [{"name": "a"}],
        "extra": True,
    }
    assert merged([]) is None


def test_the_template_is_that_of_the_model_that_answers() -> None:
    small, large = TemplateFacts("small: "), TemplateFacts("large: ", shows_tools=False)
    known = (replace(SMALL, template=small), replace(LARGE, template=large), OLLAMA)
    asked = ["small", "big", "tiny", "gpt-4o"]
    assert [template_of(model, known) for model in asked] == [small, large, TemplateFacts(), small]
