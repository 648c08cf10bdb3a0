"""A canary on the real engine: one arm reuses, the other evaluates everything, and both are told apart."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from running_engine import RunningEngine
from running_proxy import proxy_in_thread

from prefixproxy.canary import Arm, ReuseMode
from prefixproxy.types import Api

HEAD = {"role": "system", "content": "You are a careful reader. " + "Consider every clause on its own. " * 60}
CHAT = "/v1/chat/completions"


def task_in(arm: Arm) -> str:
    """A first user message of that arm."""
    mode = ReuseMode("canary", 0.5)
    tasks = (f"Task {i}" for i in range(100))
    return next(one for one in tasks if mode.arm(Api.CHAT, {"messages": [user(one)]}, "", "") is arm)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(url: str, *messages: dict[str, Any]) -> httpx.Response:
    body = {"messages": [HEAD, *messages], "max_tokens": 8, "temperature": 0, "stream": False}
    return httpx.post(url + CHAT, json=body, timeout=60)


@pytest.mark.parametrize("arm", [Arm.ON, Arm.OFF])
def test_a_conversation_reuses_in_its_arm_only(engine: RunningEngine, arm: Arm) -> None:
    task = task_in(arm)
    with proxy_in_thread(engine.url, reuse__mode="canary", reuse__canary_fraction=0.5) as proxy:
        first = ask(proxy.url, user(task))
        said = first.json()["choices"][0]["message"]
        second = ask(proxy.url, user(task), said, user("Go on"))
        assert {first.status_code, second.status_code} == {200}
        newest, oldest = httpx.get(f"{proxy.url}/prefixproxy/requests").json()["requests"]
        metrics = httpx.get(f"{proxy.url}/metrics").text
    assert (newest["arm"], oldest["arm"]) == (arm, arm)
    assert newest["expected_cached"] == newest["cache_n"] or arm is Arm.ON
    if arm is Arm.ON:
        assert newest["cache_n"] > 0.8 * oldest["prompt_tokens"]
    else:
        assert (oldest["cache_n"], newest["cache_n"]) == (0, 0)
        assert newest["miss_reason"] == "reuse_off"
        assert "prefixproxy_warmups_total{" not in metrics
    assert f'prefixproxy_canary_requests_total{{arm="{arm}",outcome="ok"}} 2.0' in metrics
    assert f'prefixproxy_canary_cached_ratio_count{{arm="{arm}"}} 2.0' in metrics
    assert f'prefixproxy_canary_answer_tokens_count{{arm="{arm}"}} 2.0' in metrics
