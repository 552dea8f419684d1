"""Takes the picture of the page that the README shows: `python -m benchmarks.page.picture`.

A server of the embedded model is started, gets requests as a visitor would send them, and is pictured while one of them
is followed. Needs Chromium (`make chromium`).
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from benchmarks.page.chromium import Browser, browsing
from jpaged.cli.server_process import ServerProcess
from jpaged.client import Client

PICTURE = Path(__file__).parents[2] / "docs/pictures/pool.png"
MAX_BYTES = 300_000
_URL = "OpenAI's API on "
STORY = (
    "Once upon a time there was a small dragon who lived in a cave by the sea. Every morning the dragon flew over the "
    "village and waved to the baker, who always left a warm loaf on the roof. One day there was no loaf. The dragon "
    "looked through the window, and saw that the baker was ill. So the dragon lit the oven with one long breath, and"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the picture of the page that the README shows.")
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.add_argument("--light", action="store_true", help="as who asks for light pages sees it")
    arguments = parser.parse_args()
    server = ServerProcess.start("demo", ["--http-port", "0", "--max-num-seqs", "24", "--num-scheduler-steps", "1"])
    try:
        with Client(server.target()) as client:
            client.wait_until_ready(600)
        url = next(line for _, line in server.lines if line.startswith(_URL)).removeprefix(_URL).removesuffix("/v1")
        picture = asyncio.run(pictured(url, "light" if arguments.light else "dark"))
    finally:
        server.stop()
    if len(picture) > MAX_BYTES:
        raise SystemExit(f"{len(picture)} bytes are over the limit of {MAX_BYTES}")
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_bytes(picture)
    print(f"{arguments.output}: {len(picture)} bytes")


async def pictured(url: str, shade: str) -> bytes:
    async with browsing(1280, 800) as browser:
        await browser.shade(shade)
        await browser.go(url)
        await browser.until("document.body?.dataset.drawn > 0")
        await browser.click("[data-blocks='256']")
        await browser.until("document.querySelector(\"[data-blocks='256']\").getAttribute('aria-pressed') === 'true'")
        await browser.write("#prompt", STORY)
        await send(browser, n=4, tokens=760, requests=1)
        forked = "[...document.querySelectorAll('#queue .facts')].find((one) => one.textContent.startsWith('4 x'))"
        await browser.until(f"{forked} !== undefined")
        await send(browser, n=1, tokens=500, requests=9)
        await browser.until("Number(document.getElementById('t-preemptions').textContent) > 0")
        await browser.value(f"{forked}.parentElement.dispatchEvent(new PointerEvent('pointerenter'))")
        await browser.until("document.querySelectorAll('#tables .row').length === 4")
        return await browser.picture()


async def send(browser: Browser, **sliders: int) -> None:
    for name, value in sliders.items():
        await browser.value(
            f"(() => {{ const at = document.getElementById('{name}'); at.value = {value};"
            " at.dispatchEvent(new Event('input')); })()"
        )
    await browser.click("#send")


if __name__ == "__main__":
    main()
