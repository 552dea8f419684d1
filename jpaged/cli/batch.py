"""The subcommand `batch`: a file of requests -> a file of answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jpaged.cli.options import add_credential_flags, credentials_from
from jpaged.client.batch import DEFAULT_MAX_CONCURRENCY, BatchOptions, BatchSummary, run_batch
from jpaged.errors import InvalidArgument, Unavailable

DESCRIPTION = """\
Run an OpenAI batch file against servers. After a crash, run the same command again to resume.

    jpaged batch -i requests.jsonl -o results.jsonl --target localhost:50051
    jpaged batch requests.jsonl.gz results.jsonl.gz --target localhost:50051
    jpaged batch requests.parquet results.parquet --target gpu-0:50051,gpu-1:50051

Each line is a request for /v1/chat/completions, /v1/completions, /v1/embeddings or /v1/score. A score request has
either a prompt and continuations, which get log-probabilities, or text_1 and text_2, whose embeddings are compared.

Several servers of one model share the lines, each up to its free capacity. If a server goes away, the other servers
run its unfinished lines, and the command keeps trying to reconnect to it. A line without a seed gets one derived from
its custom_id, so that its result does not depend on the server. Parquet files have the columns custom_id, method, url
and body.

Failed requests are written to the output as well. Exit code 1 means that the output contains failed requests, also
from an earlier run. A later run retries those that failed for a temporary reason (the server was unreachable, too slow
or died) and keeps the others.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for input, output, servers and concurrency."""
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="input and output file, instead of -i and -o"
    )
    parser.add_argument(
        "-i",
        "--input",
        type=Path,
        metavar="FILE",
        help="requests: a file with one JSON object per line, optionally gzip-compressed, a .parquet file, or a "
        "folder of .parquet files",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="output file, in .gz or .parquet format by its name; resumed if it exists",
    )
    parser.add_argument(
        "--target",
        required=True,
        action="append",
        metavar="HOST:PORT",
        help="address of a server; repeatable or comma-separated for several",
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=DEFAULT_MAX_CONCURRENCY,
        metavar="N",
        help=f"maximum requests in flight per server, up to its capacity (default: {DEFAULT_MAX_CONCURRENCY})",
    )
    parser.add_argument(
        "--timeout", type=float, default=None, metavar="S", help="timeout per request in seconds (default: none)"
    )
    add_credential_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the batch; return 0 if every line succeeded, 1 if some failed (now or earlier) or the servers are gone."""
    source, output = _files(arguments)
    if not (source.is_file() or source.is_fifo() or source.is_dir()):  # a device may have no end
        raise InvalidArgument("--input", f"{source} is not a file")
    if not output.parent.is_dir():
        raise InvalidArgument("--output", f"there is no folder {output.parent}")
    shown = credentials_from(arguments)
    options = BatchOptions(
        source,
        output,
        arguments.target,
        arguments.max_concurrency,
        arguments.timeout,
        shown.api_key,
        shown.tls,
        shown.proxy,
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
            gone = "the server is gone" if len(options.targets) == 1 else "all servers are gone"
            print(f"{gone}: {error}\nrun the same command again to resume", file=sys.stderr)
            return 1
    _print_summary(latest)
    return 1 if latest.has_failures else 0


def _files(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Return input and output, each given by its option, or both as positional arguments."""
    files = list(arguments.files)
    if len(files) not in (0, 2) or (files and (arguments.input or arguments.output)):
        raise InvalidArgument("FILE", f"{len(files)} given: give input and output, without -i and -o")
    source, output = files or (arguments.input, arguments.output)
    for name, path in (("--input", source), ("--output", output)):
        if path is None:
            raise InvalidArgument(name, "is missing")
    return source, output


def _print_summary(summary: BatchSummary) -> None:
    failed = f" ({summary.num_failed_before} of them failed)" if summary.num_failed_before else ""
    kept = f", {summary.num_skipped} kept from before{failed}" if summary.num_skipped else ""
    print(
        f"{summary.num_lines} requests: {summary.num_succeeded} succeeded, {summary.num_failed} failed{kept}; "
        f"{summary.num_retries} retries; {summary.prompt_tokens} prompt and {summary.completion_tokens} generated "
        f"tokens in {summary.elapsed_s:.1f} s ({summary.tokens_per_s:.1f} tokens/s)",
        file=sys.stderr,
    )
    if len(summary.num_answered) > 1:
        shares = ", ".join(f"{name} {number}" for name, number in summary.num_answered.items())
        print(f"answered by {shares}", file=sys.stderr)
