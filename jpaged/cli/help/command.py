"""The subcommand `help`: help of a command, paged on a terminal."""

from __future__ import annotations

import argparse
import pydoc
import shutil
import sys

from jpaged.cli.help.action import help_about
from jpaged.cli.help.parsers import commands_of
from jpaged.errors import InvalidArgument

HELP = "show help for commands and options"
DESCRIPTION = """\
Show help for commands and options, through a pager on a terminal.

    jpaged help                       the commands
    jpaged help serve                 one command
    jpaged help serve scheduler       one group of its options
    jpaged help bench serve rate      options with a word in their names
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the command and a word."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="a command, optionally followed by the name of an option group or part of an option name",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the help that the words select."""
    parser, words = arguments.command_line, list(arguments.words)
    while words and (commands := commands_of(parser)):
        if words[0] not in commands:
            raise InvalidArgument("WORD", f"{words[0]!r} is not one of {', '.join(commands)}")
        parser = commands[words.pop(0)]
    if len(words) > 1:
        raise InvalidArgument("WORD", f"{' '.join(words)!r}: only one word may follow a command")
    _show(help_about(parser, words[0]) if words else parser.format_help())
    return 0


def _show(text: str) -> None:
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        pydoc.pager(text)
    else:
        print(text, end="")
