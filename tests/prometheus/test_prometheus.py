"""Debian's Prometheus on the real proxy under real traffic: every expression we ship returns data, or is known not to.

One run for all of it: the engine with a tiny model, the proxy, and Prometheus with the deployed configuration, only
its targets and intervals changed.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prom import RULES, Expression, dashboard_expressions, rule_expressions, tool
from running_engine import RunningEngine
from running_proxy import RunningProxy, running_proxy

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

PATIENCE_S = 60.0
CHAT = "/v1/chat/completions"
BRIEFING = " ".join(f"Rule {n}: sheet {n} lies in drawer {n * 7 % 23}, scale one to {n}000." for n in range(40))
GRAFANA = {"$__rate_interval": "30s", "$__range": "30s", "$upstream": ".*", "$model": ".*"}

EMPTY = {
    "PrefixproxyDown": "nothing is down",
    "PrefixproxyUpstreamDown": "nothing is down",
    "PrefixproxyHitRateFell": "there is no last day to compare with",
    "PrefixproxyQueueGrowing": "the queue is short",
    "PrefixproxyRefusing": "nothing is refused",
    "PrefixproxyForksFailing": "every fork goes through",
    "PrefixproxyReuseOff": "reuse is on",
    "overview: Canary: requests that failed A": "there is no canary",
    "overview: Canary: time to first token A": "there is no canary",
    "overview: Canary: share from the cache A": "there is no canary",
    "overview: Canary: length of answers A": "there is no canary",
    "context: Refused for their length A": "every prompt fits; a model's series begins with its first refusal",
}
"""Expressions that return nothing on a healthy proxy, and why."""
NOT_BORN = {"prefixproxy_context_rejected_total", "prefixproxy_canary_requests_total"} | {
    f"prefixproxy_canary_{name}_{part}"
    for name in ("ttft_seconds", "cached_ratio", "answer_tokens")
    for part in ("bucket", "sum", "count")
}
"""The metrics in them that have no series yet."""


class Prometheus:
    """A running one, by its HTTP API."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=10)

    async def data(self, path: str, **params: str) -> Any:
        answer = await self._client.get(f"/api/v1/{path}", params=params)
        assert answer.status_code == 200, f"{params}: {answer.text}"
        return answer.json()["data"]

    async def values(self, expression: str) -> list[float]:
        found = (await self.data("query", query=expression))["result"]
        return [float(series["value"][1]) for series in found]

    async def is_ready(self) -> bool:
        try:
            return (await self._client.get("/-/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def close(self) -> None:
        await self._client.aclose()


@asynccontextmanager
async def prometheus(target: str, folder: Path) -> AsyncIterator[Prometheus]:
    """Prometheus with the deployed configuration, scraping `target` each second."""
    config = yaml.safe_load((RULES / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        for static in job["static_configs"]:
            static["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        tool("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    )
    running = Prometheus(f"http://{address}")
    try:
        await until(running.is_ready)
        yield running
    finally:
        await running.close()
        process.terminate()
        await process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(condition: Callable[[], Any]) -> None:
    """Until the (async) condition holds, for what no event tells."""
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.2)


async def wave(running: RunningProxy, number: int) -> None:
    """Six lanes on one briefing with a clock in its first line, more than there are slots; then one more turn. Last a
    request that forbids reuse: a miss in every wave, whatever the lanes find."""
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:

        async def lane(n: int) -> None:
            system = f"Current time: 2026-11-29 10:{number:02d}:{n:02d}\nYou keep the archive. {BRIEFING}"
            said: list[dict[str, Any]] = [{"role": "system", "content": system}]
            for turn in range(2):
                said.append({"role": "user", "content": f"Lane {n}, turn {turn}, wave {number}: where is sheet {n}?"})
                body = {"messages": said, "max_tokens": 2, "temperature": 0}
                answer = await client.post(CHAT, json=body)
                assert answer.status_code == 200, answer.text
                said.append(answer.json()["choices"][0]["message"])

        await asyncio.gather(*map(lane, range(6)))
        whole = {"messages": [{"role": "system", "content": BRIEFING}, {"role": "user", "content": f"Wave {number}?"}]}
        answer = await client.post(CHAT, json={**whole, "max_tokens": 2, "cache_prompt": False})
        assert answer.status_code == 200, answer.text


def expressions() -> list[Expression]:
    shown = dashboard_expressions()
    for variable, value in GRAFANA.items():
        shown = [Expression(each.where, each.text.replace(variable, value)) for each in shown]
    return shown + rule_expressions()


async def without_data(server: Prometheus, asked: Sequence[Expression]) -> list[Expression]:
    return [each for each in asked if not await server.values(each.text)]


async def test_every_expression_returns_data_or_is_known_not_to(
    engine_factory: Callable[..., RunningEngine], tmp_path: Path
) -> None:
    tool("prometheus")
    asked = expressions()
    assert set(EMPTY) <= {each.where for each in asked}
    engine = engine_factory(parallel=4, ctx=4 * 4096)
    async with (
        running_proxy(engine.url, admission__root_threshold=0.001) as running,
        prometheus(running.url.removeprefix("http://"), tmp_path) as server,
    ):
        # A rate needs two samples of a series, and one that moved while it was watched.
        await wave(running, 0)
        await until(lambda: server.values("sum_over_time(prefixproxy_forks_total[30s])"))
        await wave(running, 1)
        pending = asked
        async with asyncio.timeout(PATIENCE_S):
            while {each.where for each in pending} != set(EMPTY):
                await asyncio.sleep(1)
                pending = await without_data(server, pending)
                print("no data yet:", [each.where for each in pending if each.where not in EMPTY])

        for each in pending:
            for name in each.metrics - NOT_BORN:
                assert await server.values(f"count({name})"), f"{each.where}: nobody exposes {name}"
        await check_values(server)
        await check_health(server)


async def check_values(server: Prometheus) -> None:
    """A few of the numbers, so that data is not only there but right."""
    (hits,) = await server.values("model:prefixproxy_hit_ratio:rate15m")
    assert 0.5 < hits < 1, "twelve lanes and their second turns share one briefing"
    for source, engine in (("cached", "prompt_tokens_cached_total"), ("evaluated", "prompt_tokens_total")):
        (ours,) = await server.values(f'sum(prefixproxy_prompt_tokens_total{{source="{source}"}})')
        assert [ours] == await server.values(f"llamacpp:{engine}")
    assert all(math.isfinite(value) for value in await server.values("prefixproxy_slot_tokens"))


async def check_health(server: Prometheus) -> None:
    """Both targets are scraped, in OpenMetrics, and every rule evaluates."""
    targets = (await server.data("targets"))["activeTargets"]
    assert {(t["labels"]["job"], t["health"]) for t in targets} == {("prefixproxy", "up"), ("llama-server", "up")}
    rules = [rule for group in (await server.data("rules"))["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert len(rules) == len(rule_expressions())
    metadata = await server.data("metadata", metric="prefixproxy_upstream")
    assert {entry["type"] for entries in metadata.values() for entry in entries} == {"info"}, "that is OpenMetrics only"
