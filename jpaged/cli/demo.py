"""The subcommand `demo`: a server process, and several streams from it side by side."""

from __future__ import annotations

import argparse
import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from jpaged.cli.serve import LISTENING
from jpaged.client import Client, Load
from jpaged.errors import DeadlineExceeded, InvalidArgument, JpagedError, Unavailable
from jpaged.types import MAX_SEED, SamplingParams

HELP = "serve the embedded model and stream from it"
DESCRIPTION = (
    "Start a server with the embedded model, stream several prompts from it side by side, and say how that went."
)
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_END_PATIENCE_S = 5.0
"""A server under which a call has failed may be ending, and says why at its end."""
_LOOK_S = 0.3
"""The pause between two looks at a server that starts."""
_WRAP_CHARACTERS = 100

# (is a chat turn, prompt, tokens to generate at most): short and long, to fill the batch unevenly.
_PROMPTS: tuple[tuple[bool, str, int], ...] = (
    (True, "Tell me a story about a dragon.", 200),
    (True, "Write a short story about a brave fox and a river.", 160),
    (True, "Please tell me a bedtime story about a little star.", 120),
    (True, "tell me a funny story about a toaster", 180),
    (False, "Once upon a time", 140),
    (False, "In a small village", 100),
    (False, "There was once a robot who", 60),
    (True, "I want a sad story about a lighthouse keeper.", 220),
)


@dataclass(slots=True)
class _Story:
    """One stream: its own thread writes it, the one that draws the screen reads it."""

    prompt: str
    text: str = ""
    num_tokens: int = 0
    first_token_s: float | None = None
    finish: str | None = None
    error: JpagedError | None = None
    num_printed: int = 0
    is_closed: bool = False


