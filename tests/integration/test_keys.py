"""Which paths need a key is what docs/reference/http.md says: all but four."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from running_proxy import proxied_stub

pytestmark = pytest.mark.anyio

HTTP = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
OPEN = {"/metrics", "/healthz", "/readyz", "/prefixproxy/"}
"""The last one is the page itself, which holds no data."""


def documented() -> set[str]:
    """The paths of the proxy's own that GET knows, with a name or an id filled in."""
    paths = re.findall(r"^\| `GET`?,? ?(?:`PATCH )?(/[^`]*)` \|", HTTP, flags=re.MULTILINE)
    return {re.sub(r"\{\w+\}", "local", path) for path in paths}


async def test_every_path_but_the_open_ones_wants_a_key() -> None:
    assert "every path but `/metrics`, `/healthz`, `/readyz` and the page itself, which holds no data," in HTTP
    assert documented() > OPEN
    async with (
        proxied_stub(server__api_keys=["secret"]) as (stub, running),
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        before = len(stub.requests)
        for path in documented() - OPEN | {"/v1/models", "/health", "/slots"}:
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert [seen.path for seen in stub.requests[before:] if seen.path == "/v1/models"] == []
        for path in OPEN:
            assert (await client.get(path)).status_code == 200, path
