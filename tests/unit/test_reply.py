"""An error is told in whatever way the response still allows."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from prefixproxy.errors import UpstreamFailed
from prefixproxy.reply import Reply

pytestmark = pytest.mark.anyio

FAILURE = UpstreamFailed("it broke")


async def body_of(path: str, content_type: bytes, sent: bytes) -> tuple[bytes, bool]:
    """All that a client gets of a response that fails behind `sent`, and whether it was ended in good order."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    reply = Reply(send, path)
    await reply.start(200, [(b"content-type", content_type)])
    await reply.body(sent)
    await reply.error(FAILURE)
    return b"".join(m["body"] for m in messages[1:]), not messages[-1]["more_body"]


@pytest.mark.parametrize(("sent", "gap"), [(b"data: {}\n\n", b""), (b"data: {}\r\n\r\n", b""), (b'data: {"a', b"\n\n")])
async def test_an_error_is_an_event_of_its_own_also_behind_half_a_one(sent: bytes, gap: bytes) -> None:
    body, ended = await body_of("/v1/chat/completions", b"text/event-stream; charset=utf-8", sent)
    assert ended
    assert body.startswith(sent + gap + b"data: {")
    assert orjson.loads(body.removeprefix(sent + gap).removeprefix(b"data: "))["error"]["code"] == "upstream_error"


@pytest.mark.parametrize("sent", [b'{"done":false}\n', b'{"done'])
async def test_among_lines_of_json_it_is_a_line(sent: bytes) -> None:
    body, ended = await body_of("/api/chat", b"application/x-ndjson", sent)
    assert ended
    *_, last = body.removesuffix(b"\n").split(b"\n")
    assert orjson.loads(last)["code"] == "upstream_error"


async def test_any_other_body_is_left_unfinished() -> None:
    assert await body_of("/v1/models", b"application/json", b'{"data": [') == (b'{"data": [', False)
