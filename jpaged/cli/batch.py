"""The subcommand `batch`: a file of requests -> a file of answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jpaged.client.batch import DEFAULT_MAX_CONCURRENCY, BatchOptions, BatchSummary, run_batch
from jpaged.errors import InvalidArgument, Unavailable

HELP = "run an OpenAI batch file against a server"
DESCRIPTION = """\
Run an OpenAI batch file against a server; run it again after a crash and it goes on where it stopped.

    jpaged batch -i requests.jsonl -o results.jsonl --target localhost:50051

Failed requests are lines of the output too, and exit code 1 says that there are any, also of an earlier run. Those
that failed for a reason that may pass (the server was away, too slow, or died) run again; the others stay.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Input, output, the server, and how much at a time."""
    parser.add_argument(
        "-i", "--input", required=True, type=Path, metavar="FILE", help="requests, one JSON object a line"
    )
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="results; taken up again if it exists"
    )
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="where the server is")
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=DEFAULT_MAX_CONCURRENCY,
        metavar="N",
        help=f"requests in flight (default: {DEFAULT_MAX_CONCURRENCY})",
    )
    parser.add_argument(
        "--timeout", type=float, default=None, metavar="S", help="seconds for each request (default: none)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 when every line has succeeded, 1 when some failed, now or before, or the server went away."""
    if not (arguments.input.is_file() or arguments.input.is_fifo()):  # a device may have no end
        raise InvalidArgument("--input", f"{arguments.input} is not a file")
    if not arguments.output.parent.is_dir():
        raise InvalidArgument("--output", f"there is no folder {arguments.output.parent}")
    options = BatchOptions(
        arguments.input, arguments.output, arguments.target, arguments.max_concurrency, arguments.timeout
    )
    latest = BatchSummary()
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(TextColumn("requests"), *columns, console=console) as bar:
        task = bar.add_task("", total=None, rate="")

        def show(summary: BatchSummary) -> None:
            nonlocal latest
            latest = summary
            rate = f"{summary.tokens_per_s:.0f} tokens/s"
            bar.update(task, total=summary.num_lines, completed=summary.num_done, rate=rate)

        try:
            asyncio.run(run_batch(options, show))
        except Unavailable as error:
            bar.stop()
            _print_summary(latest)
            print(f"the server is gone: {error}\nrun the same command again to go on", file=sys.stderr)
            return 1
    _print_summary(latest)
    return 1 if latest.has_failures else 0


def _print_summary(summary: BatchSummary) -> None:
    failed = f" ({summary.num_failed_before} of them failed)" if summary.num_failed_before else ""
    kept = f", {summary.num_skipped} kept from before{failed}" if summary.num_skipped else ""
    print(
        f"{summary.num_lines} requests: {summary.num_succeeded} succeeded, {summary.num_failed} failed{kept}; "
        f"{summary.num_retries} retries; {summary.prompt_tokens} prompt and {summary.completion_tokens} generated "
        f"tokens in {summary.elapsed_s:.1f} s ({summary.tokens_per_s:.1f} tokens/s)",
        file=sys.stderr,
    )
