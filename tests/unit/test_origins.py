"""Answers of ours allow a web page what the upstream allowed it, and nothing else."""

from __future__ import annotations

from prefixproxy.origins import MAX_ORIGINS, Origins

APP = "http://app.example"
ALLOWED = ((b"access-control-allow-origin", APP.encode()), (b"access-control-allow-credentials", b"true"))


def test_what_an_origin_was_allowed_is_told_it_again() -> None:
    origins = Origins()
    assert origins.of(APP).allowing == ()
    origins.of(APP).learn([(b"Content-Type", b"text/plain"), *((name.title(), value) for name, value in ALLOWED)])
    assert origins.of(APP).allowing == ALLOWED
    assert origins.of("http://other.example").allowing == ()


def test_an_answer_that_allows_nothing_changes_nothing() -> None:
    origins = Origins()
    origins.of(APP).learn(ALLOWED)
    origins.of(APP).learn([(b"content-type", b"text/plain")])
    assert origins.of(APP).allowing == ALLOWED


def test_a_request_of_no_page_is_allowed_nothing() -> None:
    origins = Origins()
    origins.of("").learn(ALLOWED)
    assert origins.of("").allowing == ()


def test_the_least_recently_used_origin_is_forgotten() -> None:
    origins = Origins()
    for number in range(MAX_ORIGINS + 1):
        origins.of(APP).learn(ALLOWED)
        origins.of(f"http://{number}.example").learn([(b"access-control-allow-origin", b"*")])
    assert origins.of(APP).allowing == ALLOWED
    assert origins.of("http://0.example").allowing == ()
