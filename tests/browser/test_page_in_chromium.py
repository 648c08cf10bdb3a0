"""The page in a real Chromium, in front of a proxy under load. Screenshots are left in the test's own folder."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from busy_upstream import BusyUpstream
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright, expect
from running_proxy import RunningProxy, proxied_stub

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
).split()
PATIENCE_MS = 90_000
"""For a machine on which everything else runs as well."""
PAUSE_S = 0.1
"""Between an answer and the next question of a lane: the browser needs some of the machine, too."""
expect.set_options(timeout=PATIENCE_MS)
MARKUP = "<img src=x onerror=alert(1)>"
RULES = "".join(f"Rule {n}: check section {n} of the report, and say what is missing there.\n" for n in range(60))

SHIFTS = """
window.shifts = [];
const inTheList = (node) => (node?.nodeType === 3 ? node.parentNode : node)?.closest?.('#rows');
new PerformanceObserver((found) => {
  for (const entry of found.getEntries()) {
    const moved = entry.sources.filter((source) => !inTheList(source.node));
    if (!entry.hadRecentInput) window.shifts.push(...moved.map(({ node }) => node?.id || node?.textContent));
  }
}).observe({ type: 'layout-shift', buffered: true });
"""
"""What moved without being asked to; that a new row moves the older ones is what a list is for."""
COLOURED = """() => {
  const { width, height } = document.getElementById('timeline');
  const copy = new OffscreenCanvas(width, height).getContext('2d', { willReadFrequently: true });
  copy.drawImage(document.getElementById('timeline'), 0, 0);
  const pixels = copy.getImageData(0, 0, width, height).data;
  let coloured = 0;
  for (let i = 0; i < pixels.length; i += 4) {
    const rgb = pixels.slice(i, i + 3);
    if (pixels[i + 3] > 99 && Math.max(...rgb) - Math.min(...rgb) > 60) coloured += 1;
  }
  return coloured;
}"""
"""Pixels of the timeline that are in some family's colour."""
COPIED = re.compile(r"[1-9]\d* roots? copied")


@pytest.fixture(autouse=True)
def chromium() -> None:
    """Skips without Debian's Chromium, but never in CI."""
    if CHROMIUM.exists():
        return
    reason = f"the page is tested in {CHROMIUM} (apt-get install chromium)"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class Opened:
    """The page, and everything its console complained about."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Each launch has a profile of its own, which is gone afterwards."""
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        await running.close()


async def opened(
    chrome: Browser,
    running: RunningProxy,
    width: int = 1280,
    scheme: Literal["light", "dark"] = "light",
    scripts: bool = True,
) -> Opened:
    context = await chrome.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=scripts
    )
    context.set_default_timeout(PATIENCE_MS)
    one = Opened(await context.new_page())
    one.listen()
    await one.page.add_init_script(SHIFTS)
    await one.page.goto(f"{running.url}/prefixproxy/")
    return one


def turn(lane: str, number: int) -> dict[str, Any]:
    """Each lane is a conversation on the shared rules, with a clock in front that the proxy moves."""
    system = f"Current time: 2026-11-29 15:{number % 60:02}:00\n{RULES}"
    messages = [{"role": "system", "content": system}]
    for n in range(number % 4):
        messages.append({"role": "user", "content": f"{lane} asks question {n}. " * 5})
        messages.append({"role": "assistant", "content": f"Answer {n} for {lane}. " * 5})
    messages.append({"role": "user", "content": f"{lane} asks question {number % 4}. " * 5})
    return {"messages": messages, "stream": True, "max_tokens": 4}


async def ask(running: RunningProxy, body: dict[str, Any], lane: str, *allowed: int, **headers: str) -> str:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        answer = await client.post("/v1/chat/completions", json=body, headers={"x-prefixproxy-lane": lane, **headers})
        assert answer.status_code in (200, *allowed), answer.text
        return answer.headers["x-prefixproxy-request-id"]


@asynccontextmanager
async def load(running: RunningProxy, lanes: int = 6) -> AsyncIterator[None]:
    """More lanes than there are slots, each asking again soon after its answer. That may be 503: browser, proxy and
    stub share the machine and this event loop; when that stands still for 5 s it takes the stub for unreachable."""

    async def run(lane: str) -> None:
        number = 0
        while not over.is_set():
            await ask(running, turn(lane, number), lane, 503)
            number += 1
            await asyncio.sleep(PAUSE_S)

    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for n in range(lanes):
            group.create_task(run(f"lane-{n}"))
        try:
            yield
        finally:
            over.set()


