"""What the proxy's own endpoints say to a question they cannot answer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running_proxy import proxied_stub, running_proxy
from threads import in_thread

from prefixproxy.types import API_OF_PATH

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/prefixproxy/wat", 404, "not_found"),
        ("GET", "/prefixproxy/requests/none/such", 404, "not_found"),
        ("POST", "/prefixproxy/status", 405, "method_not_allowed"),
        ("DELETE", "/prefixproxy/admission", 405, "method_not_allowed"),
        ("POST", "/metrics", 405, "method_not_allowed"),
        ("GET", "/prefixproxy/requests?format=wat", 400, "invalid_request"),
        ("GET", "/prefixproxy/requests?limit=%C2%B2", 400, "invalid_request"),
        ("GET", "/prefixproxy/requests?limit=" + "9" * 5000, 400, "invalid_request"),
        ("GET", "/prefixproxy/trend?since=nan", 400, "invalid_request"),
    ],
)
async def test_errors_have_the_shape_of_all_others(method: str, path: str, status: int, code: str) -> None:
    async with proxied_stub() as (_stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    error = answer.json()["error"]
    assert (error["code"], error["source"]) == (code, "prefixproxy")
    if status == 405:
        assert set(answer.headers["allow"].split(", ")) <= {"GET", "HEAD", "PATCH"}


async def test_a_format_that_is_none_is_named_with_those_that_are() -> None:
    async with proxied_stub() as (_stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.get("/prefixproxy/requests?format=wat")
        assert answer.json()["error"]["message"] == "format: one of json, jsonl"
        assert "requests" in (await client.get("/prefixproxy/requests?format=json")).json()


@pytest.mark.parametrize(
    "body",
    [b'{"side_slots": 2}', b'{"queue_timeout": 1e999}', b'{"\\ud800": 1}', b'{"queue_limit": 1' + b"0" * 500 + b"}"],
)
async def test_admission_refuses_what_cannot_be(body: bytes) -> None:
    async with proxied_stub() as (_stub, running), httpx.AsyncClient(base_url=running.url) as client:
        before = (await client.get("/prefixproxy/admission")).json()
        answer = await client.patch("/prefixproxy/admission", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_setting")
        assert answer.json()["error"]["message"].startswith("admission")
        assert (await client.get("/prefixproxy/admission")).json() == before


EXPLAIN = "/prefixproxy/explain"
CLOCK = b'{"role":"system","content":"Current time: 2026-03-14 20:37:19\\nYou are the clerk.\\nBe brief."}'


SEED = b'"seed":123456789012345678901234567890'


def with_clock(spelled: bytes) -> bytes:
    return b'{"messages":[' + CLOCK + b',{"role":"user","content":"Hi"}], ' + spelled + b" }"


async def explained(client: httpx.AsyncClient, body: bytes) -> bytes:
    """The body that explain says is sent."""
    answer = await client.post(EXPLAIN, content=b'{"path":"/v1/chat/completions","body":' + body + b"}")
    assert answer.status_code == 200
    return answer.content.removeprefix(b'{"body":').partition(b',"changed":true,')[0]


@pytest.mark.parametrize("spelled", [SEED, b'"top_p":1e999', b'"top_p":1.0E-2', b'"a":1,"a":2', b'"stop":"\\ud800"'])
async def test_explain_keeps_the_spelling_of_the_client(spelled: bytes) -> None:
    async with proxied_stub() as (_stub, running), httpx.AsyncClient(base_url=running.url) as client:
        assert (await explained(client, with_clock(spelled))).endswith(b"], " + spelled + b" }")


async def test_explain_shows_the_bytes_that_are_sent() -> None:
    """All but what steers the server, which is put behind them."""
    async with proxied_stub() as (stub, running), httpx.AsyncClient(base_url=running.url) as client:
        shown = await explained(client, with_clock(SEED))
        await client.post("/v1/chat/completions", content=with_clock(SEED))
    assert stub.generating()[0].body.startswith(shown.removesuffix(b" }"))
    assert CLOCK not in shown


@pytest.mark.parametrize("path", [["a"], {"a": 1}, None, 1, "", "/v1/chat", "\ud800"])
async def test_explain_refuses_a_path_that_is_none(path: object) -> None:
    asked = json.dumps({"path": path, "body": {"messages": []}})
    async with proxied_stub() as (_stub, running), httpx.AsyncClient(base_url=running.url) as client:
        answer = await client.post(EXPLAIN, content=asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


SCALARS = st.sampled_from([None, True, 0, 10**30, -1.5, 1e300, "", "a", "\ud800", "system", "text", "function"])
KEYS = st.sampled_from(
    "messages role content type text tools functions function name arguments tool_calls input output call_id system"
    " instructions prompt suffix images context model raw input_prefix input_extra chat_template_kwargs parameters"
    " required properties \ud800".split(" ")
)
ODD = st.recursive(SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=5), max_leaves=25)
MESSAGES = st.lists(st.dictionaries(KEYS, ODD, max_size=4) | ODD, max_size=4)
BODIES = st.dictionaries(KEYS, ODD, max_size=6) | st.builds(
    lambda messages, more: {**more, "messages": messages, "input": messages}, MESSAGES, st.dictionaries(KEYS, ODD)
)


@given(st.sampled_from(sorted(API_OF_PATH)), BODIES)
@settings(deadline=None)
def test_explain_never_fails_on_odd_bodies(explaining: httpx.Client, path: str, body: object) -> None:
    answer = explaining.post(EXPLAIN, content=json.dumps({"path": path, "body": body}))
    assert answer.status_code == 200
    assert answer.json()["changed"] in (True, False)


@pytest.fixture(scope="module")
def explaining() -> Iterator[httpx.Client]:
    """A client of a proxy in a thread; what it explains needs no upstream that is up."""
    with (
        in_thread("explaining", lambda: running_proxy("http://127.0.0.1:9", wait_ready=False)) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        yield client
