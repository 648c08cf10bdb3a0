"""Arms: stable for a conversation, of the size asked for, and none outside a canary."""

from __future__ import annotations

from typing import Any

import pytest

from prefixproxy.canary import Arm, ReuseMode
from prefixproxy.types import Api

HALF = ReuseMode("canary", 0.5)


def turn(first: str, *more: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate((first, *more))]
    return {"messages": [{"role": "system", "content": f"Now it is {len(more)}"}, *messages]}


def arms(mode: ReuseMode, n: int = 400) -> list[Arm | None]:
    return [mode.arm(Api.CHAT, turn(f"task {i}"), "", "f") for i in range(n)]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_an_arm_has_the_size_that_was_asked_for(fraction: float) -> None:
    share = arms(ReuseMode("canary", fraction)).count(Arm.ON) / 400
    assert abs(share - fraction) < 0.06


def test_all_or_none_is_possible() -> None:
    assert set(arms(ReuseMode("canary", 0.0))) == {Arm.OFF}
    assert set(arms(ReuseMode("canary", 1.0))) == {Arm.ON}


def test_a_larger_fraction_keeps_whom_a_smaller_one_had() -> None:
    small, large = arms(ReuseMode("canary", 0.2)), arms(ReuseMode("canary", 0.4))
    assert all(b is Arm.ON for a, b in zip(small, large, strict=True) if a is Arm.ON)


def test_a_conversation_keeps_its_arm_though_its_head_changes() -> None:
    for number in range(50):
        first = HALF.arm(Api.CHAT, turn(f"task {number}"), "", "before")
        assert HALF.arm(Api.CHAT, turn(f"task {number}", "done", "more"), "", "after") is first


def test_a_name_given_by_the_client_counts_before_all_else() -> None:
    seen = {HALF.arm(Api.CHAT, turn(f"task {i}"), "lane", str(i)) for i in range(30)}
    assert len(seen) == 1
    assert {HALF.arm(Api.CHAT, turn("task"), f"lane {i}", "f") for i in range(30)} == {Arm.ON, Arm.OFF}


def test_a_prompt_without_messages_goes_by_its_family() -> None:
    assert {HALF.arm(Api.COMPLETION, {"prompt": f"text {i}"}, "", "f") for i in range(30)} in ({Arm.ON}, {Arm.OFF})
    assert {HALF.arm(Api.COMPLETION, {"prompt": "text"}, "", f"f{i}") for i in range(30)} == {Arm.ON, Arm.OFF}
    assert HALF.arm(Api.RESPONSES, {"input": "text"}, "", "f") is HALF.arm(Api.RESPONSES, {"input": []}, "", "f")


def test_there_are_arms_only_in_a_canary_and_only_where_the_server_can_be_asked() -> None:
    assert set(arms(ReuseMode("on"))) == set(arms(ReuseMode("off"))) == {None}
    assert ReuseMode("canary", 0.0).arm(Api.MESSAGES, turn("task"), "", "f") is None


@pytest.mark.parametrize(
    ("mode", "api", "arm", "reuses"),
    [
        ("on", Api.CHAT, None, True),
        ("off", Api.CHAT, None, False),
        ("off", Api.MESSAGES, None, True),
        ("canary", Api.CHAT, Arm.ON, True),
        ("canary", Api.CHAT, Arm.OFF, False),
        ("canary", Api.MESSAGES, None, True),
    ],
)
def test_who_reuses(mode: Any, api: Api, arm: Arm | None, reuses: bool) -> None:
    assert ReuseMode(mode).reuses(api, arm) is reuses