@dataclass(slots=True)
class _ServerProcess:
    """A `jpaged serve` on a free port, and the last lines that it said."""

    process: subprocess.Popen[str]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    address: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    listener: threading.Thread | None = None
    start_s: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, model: str, flags: Sequence[str]) -> _ServerProcess:
        server = cls(
            subprocess.Popen(
                _command(model, flags),
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        )
        server.listener = threading.Thread(target=server._listen, daemon=True)
        server.listener.start()
        return server

    def _listen(self) -> None:
        for line in self.process.stderr or ():
            self.last_lines.append(line.rstrip())
            if line.startswith(LISTENING):
                self.address.put(line.removeprefix(LISTENING).partition(",")[0].strip())
        self.address.put(None)

    def target(self) -> str:
        """Waits for the address at which the server listens.

        Raises:
            Unavailable: the server ended before it listened.
            DeadlineExceeded: it did not listen in time.
        """
        try:
            address = self.address.get(timeout=_START_TIMEOUT_S)
        except queue.Empty:
            raise DeadlineExceeded(f"the server did not listen in {_START_TIMEOUT_S:g} s") from None
        if address is None:
            raise Unavailable("the server ended before it listened")
        return address

    def has_ended(self, timeout_s: float) -> bool:
        """Waits for the server to end; False when it is still there after that time."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, patience_s: float = 0.0) -> int:
        """Ends it by SIGTERM and returns its exit code; what it said is read to the end.

        Args:
            patience_s: how long one that seems to end may take for it before it is told to.
        """
        if not self.has_ended(patience_s):
            self.process.send_signal(signal.SIGTERM)
            if not self.has_ended(_STOP_TIMEOUT_S):
                self.process.kill()
        code = self.process.wait()
        if self.listener is not None:
            self.listener.join()
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code


def _command(model: str, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "jpaged", "serve", model, "--port", "0", *flags]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and how many stories."""
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="default: demo, the embedded one")
    parser.add_argument(
        "--num-prompts", type=int, default=6, choices=range(1, len(_PROMPTS) + 1), metavar="N", help="default: 6"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the first story; default: 1")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 when every stream finished and the server ended with 0."""
    if not 0 <= arguments.seed <= MAX_SEED - len(_PROMPTS):
        raise InvalidArgument(
            "--seed", f"{arguments.seed} is out of range: must be from 0 to {MAX_SEED - len(_PROMPTS)}"
        )
    with _unwinding_at_sigterm():
        return _demonstrate(arguments)


@contextlib.contextmanager
def _unwinding_at_sigterm() -> Iterator[None]:
    """SIGTERM leaves through every `finally`: it would end this process alone, and its server would go on."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _demonstrate(arguments: argparse.Namespace) -> int:
    console = Console()
    server = _ServerProcess.start(arguments.model, ["--max-num-seqs", "8", "--max-num-batched-tokens", "128"])
    problems: list[str] = []
    try:
        with Client(server.target()) as client:
            _wait(client, server, console)
            stories = [_Story(prompt) for _, prompt, _ in _PROMPTS[: arguments.num_prompts]]
            start_s = time.monotonic()
            _stream(client, stories, arguments.seed, console)
            elapsed_s = time.monotonic() - start_s
            problems += [f"a stream failed: {story.error}" for story in stories if story.error is not None]
            if not problems:
                console.print(_table(stories, elapsed_s, client.load()))
    except JpagedError as error:
        problems.append(str(error))
    finally:
        code = server.stop(_END_PATIENCE_S if problems else 0.0)
    for problem in problems:
        print(f"jpaged demo: {problem}", file=sys.stderr)
    if problems or code != 0:
        print("\n".join([f"jpaged demo: the server ended with {code}:", *server.last_lines]), file=sys.stderr)
    return 1 if problems or code != 0 else 0


def _wait(client: Client, server: _ServerProcess, console: Console) -> None:
    """Waits until the server is ready, with a line that says what it is busy with."""
    start_s, shown = server.start_s, ""
    with console.status("starting the server") as status:
        while not _is_ready(client):
            if server.has_ended(_LOOK_S):
                raise Unavailable("the server ended before it was ready")
            if time.monotonic() - start_s > _START_TIMEOUT_S:
                raise DeadlineExceeded(f"the server was not ready after {_START_TIMEOUT_S:g} s")
            text = _startup_text(client)
            status.update(text)
            if not console.is_terminal and text != shown:
                console.print(text, highlight=False)
            shown = text
    console.print(f"ready after {time.monotonic() - start_s:.1f} s", highlight=False)


def _is_ready(client: Client) -> bool:
    """A call that fails tells nothing: a server that ends cuts it in one of several ways, and its process tells why."""
    try:
        client.wait_until_ready(_LOOK_S)
    except JpagedError:
        return False
    return True


def _startup_text(client: Client) -> str:
    try:
        startup = client.server_info().startup
    except JpagedError:  # as above
        startup = None
    if startup is None:
        return "starting the server"
    what, done, total = startup
    return f"starting the server: {what}" + (f", {done} of {total}" if total > 1 else "")


def _stream(client: Client, stories: Sequence[_Story], seed: int, console: Console) -> None:
    threads = [
        threading.Thread(target=_tell, args=(client, story, number, seed + number), daemon=True)
        for number, story in enumerate(stories)
    ]
    for thread in threads:
        thread.start()
    if not console.is_terminal:
        for number, story in enumerate(stories, start=1):
            _print_plain(console, f"[{number}] > {story.prompt}")
        while any(thread.is_alive() for thread in threads):
            threads[0].join(0.05)
            _print_new_lines(stories, console)
        _print_new_lines(stories, console)
        return
    with Live(console=console, refresh_per_second=12) as live:
        while any(thread.is_alive() for thread in threads):
            live.update(_columns(stories, console))
            time.sleep(1 / 12)
        live.update(_columns(stories, console))


def _tell(client: Client, story: _Story, number: int, seed: int) -> None:
    is_chat, prompt, max_tokens = _PROMPTS[number]
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.7, seed=seed)
    start_s = time.monotonic()
    try:
        stream = (
            client.generate(messages=[{"role": "user", "content": prompt}], sampling=sampling)
            if is_chat
            else client.generate(prompt, sampling)
        )
        for chunk in stream:
            if story.first_token_s is None:
                story.first_token_s = time.monotonic() - start_s
            story.text += chunk.text
            story.num_tokens = chunk.usage.completion_tokens
            story.finish = chunk.finish_reason
    except JpagedError as error:
        story.error = error


def _columns(stories: Sequence[_Story], console: Console) -> Columns:
    """Panels side by side, as high as the terminal allows; each shows the end of its story."""
    num_columns = max(1, min(3, console.width // 36))
    num_rows = -(-len(stories) // num_columns)
    width, height = console.width // num_columns - 1, max(4, (console.height - 2) // num_rows)
    room = (width - 4) * (height - 3)
    panels = []
    for story in stories:
        text = story.text if len(story.text) <= room else f"... {story.text[-room:]}"
        color = "red" if story.error else "green" if story.finish else "cyan"
        subtitle = f"{story.num_tokens} tokens"
        panels.append(
            Panel(text, title=story.prompt, subtitle=subtitle, width=width, height=height, border_style=color)
        )
    return Columns(panels, padding=(0, 0))


def _print_new_lines(stories: Sequence[_Story], console: Console) -> None:
    """Prints what came since the last call, in whole lines, each with the number of its story."""
    for number, story in enumerate(stories, start=1):
        is_done = story.finish is not None or story.error is not None
        while len(rest := story.text[story.num_printed :]) > _WRAP_CHARACTERS or (is_done and rest):
            space = rest.rfind(" ", 1, _WRAP_CHARACTERS)
            end = len(rest) if len(rest) <= _WRAP_CHARACTERS else space if space > 0 else _WRAP_CHARACTERS
            _print_plain(console, f"[{number}] {' '.join(rest[:end].split())}")
            story.num_printed += end
        if is_done and not story.is_closed:
            story.is_closed = True
            _print_plain(console, f"[{number}] --- {story.finish or 'failed'} after {story.num_tokens} tokens")


def _print_plain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(stories: Sequence[_Story], elapsed_s: float, load: Load) -> Table:
    num_tokens = sum(story.num_tokens for story in stories)
    first_s = sorted(story.first_token_s for story in stories if story.first_token_s is not None)
    table = Table(title=f"{len(stories)} streams, {num_tokens} tokens in {elapsed_s:.2f} s")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_row("tokens per second", f"{num_tokens / elapsed_s:.1f}")
    if first_s:
        mean_ms, worst_ms = 1000 * sum(first_s) / len(first_s), 1000 * first_s[-1]
        table.add_row("time to first token", f"{mean_ms:.0f} ms mean, {worst_ms:.0f} ms worst")
    table.add_row("blocks used at the peak", f"{load.peak_blocks_used} of {load.num_blocks}")
    table.add_row("reserved slots that held tokens", f"{100 * load.slot_use:.1f} %")
    return table
