"""The page as a visitor sees it, in Chromium: it draws what is, follows who is pointed at, and plays."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page.chromium import Browser, browsing
from jpaged.testing import FakeExecutor
from tests.server.harness import Harness, running

pytestmark = pytest.mark.long

PAGE = "(await import('/page/page.js'))"


class Unhurried(FakeExecutor):
    """One whose steps take as long as those of a model do, so that there is something to see between two."""

    def collect(self, handle: Any) -> Any:
        """Wait as for a device."""
        time.sleep(0.02)
        return super().collect(handle)


@asynccontextmanager
async def visiting(
    num_blocks: int = 160, width: int = 1280, height: int = 800, **options: Any
) -> AsyncIterator[tuple[Harness, Browser]]:
    executor = Unhurried(num_blocks=num_blocks, block_size=4, max_num_seqs=16, max_model_len=4096, num_host_blocks=64)
    one_by_one = {"num_scheduler_steps": 1, **options}
    async with running(executor=executor, http_port=0, **one_by_one) as harness, browsing(width, height) as browser:
        await browser.shade("dark")
        await browser.go(f"{harness.http_url}/")
        await browser.until("document.body?.dataset.drawn > 0")
        yield harness, browser


async def cells(browser: Browser, expression: str) -> Any:
    """What a function of the page's cells returns: `pool`, `grid` and the words of wire.js are in its scope."""
    return await browser.value(
        f"(async () => {{ const {{ pools, grid }} = {PAGE}; const pool = pools.pools[0];"
        f" const {{ kindOf, countOf, ownerOf, HELD }} = await import('/page/wire.js'); return {expression}; }})()"
    )


async def until_cells(browser: Browser, expression: str) -> Any:
    return await browser.until(
        f"(async () => {{ const {{ pools, grid }} = {PAGE}; const pool = pools.pools[0];"
        f" const {{ kindOf, countOf, ownerOf, HELD }} = await import('/page/wire.js'); return {expression}; }})()"
    )


async def slide(browser: Browser, **values: float) -> None:
    for name, value in values.items():
        await browser.value(
            f"(() => {{ const at = document.getElementById('{name}'); at.max = Math.max(at.max, {value});"
            f" at.value = {value}; at.dispatchEvent(new Event('input')); }})()"
        )


def require_no_problem(harness: Harness, browser: Browser) -> None:
    assert browser.problems == []
    foreign = [url for url in browser.urls if not url.startswith((harness.http_url, "data:", "about:"))]
    assert foreign == []


PIXEL = """(() => {{ const [x, y] = grid.middle({block});
    return [...grid.below.getContext('2d').getImageData(x, y, 1, 1).data]; }})()"""


async def test_every_block_is_a_cell_and_nothing_is_asked_of_others() -> None:
    async with visiting() as (harness, browser):
        assert await cells(browser, "[pool.cells.length, grid.shown]") == [161, 160]
        colours = [await cells(browser, PIXEL.format(block=block)) for block in (1, 160)]
        assert colours[0] == colours[1] and colours[0][3] == 255
        label = await browser.value("document.getElementById('cells').getAttribute('aria-label')")
        assert "160 free" in label
        await browser.until("document.getElementById('link').textContent === 'live'")
        assert "fake" in await browser.value("document.getElementById('model').textContent")
        require_no_problem(harness, browser)


async def test_samples_of_a_prompt_that_is_typed_are_seen_to_share_fork_and_copy() -> None:
    async with visiting(num_blocks=1200) as (harness, browser):
        await slide(browser, n=4, tokens=1000)  # longer than anybody looks
        await browser.write("#prompt", "A dragon and so")
        await browser.click("#send")
        await until_cells(browser, "pool.cells.some((cell) => kindOf(cell) === HELD && countOf(cell) === 4)")
        shared = await until_cells(
            browser,
            "(() => { for (let i = 1; i < pool.cells.length; i++) if (countOf(pool.cells[i]) > 1) return i; })()",
        )
        free = PIXEL.format(block=1200)
        await until_cells(browser, f"String({PIXEL.format(block=shared)}) !== String({free})")
        log = "[...document.querySelectorAll('#log b')].map((one) => one.textContent)"
        await browser.until(f"{log}.includes('forked') && {log}.includes('copied on write')")
        await browser.until("Number(document.getElementById('t-copies').textContent) > 0")
        await browser.until("document.querySelectorAll('#answers p').length === 4")
        await browser.until("Number(document.getElementById('rate').textContent) > 0")
        await browser.click("#stop")
        await until_cells(browser, "pool.requests.size === 0")
        await browser.until(f"{log}.includes('finished')")
        require_no_problem(harness, browser)


