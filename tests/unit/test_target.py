"""Which path a target leads to, whatever its spelling."""

from __future__ import annotations

import pytest

from prefixproxy.target import PathReader

CHAT = "/v1/chat/completions"
READER = PathReader([CHAT, "/completion", "/embeddings"])


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        (b"/v1/chat/completions", CHAT),
        (b"/completion", "/completion"),
        (b"/v1/chat/completion%73", CHAT),
        (b"/v1%2Fchat%2fcompletions", CHAT),
        (b"/v1/chat/completion%u0073", CHAT),
        (b"/v1/chat/completion%2573", CHAT),
        (b"/v1/../v1/chat/completions", CHAT),
        (b"/../../v1/chat/completions", CHAT),
        (b"/v1/%2e%2E/v1/./chat/completions", CHAT),
        (b"//v1///chat/completions", CHAT),
        (b"/v1/chat/completions/", CHAT),
        (b"/v1/chat/completions;a=1/", CHAT),
        (b"/v1;x/chat/completions", CHAT),
        (b"/v1\\chat\\completions", CHAT),
        (b"/V1/Chat/Completions", CHAT),
        (b"/v1/chat/completions%00.html", CHAT),
        (b"/v1/chat/completions%3Fa=1", CHAT),
        (b"/v1/chat/completions#x", CHAT),
        (b"/v1/chat/completions%20", CHAT),
        (b"/v1/chat/completions%0a", CHAT),
        (b"/embedding%73", "/embeddings"),
    ],
)
def test_a_spelling_that_some_server_takes_for_the_path(target: bytes, meant: str) -> None:
    assert READER.meant(target) == meant


@pytest.mark.parametrize(
    "target",
    [
        b"/",
        b"*",
        b"",
        b"/v1/models",
        b"/v1/chat/completions/input_tokens",
        b"/v1/chat/completions/..",
        b"/x/v1/chat/completions",
        b"/v1/chat/completions%",
        b"/v1/chat/completions%zz",
        b"/v1/chat/completions%ff",
        b"/v1/chat-completions",
    ],
)
def test_what_no_server_takes_for_one_of_the_paths(target: bytes) -> None:
    assert READER.meant(target) is None