async def in_view(page: Page, at_least: int) -> int:
    """Wait until the timeline says that it shows so many requests; how many it shows then."""
    shown = "parseInt(document.getElementById('timeline-caption').textContent.replaceAll(',', ''))"
    await page.wait_for_function(f"(n) => {shown} >= n", arg=at_least)
    return int(await page.evaluate(shown))


async def test_under_load_the_page_moves_explains_and_changes_settings(tmp_path: Path) -> None:
    async with proxied_stub(BusyUpstream(), admission__root_threshold=0.01) as (_, running), browser() as chrome:
        one = await opened(chrome, running)
        page = one.page
        await expect(page.locator("#empty")).to_contain_text("No data yet")
        await expect(page.locator("#connection")).to_have_text("live")
        await page.screenshot(path=tmp_path / "empty.png")
        async with load(running):
            await the_timeline_grows(page)
            await the_microscope_opens_by_keyboard(page, tmp_path)
            await the_queue_limit_changes(page, running)
        refused = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
        assert one.complaints == [refused], "which is the setting that cannot be"


async def the_timeline_grows(page: Page) -> None:
    first = await in_view(page, 1)
    await expect(page.locator("#empty")).to_be_hidden()
    coloured = await page.evaluate(COLOURED)
    assert await in_view(page, first + 20) > first
    await page.wait_for_function(f"(before) => ({COLOURED})() > before", arg=coloured)
    await page.wait_for_function("document.getElementById('hit-now').textContent.endsWith('%')")
    await expect(page.locator("#timeline-caption")).to_contain_text(COPIED)
    await expect(page.locator("#families tr")).not_to_have_count(0)
    await expect(page.locator("#hit-chart polyline")).not_to_have_count(0)
    assert await page.evaluate("window.shifts") == [], "what is there already stays where it is"


async def the_microscope_opens_by_keyboard(page: Page, tmp_path: Path) -> None:
    await page.locator("#list").focus()
    await expect(page.locator("#list-caption")).to_contain_text("held still")
    await page.keyboard.press("Tab")
    label = await page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("Explain request ")
    await page.keyboard.press("Enter")
    dialog = page.locator("#microscope")
    await expect(dialog).to_be_visible()
    await expect(dialog.locator("h2")).to_have_text(f"Request {label.removeprefix('Explain request ')}")
    await expect(dialog.locator(".headline")).to_contain_text("prompt tokens were in the slot")
    await expect(dialog.locator(".advice")).not_to_be_empty()
    await expect(dialog.locator(".strip rect.new")).to_have_count(1)
    await expect(dialog.locator(".moved")).to_contain_text("Move the clock into the newest user message")
    await expect(dialog.locator(".segments")).to_contain_text("system[0]")
    await page.screenshot(path=tmp_path / "microscope.png")
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    assert await page.evaluate("document.activeElement.getAttribute('aria-label')") == label


async def the_queue_limit_changes(page: Page, running: RunningProxy) -> None:
    limit, message = page.get_by_label("queue limit"), page.locator("#admission-message")
    await limit.fill("17")
    await page.get_by_role("button", name="Apply").click()
    await expect(message).to_have_text("In force: queue limit 17.")
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{running.url}/prefixproxy/admission")).json()["queue_limit"] == 17
        await limit.fill("0")
        await page.keyboard.press("Enter")
        await expect(message).to_contain_text("queue_limit")
        await expect(limit).to_have_attribute("aria-invalid", "true")
        assert (await client.get(f"{running.url}/prefixproxy/admission")).json()["queue_limit"] == 17
    await page.get_by_role("button", name="Undo").click()
    await expect(limit).to_have_value("17")
    await expect(message).to_have_text("")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
async def test_the_page_fits_and_follows_the_theme(
    width: int, scheme: Literal["light", "dark"], tmp_path: Path
) -> None:
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        one = await opened(chrome, running, width, scheme)
        page = one.page
        async with load(running):
            await in_view(page, 30)
            await page.screenshot(path=tmp_path / f"page-{width}-{scheme}.png", full_page=True)
        assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "no sideways scrolling"
        assert await page.evaluate("window.shifts") == [], "what is there already stays where it is"
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 3 * 128) == (scheme == "dark")
        await page.locator("#rows button").first.click()
        await expect(page.locator("#microscope .segments")).to_be_visible()
        box = await page.locator("#microscope").bounding_box()
        assert box
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        await page.screenshot(path=tmp_path / f"microscope-{width}-{scheme}.png")
        assert one.complaints == []


PLACED = ("#timeline", "#spans", "#readout", "#requests", "#filters", "#list", "#families-title", "#admission-title")


