"""The page with more records than anybody reads, and without the proxy that it shows: records go straight into the
journal here, as fast as a test needs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

import pytest
import records
from busy_upstream import BusyUpstream
from playwright.async_api import Page, Route, expect
from running_proxy import RunningProxy, proxied_stub, running_proxy
from test_page_in_chromium import CHROMIUM, SHIFTS, ask, browser, in_view, opened, turn

from prefixproxy.microscope import Strip
from prefixproxy.types import RequestRecord

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

BURST, PAUSE_S = 25, 0.25
"""One hundred requests a second."""
MOST_BARS = 7200
"""MAX_BARS of store.js, and what they may exceed it by."""

WORK = """
window.work = { frames: 0, drawings: 0, listings: 0 };
const count = () => { window.work.frames += 1; requestAnimationFrame(count); };
requestAnimationFrame(count);
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...box) { window.work.drawings += 1; clear.apply(this, box); };
document.addEventListener('DOMContentLoaded', () => {
  const list = document.getElementById('rows');
  new MutationObserver(() => { window.work.listings += 1; }).observe(list, { childList: true });
});
"""
NODES = "document.querySelectorAll('*').length"


@pytest.fixture(autouse=True)
def chromium(request: pytest.FixtureRequest) -> None:
    """The same condition as for the page's other tests."""
    if not CHROMIUM.exists():
        pytest.skip(f"the page is tested in {CHROMIUM} (apt-get install chromium)")


def record(number: int) -> RequestRecord:
    """One of eight families in one of four slots, ended just now."""
    return replace(
        records.RECORD,
        id=f"{number:016x}",
        time=time.time() - 0.2,
        upstream="local",
        family=f"{number % 8:016x}",
        slot=number % 4,
        prompt_tokens=1000,
        cache_n=999,
        prompt_n=1,
        queue_ms=50.0,
        ttft_ms=100.0,
        total_ms=200.0,
    )


def add(running: RunningProxy, numbers: range) -> None:
    telemetry = running.proxy.parts.telemetry
    for number in numbers:
        one = record(number)
        telemetry.journal.add(one)
        telemetry.trend.request(one, 0.001, time.time())


async def newest_is(page: Page, number: int) -> None:
    await expect(page.locator("#rows button").first).to_have_attribute("aria-label", f"Explain request {number:016x}")


async def test_the_page_does_no_more_work_for_more_requests() -> None:
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        context = await chrome.new_context(viewport={"width": 1280, "height": 900})
        page = await context.new_page()
        await page.add_init_script(WORK)
        await page.goto(f"{running.url}/prefixproxy/")
        await expect(page.locator("#connection")).to_have_text("live")
        for start in range(0, 1000, BURST):
            add(running, range(start, start + BURST))
            await asyncio.sleep(PAUSE_S)
        await newest_is(page, 999)
        nodes, work = await page.evaluate(NODES), await page.evaluate("window.work")
        assert work["drawings"] <= work["frames"], "one drawing in a frame at most"
        assert work["listings"] <= min(work["frames"], 1000 / BURST * 2), "records come to the list by the batch"
        for start in range(1000, 10_000, 200):
            add(running, range(start, start + 200))
            await asyncio.sleep(0.01)
        await newest_is(page, 9_999)
        assert await page.locator("#rows tr").count() == 60
        assert await page.evaluate(NODES) <= nodes + 8, "as many elements as before, whatever came"
        await expect(page.locator("#timeline-caption")).to_contain_text("(older ones are not kept)")
        assert await in_view(page, 1) <= MOST_BARS


async def test_what_the_journal_forgot_is_not_shown_as_idle() -> None:
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        add(running, range(1000))
        page = (await opened(chrome, running)).page
        await in_view(page, 1000)
        await expect(page.locator("#timeline-caption")).not_to_contain_text("not kept")
        add(running, range(1000, 1200))
        await page.reload()
        await expect(page.locator("#timeline-caption")).to_contain_text(
            "1,000 requests in view (older ones are not kept)"
        )


@pytest.mark.parametrize("width", [1280, 390])
async def test_shares_are_readable_whole(width: int) -> None:
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        add(running, range(3))
        page = (await opened(chrome, running, width)).page
        share = page.locator("#rows tr").first.locator("td", has=page.locator(".share"))
        await expect(share).to_have_text("99.9 %")
        assert await share.evaluate("(cell) => cell.scrollWidth <= cell.clientWidth")


