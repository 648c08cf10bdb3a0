"""What the proxy's own endpoints say to a question they cannot answer."""

from __future__ import annotations

import httpx
import pytest
from running_proxy import proxied_stub

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