async def test_beams_are_seen_to_fork_as_they_go() -> None:
    async with visiting() as (harness, browser):
        await slide(browser, beams=3, tokens=24)
        assert await browser.value("document.getElementById('n').value") == "1"
        await browser.click("#send")
        await browser.until("Number(document.getElementById('t-forks').textContent) >= 2")
        await browser.until("document.querySelectorAll('#answers p').length > 0")
        require_no_problem(harness, browser)


async def test_in_a_small_pool_somebody_has_to_leave_and_comes_back() -> None:
    async with visiting() as (harness, browser):
        await browser.click("[data-blocks='48']")
        await browser.until("document.querySelector(\"[data-blocks='48']\").getAttribute('aria-pressed') === 'true'")
        assert await cells(browser, "[grid.shown, grid.hidden]") == [48, 112]
        await browser.write("#prompt", "Once")
        await slide(browser, requests=6, tokens=64)
        await browser.click("#send")
        await browser.until("Number(document.getElementById('t-preemptions').textContent) > 0")
        await browser.until("[...document.querySelectorAll('#log b')].some((one) => one.textContent === 'preempted')")
        await until_cells(browser, "pool.told.totals.num_requests_ended === 6")
        await browser.click("[data-blocks='all']")
        await until_cells(browser, "grid.shown === 160")
        require_no_problem(harness, browser)


async def test_a_table_is_followed_from_the_list_and_from_a_cell() -> None:
    async with visiting(num_blocks=1200) as (harness, browser):
        await slide(browser, n=2, tokens=2000)
        await browser.click("#send")
        await browser.until("document.querySelector('#queue li button') !== null")
        await browser.point(*await browser.middle("#queue li button"))
        number = await until_cells(browser, "grid.following && grid.following.number + 1") - 1
        await until_cells(browser, f"pool.tablesOf({number}).length === 2")
        rows = (
            "[...document.querySelectorAll('#tables .row')].map((row) =>"
            " [...row.querySelectorAll('.block')].map((one) => Number(one.childNodes[1].textContent)))"
        )
        tables = f"pool.tablesOf({number}).map((table) => table.ids)"
        await until_cells(browser, f"{tables}.length === 2 && JSON.stringify({rows}) === JSON.stringify({tables})")
        drawn = "grid.above.getContext('2d').getImageData(0, 0, grid.above.width, grid.above.height).data"
        assert await cells(browser, f"{drawn}.some((part) => part > 0)")
        harness.faults.gate.clear()  # what is to be pointed at stays where it is
        await browser.point(640, 5)
        await until_cells(browser, "grid.following === null")
        x, y = await until_cells(
            browser,
            "(() => { for (let i = 1; i < pool.cells.length; i++) if (kindOf(pool.cells[i]) === HELD) {"
            " const [x, y] = grid.middle(i), box = grid.below.getBoundingClientRect();"
            " return [box.x + x / grid.scale, box.y + y / grid.scale]; } })()",
        )
        await browser.point(x, y)
        await until_cells(browser, f"grid.following?.number === {number}")
        tip = await browser.value("document.getElementById('tip').innerText")
        assert ": held by" in tip and f"#{number}" in tip
        harness.faults.release()
        await browser.click("#stop")
        await until_cells(browser, "pool.requests.size === 0 && grid.following === null")
        require_no_problem(harness, browser)


