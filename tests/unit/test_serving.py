"""The socket and the HTTP server under it, as clients meet them."""

from __future__ import annotations

import socket

from httpx import Limits

from prefixproxy.app import create_app
from prefixproxy.serving import bind, server_of
from prefixproxy.settings import Settings


def test_a_client_may_connect_as_soon_as_the_address_is_told() -> None:
    """The address is printed before the server accepts: whoever reads it and connects at once must not be refused."""
    with bind("127.0.0.1", 0) as listener:
        socket.create_connection(listener.getsockname()).close()


def test_idle_connections_outlive_those_of_clients() -> None:
    """A client that reuses a connection in the moment it is closed loses its request."""
    settings = Settings.model_validate({"state": {"path": ":memory:"}})
    kept = server_of(create_app(settings)).config.timeout_keep_alive
    expiry = Limits().keepalive_expiry
    assert expiry is not None
    assert kept > expiry
    assert kept > 90, "Go's default transport"
