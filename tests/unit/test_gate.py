"""Keys let tenants in, and a key meant for the proxy never travels on."""

from __future__ import annotations

from typing import Any

import pytest

from prefixproxy.errors import InvalidApiKey
from prefixproxy.gate import Gate

HEADERS = [
    (b"host", b"proxy"),
    (b"authorization", b"Bearer team-key"),
    (b"x-prefixproxy-lane", b"seven"),
    (b"x-other", b"kept"),
]


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"headers": list(headers)}


def test_without_keys_everybody_may_in_and_credentials_travel_on() -> None:
    gate = Gate({})
    assert gate.tenant(scope()) == ""
    assert gate.outgoing(HEADERS) == [(b"authorization", b"Bearer team-key"), (b"x-other", b"kept")]


@pytest.mark.parametrize("given", [(b"authorization", b"Bearer team-key"), (b"x-api-key", b"team-key")])
def test_a_key_names_its_tenant_and_stays_here(given: tuple[bytes, bytes]) -> None:
    gate = Gate({"other": "b", "team-key": "a"})
    assert gate.tenant(scope(given)) == "a"
    assert gate.outgoing(HEADERS) == [(b"x-other", b"kept")]


@pytest.mark.parametrize(
    "given", [(), ((b"authorization", b"Bearer wrong"),), ((b"authorization", b"Basic team-key"),)]
)
def test_no_key_or_a_wrong_one_is_refused(given: tuple[tuple[bytes, bytes], ...]) -> None:
    with pytest.raises(InvalidApiKey) as caught:
        Gate({"team-key": "a"}).tenant(scope(*given))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
def test_the_scheme_of_a_key_has_no_case(scheme: bytes) -> None:
    assert Gate({"team-key": "a"}).tenant(scope((b"authorization", scheme + b"  team-key "))) == "a"


@pytest.mark.parametrize("given", ["t\u00e9am-key".encode("latin-1"), "t\u00e9am-key".encode(), b"\xff\x00", b""])
@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
def test_a_key_of_any_bytes_is_compared_not_decoded(name: bytes, given: bytes) -> None:
    with pytest.raises(InvalidApiKey):
        Gate({"team-key": "a"}).tenant(scope((name, b"Bearer " + given if name == b"authorization" else given)))