async def test_a_hundred_thousand_blocks_go_on_being_drawn() -> None:
    async with visiting(num_blocks=100_000) as (harness, browser):
        await slide(browser, requests=8, tokens=96)
        await browser.click("#send")
        await until_cells(browser, "pool.told.totals.num_requests_ended === 8")
        assert await cells(browser, "[grid.shown, pool.cells.length]") == [100_000, 100_001]
        before = await browser.value("Number(document.body.dataset.drawn)")
        await slide(browser, requests=2)
        await browser.click("#send")
        await browser.until(f"Number(document.body.dataset.drawn) > {before + 5}")
        engine_cells = await until_cells(
            browser,
            "pool.requests.size === 0 && pool.told.totals.num_requests_ended === 10 &&"
            " pool.cells.reduce((sum, cell) => sum + (kindOf(cell) === 1), 0)",
        )
        assert engine_cells == harness.serving.engine.load().num_blocks_cached
        require_no_problem(harness, browser)


async def test_without_a_key_one_looks_and_does_not_play(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nid = "one"\ntenant = "t"\ntoken = "the-token-of-a-visitor"\nrole = "control"\n')
    async with visiting(api_keys=str(keys)) as (_, browser):
        await browser.until("document.getElementById('link').textContent === 'live'")
        await slide(browser, tokens=16)
        await browser.click("#send")
        await browser.until("document.getElementById('problem').textContent !== ''")
        assert await browser.value("document.getElementById('key').open")
        await browser.click("[data-blocks='64']")
        await browser.until("document.getElementById('problem').textContent !== ''")
        assert await cells(browser, "[pool.told.limit, pool.told.totals.num_requests_ended]") == [160, 0]
        await browser.write("#token", "the-token-of-a-visitor")
        await browser.value("document.getElementById('token').dispatchEvent(new Event('change'))")
        await browser.click("[data-blocks='64']")
        await until_cells(browser, "pool.told.limit === 64")
        await browser.click("#send")
        await until_cells(browser, "pool.told.totals.num_requests_ended === 1")
        assert await browser.value("document.getElementById('problem').textContent") == ""


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
async def test_nothing_sticks_out_on_a_screen_dark_or_light(width: int, height: int) -> None:
    async with visiting(num_blocks=400, width=width, height=height) as (harness, browser):
        await browser.click("[data-scene=share]")
        await browser.until("[...document.querySelectorAll('#log b')].some((one) => one.textContent === 'forked')")
        await until_cells(browser, "pool.told.totals.num_requests_ended === 1 && grid.shown === 256")
        dark = await cells(browser, PIXEL.format(block=256))
        for shade in ("dark", "light"):
            await browser.shade(shade)
            await browser.until(f"document.documentElement.dataset.theme === {json.dumps(shade)}")
            assert await browser.value("document.documentElement.scrollWidth <= innerWidth")
        await until_cells(browser, f"String({PIXEL.format(block=256)}) !== {json.dumps(','.join(map(str, dark)))}")
        unnamed = await browser.value(
            "[...document.querySelectorAll('input, textarea, button')].filter((one) =>"
            " !(one.labels?.length || one.textContent.trim() || one.ariaLabel)).map((one) => one.id)"
        )
        assert unnamed == []
        require_no_problem(harness, browser)


async def test_all_requests_of_a_click_run_at_once_by_the_keyboard() -> None:
    async with visiting(num_blocks=2000) as (harness, browser):
        await slide(browser, requests=12, tokens=400)
        await browser.value(
            "document.getElementById('prompt').dispatchEvent("
            "new KeyboardEvent('keydown', {key: 'Enter', ctrlKey: true, bubbles: true, cancelable: true}))"
        )
        await until_cells(browser, "pool.requests.size === 12")
        await browser.click("#stop")
        require_no_problem(harness, browser)


@pytest.mark.parametrize("shade", ["dark", "light"])
async def test_on_a_phone_the_prompt_and_the_answer_are_seen_without_scrolling(shade: str) -> None:
    async with visiting(num_blocks=400, width=390, height=844) as (harness, browser):
        await browser.shade(shade)
        await browser.click("#send")
        await browser.until("document.querySelector('#answers p')?.textContent.length > 20")
        for selector in ("#prompt", "#send", "#answers-card h2", "#answers p"):
            top, bottom = await browser.value(
                f"(() => {{ const at = document.querySelector('{selector}').getBoundingClientRect();"
                " return [at.top, at.bottom]; })()"
            )
            assert 0 <= top < bottom <= 844, selector
        await browser.click("#stop")
        require_no_problem(harness, browser)
