"""A root's tokens are what the server's own renderings share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import orjson
import pytest

from prefixproxy.backends import Backend
from prefixproxy.body import Body
from prefixproxy.chat import Canonical, canonical, cut_at, parse_prompt
from prefixproxy.errors import UpstreamFailed
from prefixproxy.types import Api
from prefixproxy.warming import Rendering, root_tokens, tokens_up_to, with_other_user_text


class LetterServer:
    """Renders messages one after the other, and takes each character for a token."""

    name = "letters"

    def __init__(self) -> None:
        self.rendered: list[str] = []

    async def tokens(self, path: str, body: Mapping[str, Any]) -> list[int]:
        text = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        self.rendered.append(text)
        return [ord(letter) for letter in text]


def lane(system: str, user: str) -> Rendering:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return Rendering("/v1/chat/completions", orjson.dumps({"messages": messages}))


def root_of(*lanes: Rendering) -> str:
    tokens = asyncio.run(root_tokens(cast(Backend, LetterServer()), lanes))
    return "".join(map(chr, tokens))


def test_lanes_share_what_they_have_in_common() -> None:
    assert root_of(lane("rules", "one"), lane("rules", "two"), lane("rules", "ten")) == "<system>rules<user>"
    assert root_of(lane("rules", "brief: one"), lane("rules", "brief: two")) == "<system>rules<user>brief: "


@pytest.mark.parametrize("user", ["Alpha", "beta", ""])
def test_the_root_of_a_single_lane_is_its_head(user: str) -> None:
    assert root_of(lane("rules", user)) == "<system>rules<user>"


def a_chat(*messages: dict[str, Any]) -> tuple[Rendering, Canonical]:
    body = {"messages": list(messages)}
    prompt = parse_prompt(Api.CHAT, Body(orjson.dumps(body), body))
    assert prompt is not None
    form = canonical(prompt)
    return Rendering("/v1/chat/completions", orjson.dumps(body), partial(cut_at, prompt, form)), form


def up_to(one: Rendering, n_bytes: int) -> tuple[str, int]:
    tokens, covered = asyncio.run(tokens_up_to(cast(Backend, LetterServer()), one, n_bytes))
    return "".join(map(chr, tokens)), covered


def test_a_prompt_is_cut_inside_a_text() -> None:
    """The same chat with another text from that byte on shares no more."""
    one, form = a_chat({"role": "system", "content": "rules"}, {"role": "user", "content": "a long document. Why?"})
    at = form.n_bytes - len("Why?")
    assert up_to(one, at) == ("<system>rules<user>a long document. ", at)


def test_a_prompt_is_cut_before_a_tool_call_and_not_in_it() -> None:
    """And says so: of what was asked for only the messages before are there."""
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "write", "arguments": '{"text": "' + "long " * 50 + '"}'},
    }
    one, form = a_chat(
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "write"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    start = form.start_of("assistant[2]")
    assert up_to(one, form.n_bytes - 20) == ("<system>rules<user>write", start)
    assert start < form.n_bytes - 200


def test_a_lane_that_cannot_be_cut_there_has_no_root() -> None:
    with pytest.raises(UpstreamFailed, match="cannot be cut"):
        up_to(lane("rules", "one"), 100)


def test_lanes_without_a_common_token_have_no_root() -> None:
    class Split(LetterServer):
        async def tokens(self, path: str, body: Mapping[str, Any]) -> list[int]:
            self.rendered.append("")
            return [len(self.rendered)]

    with pytest.raises(UpstreamFailed, match="share no token"):
        asyncio.run(root_tokens(cast(Backend, Split()), [lane("a", "b"), lane("c", "d")]))


def test_a_history_is_cut_at_its_first_user_message() -> None:
    body = {
        "tools": [1],
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "A first"}]},
            {"role": "assistant", "content": "x"},
        ],
    }
    assert with_other_user_text(body) == {
        "tools": [1],
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Z"}],
    }


def test_without_a_user_message_there_is_no_head_to_warm() -> None:
    with pytest.raises(UpstreamFailed, match="no head"):
        with_other_user_text({"messages": [{"role": "system", "content": "s"}]})
