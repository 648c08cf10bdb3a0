"""Finds the exact tokens of a root: what its lanes' prompts have in common when the server's own template renders them.

Rendering and tokenizing run on the server's HTTP threads, beside decoding, and take milliseconds
(docs/explanation/llama-server.md): cheap against any root worth warming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from prefixproxy.backends import Backend
from prefixproxy.errors import UpstreamFailed
from prefixproxy.prefix import shared_length

MAX_RENDERED_LANES = 3
"""Two lanes bound the root from above; a third catches two that happen to start alike."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A chat body as it would be sent upstream, to be rendered and tokenized but not run. `cut_at`: the same with
    another text from that byte of its canonical form on, or from where it can be cut before that, and where that is;
    None if nowhere."""

    path: str
    body: bytes
    cut_at: Callable[[int], tuple[dict[str, Any], int] | None] | None = None


async def root_tokens(backend: Backend, lanes: Sequence[Rendering]) -> list[int]:
    """The longest token prefix that all `lanes` share; of a single lane, the head: what is left of its first user
    message. Raises UpstreamFailed when that is nothing."""
    bodies = [(lane.path, orjson.loads(lane.body)) for lane in lanes[:MAX_RENDERED_LANES]]
    if len(bodies) == 1:
        path, body = bodies[0]
        bodies.append((path, with_other_user_text(body)))
    return await _shared_tokens(backend, bodies)


async def tokens_up_to(backend: Backend, lane: Rendering, n_bytes: int) -> tuple[list[int], int]:
    """The tokens of its first `n_bytes` canonical bytes, or of fewer, and of how many. Raises UpstreamFailed when that
    is nothing."""
    cut = None if lane.cut_at is None else lane.cut_at(n_bytes)
    if cut is None:
        raise UpstreamFailed("a prompt that cannot be cut there has no root to warm")
    body, covered = cut
    return await _shared_tokens(backend, [(lane.path, orjson.loads(lane.body)), (lane.path, body)]), covered


async def _shared_tokens(backend: Backend, bodies: Sequence[tuple[str, dict[str, Any]]]) -> list[int]:
    rendered = [await backend.tokens(path, body) for path, body in bodies]
    shared = min(shared_length(rendered[0], other) for other in rendered[1:])
    if not shared:
        raise UpstreamFailed(f"upstream {backend.name}: the lanes of a root share no token")
    return rendered[0][:shared]


async def whole_tokens(backend: Backend, lanes: Sequence[Rendering]) -> list[int]:
    """All of one prompt but its last token, which the server evaluates again in any case. Raises UpstreamFailed if that
    is nothing, or the lane is gone."""
    for lane in lanes:
        tokens = await backend.tokens(lane.path, orjson.loads(lane.body))
        if len(tokens) > 1:
            return tokens[:-1]
    raise UpstreamFailed(f"upstream {backend.name}: there is no prompt to warm")


def with_other_user_text(body: dict[str, Any]) -> dict[str, Any]:
    """The chat body up to its first user message, and that with another text. Raises UpstreamFailed without one."""
    messages = body.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and message.get("role") == "user":
            other = "Z" if _leading_text(message.get("content")).startswith("A") else "A"
            return {**body, "messages": [*body["messages"][:number], {"role": "user", "content": other}]}
    raise UpstreamFailed("a prompt without a user message has no head to warm")


def _leading_text(content: Any) -> str:
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else ""
