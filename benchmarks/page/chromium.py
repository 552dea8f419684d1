"""Chromium without a window, asked over a pipe in the protocol of its developer tools: no package, no driver.

    {"id": 1, "method": "Page.navigate", ...}\\0  ──fd 3──>  chromium
    {"id": 1, "result": {...}}\\0                 <──fd 4──   also what happens: {"method": "Log.entryAdded", ...}

Pages that it may see are those of this machine: names of others are not looked up.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which a container's root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-default-browser-check",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)
_PATIENCE_S = 120.0
_LOOK_S = 0.02


@dataclass(eq=False)
class Browser:
    """One page of a browser.

    Attributes:
        problems: errors of the page's console and its scripts, and requests that failed.
        urls: everything that it asked for.
    """

    writer: asyncio.StreamWriter
    problems: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    _answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _session: str | None = None

    async def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of the protocol; raises RuntimeError where it fails."""
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        message = {"id": number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        self.writer.write(json.dumps(message).encode() + b"\0")
        await self.writer.drain()
        async with asyncio.timeout(_PATIENCE_S):
            return await answer

    async def open(self, width: int, height: int) -> None:
        """Open an empty page of this size, in the way of a visitor who asks for dark pages."""
        target = await self.ask("Target.createTarget", url="about:blank")
        session = await self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.ask(f"{domain}.enable")
        await self.resize(width, height)

    async def resize(self, width: int, height: int, *, is_phone: bool = False, scale: float = 1.0) -> None:
        """Give the page another size, in CSS pixels."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )

    async def shade(self, scheme: str) -> None:
        """Ask for "dark" or "light" pages."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.ask("Emulation.setEmulatedMedia", features=features)

    async def go(self, url: str) -> None:
        """Go to a page."""
        await self.ask("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript is worth, which may be a promise; raises RuntimeError."""
        result = await self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is worth something, and return that; fails after two minutes."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while True:
                    if value := await self.value(expression):
                        return value
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            text = await self.value("document.body.innerText.slice(0, 2000)")
            raise AssertionError(f"never: {expression}\nproblems: {self.problems}\n{text}") from None

    async def point(self, x: float, y: float) -> None:
        """Move the pointer there."""
        await self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def click(self, selector: str) -> None:
        """Click the middle of an element."""
        x, y = await self.middle(selector)
        await self.point(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            await self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def middle(self, selector: str) -> tuple[float, float]:
        """Return where the middle of an element is."""
        box = await self.value(
            f"(() => {{ const at = document.querySelector({json.dumps(selector)});"
            " at.scrollIntoView({block: 'nearest'}); const box = at.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return box[0], box[1]

    async def write(self, selector: str, text: str) -> None:
        """Write a text over that of an input."""
        await self.value(f"document.querySelector({json.dumps(selector)}).select()")
        await self.ask("Input.insertText", text=text)

    async def picture(self) -> bytes:
        """Return the page as a PNG."""
        shot = await self.ask("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        return base64.b64decode(shot["data"])

    def take(self, message: dict[str, Any]) -> None:
        """Take a message of the browser."""
        if "id" in message:
            answer = self._answers.pop(message["id"])
            if answer.cancelled():
                return
            if "error" in message:
                answer.set_exception(RuntimeError(str(message["error"])))
            else:
                answer.set_result(message["result"])
            return
        method, told = message["method"], message["params"]
        if method == "Network.requestWillBeSent":
            self.urls.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(one.get("value")) for one in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")


def found() -> str:
    """Return where the browser is; raises FileNotFoundError where there is none."""
    for name in NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    raise FileNotFoundError(
        f"none of {', '.join(NAMES)} is installed: `make chromium` installs it on Debian and Ubuntu"
    )


@asynccontextmanager
async def browsing(width: int = 1280, height: int = 800) -> AsyncIterator[Browser]:
    """Have a browser with an empty page while the context is open."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="jpaged-chromium-", ignore_cleanup_errors=True) as folder:
        # The browser reads descriptor 3 and writes 4, whatever ours are called.
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            f'exec "$@" 3<&{to_read} 4>&{from_write}',
            "bash",
            found(),
            *FLAGS,
            f"--user-data-dir={folder}",
            pass_fds=(to_read, from_write),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 26)
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_read, "rb")
        )
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(to_write, "wb"))
        browser = Browser(asyncio.StreamWriter(transport, protocol, None, loop))
        listening = asyncio.create_task(_listen(reader, browser))
        try:
            await browser.open(width, height)
            yield browser
        finally:
            listening.cancel()
            transport.close()
            reading.close()
            try:
                async with asyncio.timeout(10):
                    await process.wait()  # which it does when nobody is at the other end
            except TimeoutError:
                process.kill()
                await process.wait()


async def _listen(reader: asyncio.StreamReader, browser: Browser) -> None:
    while True:
        message = await reader.readuntil(b"\0")
        browser.take(json.loads(message[:-1]))
