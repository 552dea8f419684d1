"""The subcommand `demo`: a server process, and several concurrent streams from it."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from jpaged.cli.server_process import ServerProcess, startup_texts, unwinding_at_sigterm
from jpaged.client import Client, Load
from jpaged.errors import InvalidArgument, JpagedError
from jpaged.types import MAX_SEED, SamplingParams

DESCRIPTION = (
    "Start a server with the embedded model, stream several prompts from it concurrently, and print statistics."
)
_END_PATIENCE_S = 5.0
"""Wait for a server whose call failed: it may be ending, and prints the reason at its end."""
_WRAP_CHARACTERS = 100

# (is a chat turn, prompt, maximum tokens): short and long, to fill the batch unevenly.
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
    """One stream: a thread writes it, and the drawing thread reads it."""

    prompt: str
    text: str = ""
    num_tokens: int = 0
    first_token_s: float | None = None
    finish: str | None = None
    error: JpagedError | None = None
    num_printed: int = 0
    is_closed: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the model and the number of stories."""
    parser.add_argument(
        "model", nargs="?", default="demo", metavar="MODEL", help="model to serve (default: demo, the embedded one)"
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=6,
        choices=range(1, len(_PROMPTS) + 1),
        metavar="N",
        help="number of prompts (default: 6)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the first story (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 if every stream finished and the server ended with 0."""
    if not 0 <= arguments.seed <= MAX_SEED - len(_PROMPTS):
        raise InvalidArgument(
            "--seed", f"{arguments.seed} is out of range: must be from 0 to {MAX_SEED - len(_PROMPTS)}"
        )
    with unwinding_at_sigterm():
        return _demonstrate(arguments)


def _demonstrate(arguments: argparse.Namespace) -> int:
    console = Console()
    server = ServerProcess.start(arguments.model, ["--max-num-seqs", "8", "--max-num-batched-tokens", "128"])
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
        print(
            "\n".join([f"jpaged demo: the server exited with code {code}; its last output:", *server.last_lines]),
            file=sys.stderr,
        )
    return 1 if problems or code != 0 else 0


def _wait(client: Client, server: ServerProcess, console: Console) -> None:
    """Wait until the server is ready, and show its progress in a line."""
    shown = ""
    with console.status("starting the server") as status:
        for text in startup_texts(client, server):
            status.update(text)
            if not console.is_terminal and text != shown:
                console.print(text, highlight=False)
            shown = text
    console.print(f"ready after {server.elapsed_s:.1f} s", highlight=False)


def _stream(client: Client, stories: Sequence[_Story], seed: int, console: Console) -> None:
    threads = [
        threading.Thread(target=_write_story, args=(client, story, number, seed + number), daemon=True)
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


def _write_story(client: Client, story: _Story, number: int, seed: int) -> None:
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
            story.text += chunk.reasoning_content + chunk.text
            story.num_tokens = chunk.usage.completion_tokens
            story.finish = chunk.finish_reason
    except JpagedError as error:
        story.error = error


def _columns(stories: Sequence[_Story], console: Console) -> Columns:
    """Return panels side by side that fit the terminal; each shows the end of a story."""
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
    """Print the text since the last call in whole lines, each with the story's number."""
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
    table.add_row("peak KV blocks in use", f"{load.peak_blocks_used} of {load.num_blocks}")
    table.add_row("reserved KV slots that held tokens", f"{100 * load.slot_use:.1f} %")
    return table