@asynccontextmanager
async def slow_explanations(page: Page) -> AsyncIterator[asyncio.Event]:
    """What the microscope asks for comes when the event is set."""
    go_on = asyncio.Event()

    async def hold(route: Route) -> None:
        await go_on.wait()
        await route.continue_()

    await page.route("**/prefixproxy/requests/*", hold)
    yield go_on
    await page.unroute_all(behavior="wait")


@pytest.mark.parametrize("width", [1280, 390])
async def test_a_linked_request_opens_in_its_place_and_the_list_is_behind_it(width: int) -> None:
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        asked = await ask(running, turn("first", 0), "first")
        context = await chrome.new_context(viewport={"width": width, "height": 900})
        page = await context.new_page()
        await page.add_init_script(SHIFTS)
        async with slow_explanations(page) as go_on:
            await page.goto(f"{running.url}/prefixproxy/#request={asked}")
            await expect(page.locator("#microscope")).to_contain_text("Loading")
            await expect(page.locator("#rows tr")).to_have_count(1)
            await page.evaluate(
                "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
            )
            go_on.set()
            await expect(page.locator("#microscope .segments")).to_be_visible()
        await page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        assert await page.evaluate("window.shifts") == [], "it grows, and nothing in it moves"


async def test_requests_in_the_timeline_are_read_and_opened_with_keys() -> None:
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        first = await ask(running, turn("first", 0), "first")
        newest = await ask(running, turn("first", 1), "first")
        one = await opened(chrome, running)
        page, readout = one.page, one.page.locator("#readout")
        await in_view(page, 2)
        await page.locator("#timeline").focus()
        await page.keyboard.press("End")
        await expect(readout).to_contain_text(newest[:8])
        await page.keyboard.press("Home")
        while first[:8] not in await readout.inner_text():  # a copy of a root may come before it
            await page.keyboard.press("ArrowRight")
        await page.keyboard.press("Enter")
        await expect(page.locator("#microscope h2")).to_have_text(f"Request {first}")
        await page.keyboard.press("Escape")
        await page.keyboard.press("Tab")
        await expect(readout).to_have_text("")
        assert one.complaints == []


@pytest.mark.parametrize("held", ["focus", "pause"])
async def test_a_list_that_is_held_still_shows_no_former_process(held: Literal["focus", "pause"]) -> None:
    async with BusyUpstream() as stub, browser() as chrome:
        async with running_proxy(stub.url) as running:
            await ask(running, turn("first", 0), "first")
            page = (await opened(chrome, running)).page
            await expect(page.locator("#rows tr")).to_have_count(1)
            await (page.locator("#list").focus() if held == "focus" else page.locator("#pause").click())
        await expect(page.locator("#connection")).to_have_text("reconnecting")
        limit, message = page.get_by_label("queue limit"), page.locator("#admission-message")
        if held == "pause":
            await limit.fill("17")
            await page.get_by_role("button", name="Apply").click()
            await expect(message).to_contain_text("The proxy does not answer")
        async with running_proxy(stub.url, port=int(running.url.rsplit(":", 1)[1])):
            await expect(page.locator("#connection")).to_have_text("live")
            await expect(page.locator("#rows-empty")).to_have_text("No requests yet.")
            await expect(page.locator("#rows tr")).to_have_count(0)
        await page.close()


async def test_a_setting_without_a_number_is_named() -> None:
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        one = await opened(chrome, running)
        limit = one.page.get_by_label("queue limit")
        await limit.fill("")
        await one.page.get_by_role("button", name="Apply").click()
        await expect(one.page.locator("#admission-message")).to_have_text("queue limit: a number is missing.")
        await expect(limit).to_have_attribute("aria-invalid", "true")
        assert one.complaints == []


async def test_the_counts_of_several_prompts_are_told_to_be_the_last_ones() -> None:
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        one = replace(record(1), path="/v1/completions")
        telemetry = running.proxy.parts.telemetry
        telemetry.strips.remember(one.id, Strip(("prompt[0]", "prompt[1]"), (500, 1000), 0), ())
        telemetry.journal.add(one)
        opened_page = await opened(chrome, running)
        page, dialog = opened_page.page, opened_page.page.locator("#microscope")
        await page.locator("#rows button").click()
        await expect(dialog.locator(".headline")).to_contain_text("Of the last prompt, 999 of 1,000 prompt tokens")
        await expect(dialog.locator(".headline")).to_contain_text("1 was evaluated")
        await expect(dialog.locator(".legend")).to_contain_text("the token counts are those of the last prompt")
        await expect(dialog.locator(".strip rect.unknown")).to_have_count(1)
        assert opened_page.complaints == []
