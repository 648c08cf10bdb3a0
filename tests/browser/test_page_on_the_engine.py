"""The page in front of the real engine: a fan-out is warmed once, copied to the other slots, and shown as that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect
from running_engine import RunningEngine
from running_proxy import RunningProxy, running_proxy, until_quiet
from test_page_in_chromium import CHROMIUM, COPIED, browser, opened

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

BRIEFING = " ".join(f"Rule {n}: sheet {n} lies in drawer {n * 7 % 23}, scale one to {n}000." for n in range(60))


@pytest.fixture(autouse=True)
def chromium(request: pytest.FixtureRequest) -> None:
    """The same condition as for the page's other tests."""
    if not CHROMIUM.exists():
        pytest.skip(f"the page is tested in {CHROMIUM} (apt-get install chromium)")


async def lane(running: RunningProxy, number: int) -> None:
    """A lane of a fan-out, with a clock in front, and a second turn."""
    system = f"Current time: 2026-11-29 10:00:{number:02d}\nYou keep the archive. {BRIEFING}"
    said: list[dict[str, Any]] = [{"role": "system", "content": system}]
    async with httpx.AsyncClient(base_url=running.url, timeout=90) as client:
        for turn in range(2):
            said.append({"role": "user", "content": f"Lane {number}, turn {turn}: where is sheet {number}?"})
            body = {"messages": said, "max_tokens": 3, "temperature": 0}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            said.append(answer.json()["choices"][0]["message"])


@pytest.mark.parametrize("width", [1280, 390])
async def test_a_fan_out_is_seen_as_it_was(
    width: int, engine_factory: Callable[..., RunningEngine], tmp_path: Path
) -> None:
    engine = engine_factory(parallel=4, ctx=4 * 4096)
    async with running_proxy(engine.url, admission__root_threshold=0.001) as running, browser() as chrome:
        one = await opened(chrome, running, width)
        page = one.page
        await expect(page.locator("#connection")).to_have_text("live")
        await asyncio.gather(*(lane(running, number) for number in range(5)))
        await until_quiet(running)
        await expect(page.locator("#rows tr")).to_have_count(10)
        await expect(page.locator("#timeline-caption")).to_contain_text(COPIED)
        await expect(page.locator("#families tr")).to_have_count(1)
        assert await hovered(page) > 0
        await page.screenshot(path=tmp_path / f"engine-{width}.png", full_page=True)
        assert await page.evaluate("window.shifts") == []
        await the_microscope_shows_what_was_reused(page, running)
        assert one.complaints == []
        async with httpx.AsyncClient() as client:
            trend = (await client.get(f"{running.url}/prefixproxy/trend")).json()
    assert {copy["outcome"] for copy in trend["copies"]} == {"ok"}
    assert any(copy["source"] is not None and copy["source"] != copy["slot"] for copy in trend["copies"])


async def hovered(page: Page) -> int:
    """How many copies can be pointed at, on a grid over the timeline."""
    return int(
        await page.evaluate("""() => {
  const box = document.getElementById('timeline').getBoundingClientRect();
  const found = new Set();
  for (let x = 0; x < box.width; x += 3) {
    for (let y = 0; y < box.height; y += 4) {
      const at = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
      document.getElementById('timeline').dispatchEvent(new MouseEvent('mousemove', at));
      const text = document.getElementById('readout').textContent;
      if (text.startsWith('root copied from')) found.add(text);
    }
  }
  document.getElementById('timeline').dispatchEvent(new MouseEvent('mouseleave'));
  return found.size;
}""")
    )


async def the_microscope_shows_what_was_reused(page: Page, running: RunningProxy) -> None:
    second = next(r for r in running.proxy.parts.telemetry.journal.newest(10) if r.kind.value == "continuation")
    assert second.cache_n
    await page.get_by_label("Id or lane").fill(second.id)
    await expect(page.locator("#rows tr")).to_have_count(1)
    await page.locator("#rows button").click()
    dialog = page.locator("#microscope")
    await expect(dialog.locator(".headline")).to_contain_text(f"{second.cache_n:,} of {second.prompt_tokens:,}")
    await expect(dialog.locator(".strip rect.held")).to_have_count(1)
    await page.keyboard.press("Escape")
    await page.get_by_role("button", name="Clear").click()
