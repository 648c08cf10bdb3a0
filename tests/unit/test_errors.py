"""Each error in the shape of the API that was called."""

from __future__ import annotations

import pytest

from prefixproxy.errors import BadRequest, ContextLengthExceeded, Rejected
from prefixproxy.reply import error_event


def test_openai_clients_get_openais_envelope() -> None:
    assert BadRequest("no good").envelope("/v1/chat/completions") == {
        "error": {
            "message": "no good",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_request",
            "source": "prefixproxy",
        }
    }


def test_anthropic_clients_get_theirs() -> None:
    failure = Rejected("full", code="queue_full", status=429, retry_after_s=3)
    assert failure.envelope("/v1/messages") == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "full", "code": "queue_full", "source": "prefixproxy"},
    }


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/tags"])
def test_ollama_clients_get_a_bare_message(path: str) -> None:
    assert BadRequest("no good").envelope(path) == {
        "error": "no good",
        "code": "invalid_request",
        "source": "prefixproxy",
    }


def test_numbers_are_part_of_the_error() -> None:
    failure = ContextLengthExceeded("too long", n_prompt_tokens=5000, n_ctx_slot=4096)
    error = failure.envelope("/v1/chat/completions")["error"]
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx_slot"]) == ("context_length_exceeded", 5000, 4096)


@pytest.mark.parametrize(("wait_s", "said"), [(0.2, b"1"), (1.0, b"1"), (1.1, b"2"), (7.0, b"7")])
def test_retry_after_is_whole_seconds_and_never_too_early(wait_s: float, said: bytes) -> None:
    assert (b"retry-after", said) in Rejected("full", retry_after_s=wait_s).headers()


@pytest.mark.parametrize(
    ("path", "start", "end"),
    [
        ("/v1/chat/completions", b"data: {", b"}\n\n"),
        ("/v1/messages", b"event: error\ndata: {", b"}\n\n"),
        ("/v1/responses", b"event: response.failed\ndata: {", b"}\n\n"),
    ],
)
def test_in_a_stream_an_error_is_an_event_of_that_stream(path: str, start: bytes, end: bytes) -> None:
    event = error_event(path, BadRequest("no good").envelope(path))
    assert event.startswith(start)
    assert event.endswith(end)