@pytest.mark.parametrize("width", [1280, 390])
async def test_what_the_scripts_fill_in_has_its_room_before_they_run(width: int) -> None:
    """A browser may paint before it runs them: then all that lies below would move."""
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        before = await opened(chrome, running, width, scripts=False)
        after = await opened(chrome, running, width)
        await expect(after.page.locator("#connection")).to_have_text("live")
        await expect(after.page.locator("#spans button")).not_to_have_count(0)
        for place in PLACED:
            boxes = [await one.page.locator(place).bounding_box() for one in (before, after)]
            assert boxes[0], place
            assert boxes[1], place
            assert boxes[0]["y"] == pytest.approx(boxes[1]["y"], abs=1), place


async def test_filters_narrow_the_list_and_text_stays_text() -> None:
    async with proxied_stub(BusyUpstream(), journal__store_text=True) as (_, running), browser() as chrome:
        one = await opened(chrome, running)
        page, rows = one.page, one.page.locator("#rows tr")
        await ask(running, turn("first", 0), "first")
        await ask(running, turn("first", 1), "first")
        changed = turn("second", 0)
        changed["messages"][0]["content"] = f"{MARKUP}\n{RULES}"
        odd = await ask(running, changed, MARKUP)
        await expect(rows).to_have_count(3)
        await page.get_by_label("Id or lane").fill("first")
        await expect(rows).to_have_count(2)
        await page.get_by_role("button", name="Clear").click()
        await expect(rows).to_have_count(3)
        await page.get_by_label("Kind").select_option("continuation")
        await expect(rows).to_have_count(1)
        await page.get_by_label("Kind").select_option("compaction")
        await expect(page.locator("#rows-empty")).to_have_text("No request matches these filters.")
        await page.get_by_role("button", name="Clear").click()
        await page.get_by_label("Id or lane").fill(odd)
        await expect(rows).to_have_count(1)
        await expect(rows).to_contain_text(MARKUP)
        await rows.locator("button").click()
        await expect(page.locator("#microscope .segments")).to_contain_text(MARKUP)
        assert await page.locator("img").count() == 0
        assert one.complaints == []


async def test_with_a_key_the_page_asks_for_it_and_keeps_it_in_the_tab() -> None:
    async with proxied_stub(BusyUpstream(), server__api_keys=["secret"]) as (_, running), browser() as chrome:
        one = await opened(chrome, running)
        page, dialog = one.page, one.page.locator("#key-dialog")
        await expect(dialog).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("Escape")
        await page.get_by_role("textbox", name="Key").fill("wrong")
        await page.keyboard.press("Enter")
        await expect(dialog).to_contain_text("not accepted")
        await page.get_by_role("textbox", name="Key").fill("secret")
        await page.get_by_role("button", name="Use it").click()
        await expect(dialog).to_be_hidden()
        await expect(page.locator("#connection")).to_have_text("live")
        await ask(running, turn("a", 0), "a", authorization="Bearer secret")
        await expect(page.locator("#rows tr")).to_have_count(1)
        assert await page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        await page.reload()
        await expect(page.locator("#rows tr")).to_have_count(1)
        await expect(dialog).to_be_hidden()
        assert [text for text in one.complaints if "401" not in text] == []


class Wire:
    """Stands between browser and proxy, and can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = True
        self._open: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.cut()
        server.close()
        await server.wait_closed()

    def cut(self) -> None:
        self._whole = False
        for writer in self._open:
            writer.transport.abort()

    def mend(self) -> None:
        self._whole = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            return writer.transport.abort()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._open |= {writer, far_writer}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._carry(reader, far_writer))
            group.create_task(self._carry(far_reader, writer))
        self._open -= {writer, far_writer}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_after_a_break_nothing_is_missing() -> None:
    async with proxied_stub(BusyUpstream()) as (_, running), browser() as chrome:
        wire = Wire(int(running.url.rsplit(":", 1)[1]))
        async with wire.running() as url:
            one = await opened(chrome, replace(running, url=url))
            page, connection, rows = one.page, one.page.locator("#connection"), one.page.locator("#rows tr")
            await ask(running, turn("a", 0), "a")
            await expect(rows).to_have_count(1)
            wire.cut()
            await expect(connection).to_have_text("reconnecting")
            await ask(running, turn("a", 1), "a")
            wire.mend()
            await expect(connection).to_have_text("live")
            await ask(running, turn("a", 2), "a")
            await expect(rows).to_have_count(3)
            assert [text for text in one.complaints if "net::ERR_" not in text] == []
            await page.close()
