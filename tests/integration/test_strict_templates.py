"""A template that takes one system message, at the front, and turns that alternate: refused as the server refuses, or
folded (real engine)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_engine import RunningEngine, running_engine
from running_proxy import RunningProxy, proxy_in_thread

from prefixproxy.engine import EngineSettings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

STRICT = r"""{%- for message in messages %}{%- if message.role == "system" and not loop.first %}
{{- raise_exception("System message must be at the beginning.") }}{%- endif %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
USER = {"role": "user", "content": "Where is sheet 3? " * 20}
REMINDER = {"role": "system", "content": "The drawers were moved."}
ANSWER = {"role": "assistant", "content": "In drawer 4."}
MORE = {"role": "user", "content": "And sheet 5?"}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be brief."}, USER, REMINDER]}),
    "messages": ("/v1/messages?beta=true", {"system": "Be brief.", "messages": [USER, REMINDER]}),
    "responses": ("/v1/responses", {"input": [{"role": "developer", "content": f"Rule {n}"} for n in (1, 2)] + [USER]}),
}


@pytest.fixture(scope="module")
def strict(tiny_model: Path) -> Iterator[RunningEngine]:
    extra: dict[str, int | str] = {"cpuparams.n_threads": 1, "chat_template": STRICT}
    with running_engine(EngineSettings(tiny_model, parallel=2, ctx=2 * 2048, extra=extra)) as running:
        yield running


@pytest.fixture(scope="module")
def folding(strict: RunningEngine) -> Iterator[RunningProxy]:
    with proxy_in_thread(strict.url, stabilise__compat=True) as running:
        yield running


def asked(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json={"max_tokens": 2, "temperature": 0, **body}, timeout=120)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "json"])
@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
def test_what_the_template_refuses_is_the_servers_answer_or_folded(
    strict: RunningEngine, folding: RunningProxy, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = {**body, "stream": stream}
    direct = asked(strict.url, path, body)
    assert direct.status_code >= 400
    with proxy_in_thread(strict.url) as plain:
        refused = asked(plain.url, path, body)
    assert (refused.status_code, refused.content) == (direct.status_code, direct.content)
    assert asked(folding.url, path, body).status_code == 200


def test_a_folded_conversation_keeps_its_prefix(folding: RunningProxy) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER, REMINDER]
    first = asked(folding.url, "/v1/chat/completions", {"messages": messages}).json()["usage"]
    more = [*messages, ANSWER, MORE]
    second = asked(folding.url, "/v1/chat/completions", {"messages": more}).json()["usage"]
    # All but the end of the generation prompt, which the answer that was sent back differs in.
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 1


def test_what_would_be_sent_is_explained(folding: RunningProxy) -> None:
    question = {"path": "/v1/chat/completions", "body": {"messages": [USER, REMINDER]}}
    told = httpx.post(f"{folding.url}/prefixproxy/explain", json=question, timeout=60).json()
    [only] = told["body"]["messages"]
    assert only["content"].startswith(USER["content"])
    assert REMINDER["content"] in only["content"]
