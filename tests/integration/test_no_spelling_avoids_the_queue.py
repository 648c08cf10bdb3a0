"""Whatever way a path is spelled: what the server generates for has waited for its slot."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running_engine import RunningEngine
from running_proxy import RunningProxy, proxied_stub, proxy_in_thread
from test_targets_that_are_no_path import answer_to

from prefixproxy.target import PathReader
from prefixproxy.types import API_OF_PATH

BODY = b'{"messages":[{"role":"user","content":"hi"}],"prompt":"hi","input":"hi","max_tokens":1,"n_predict":1}'
SPELLINGS = [
    "/v1/../v1/chat/completions",
    "//v1/chat/completions",
    "/%2e%2e/v1/chat/completions",
    "/v1/chat/completions/",
    "/v1/chat/completions;x",
    "/v1/chat/completion%73",
    "/v1/chat%2Fcompletions",
    "/v1/chat/completion%u0073",
    "/v1/chat/completion%2573",
    "/v1/chat/completions%00",
    "/V1/chat/completions",
    "/v1/chat/completions?a=%zz&b=../..&&c",
]


@pytest.mark.anyio
@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_another_spelling_waits_for_a_slot_and_arrives_as_it_was_written(spelling: str) -> None:
    async with proxied_stub() as (stub, running):
        await answer_to(running.url, request(spelling))
        sent = [seen.target for seen in stub.requests if seen.method == "POST" and b'"input"' in seen.body]
        records = running.proxy.parts.telemetry.journal.newest(10)
    assert set(sent) == {spelling}
    assert [record.path for record in records] == ["/v1/chat/completions"]


@pytest.fixture(scope="module")
def proxied_engine(engine: RunningEngine) -> Iterator[RunningProxy]:
    with proxy_in_thread(engine.url) as running:
        yield running


def request(target: str) -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode("latin-1") + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def ask(url: str, target: str) -> tuple[int, bytes]:
    """Status and everything else of the answer to a request written by hand."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request(target))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(answer[9:12]), answer


def respelled(character: str) -> st.SearchStrategy[str]:
    code = ord(character)
    ways = [character] * 12 + [f"%{code:02x}", f"%{code:02X}", f"%u{code:04x}", f"%25{code:02x}", character.upper()]
    if character == "/":
        ways += ["//", "/./", "/x/../", "\\", "/%2e%2e/", ";a=1/", "/%2e/"]
    return st.sampled_from(ways)


@st.composite
def spellings(draw: st.DrawFn) -> str:
    path = draw(st.sampled_from(sorted(API_OF_PATH)))
    start = draw(st.sampled_from([""] * 6 + ["/..", "/.", "/", "/x/..", "/%00", "http://x"]))
    ends = ["/", ";x", "%00", "%00x", "%20", "%0a", "%", "%3fa", "%23", "/.", "?", "?a"]
    end = draw(st.sampled_from([""] * 6 + ends))
    return start + "".join(draw(respelled(character)) for character in path) + end


@pytest.mark.engine
@settings(max_examples=120, deadline=None)
@given(target=spellings())
def test_no_spelling_generates_without_a_lease(
    engine: RunningEngine, proxied_engine: RunningProxy, target: str
) -> None:
    """The server is asked directly too: what it takes for a generating path, the proxy must take for one."""
    status, _ = ask(engine.url, target)
    through, answered = ask(proxied_engine.url, target)
    if through == 200 or status != 404:
        assert b"x-prefixproxy-queue-ms" in answered or b"Invalid HTTP request" in answered


@pytest.mark.parametrize("path", sorted(API_OF_PATH))
def test_every_generating_path_means_itself(path: str) -> None:
    assert PathReader(API_OF_PATH).meant(path.encode()) == path
