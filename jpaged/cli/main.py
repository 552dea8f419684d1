"""Reads the command line and runs one subcommand. Knows how errors look and which exit codes they get.

0  done      1  failed while running      2  the command line is wrong      130  interrupted
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from jpaged.cli import batch, bench, convert, demo, generate, health, plan, serve
from jpaged.errors import InvalidArgument, JpagedError
from jpaged.version import __version__

COMMANDS: dict[str, ModuleType] = {
    "serve": serve,
    "generate": generate,
    "batch": batch,
    "health": health,
    "bench": bench,
    "convert": convert,
    "plan": plan,
    "demo": demo,
}
"""Each module has HELP and DESCRIPTION, add_arguments(parser) and run(arguments) -> exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    words = _with_dashes(sys.argv[1:] if argv is None else argv)
    try:
        arguments = make_parser().parse_args(words)
    except SystemExit as end:  # argparse has printed the usage, or what is wrong
        return end.code if isinstance(end.code, int) else 2
    try:
        return int(COMMANDS[arguments.command].run(arguments))
    except InvalidArgument as error:
        print(f"jpaged {arguments.command}: error: {error}", file=sys.stderr)
        return 2
    except JpagedError as error:
        print(f"jpaged {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="jpaged", description="Serve large language models from a paged KV cache.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"jpaged {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
    return parser


def _with_dashes(words: Sequence[str]) -> list[str]:
    """`--max_model_len=8` is `--max-model-len=8`; values stay as they are."""
    fixed = []
    for word in words:
        name, equals, value = word.partition("=")
        fixed.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return fixed
