"""A web page that has its own name resolve to the proxy is told no; everything else that calls it by a name is not."""

from __future__ import annotations

import pytest

from prefixproxy.errors import BadRequest
from prefixproxy.hosts import Hosts

PAGE = (b"origin", b"http://evil.example")
BROWSERS = [PAGE, (b"sec-fetch-site", b"same-origin"), (b"user-agent", b"Mozilla/5.0 (X11; Linux) Firefox/140.0")]


def asked(host: bytes, *more: tuple[bytes, bytes], names: tuple[str, ...] = ()) -> None:
    Hosts(names).require_known([(b"host", host), (b"accept", b"*/*"), *more])


@pytest.mark.parametrize("sign", BROWSERS, ids=lambda sign: sign[0].decode())
@pytest.mark.parametrize(
    "host", [b"evil.example:8100", b"EVIL.example.", b"127.0.0.1.evil.example", b"localhost.evil.io"]
)
def test_a_browser_that_calls_it_by_a_public_name_is_refused(host: bytes, sign: tuple[bytes, bytes]) -> None:
    with pytest.raises(BadRequest) as failure:
        asked(host, sign)
    assert (failure.value.status, failure.value.code) == (403, "host_not_allowed")
    assert "server.hosts" in failure.value.message


@pytest.mark.parametrize(
    "host",
    [
        b"127.0.0.1:8100",
        b"127.0.0.1",
        b"192.168.1.7:8100",
        b"[::1]:8100",
        b"localhost:8100",
        b"LocalHost",
        b"page.localhost:8100",
        b"prefixproxy:8100",
        b"box.local:8100",
        b"box.lan",
        b"box.home.arpa",
        b"host.docker.internal:8100",
        b"prefixproxy.agents.svc.cluster.local:8100",
        b"",
    ],
)
def test_a_browser_that_calls_it_by_an_address_or_a_local_name_is_answered(host: bytes) -> None:
    for sign in BROWSERS:
        asked(host, sign)


@pytest.mark.parametrize("agent", [b"python-httpx/0.28", b"openai-node/5", b"curl/8.5", b""])
def test_what_is_no_browser_calls_it_as_it_likes(agent: bytes) -> None:
    asked(b"llm.example.com", (b"user-agent", agent), (b"sec-fetch-mode", b"cors"), (b"accept-language", b"*"))


def test_a_name_of_the_settings_is_allowed() -> None:
    asked(b"LLM.example.com:443", PAGE, names=("llm.Example.com",))
    with pytest.raises(BadRequest):
        asked(b"evil.example", PAGE, names=("llm.example.com",))
