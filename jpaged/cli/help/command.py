"""The subcommand `help`: help of a command, paged on a terminal."""

from __future__ import annotations

import argparse
import pydoc
import shutil
import sys

from jpaged.cli.help.action import help_about
from jpaged.cli.help.parsers import commands_of
from jpaged.errors import InvalidArgument

HELP = "tell about the commands and their options"
DESCRIPTION = """\
Tell about the commands and their options, a screen at a time on a terminal.

    jpaged help                       the commands
    jpaged help serve                 one of them
    jpaged help serve scheduler       a group of its options
    jpaged help bench serve rate      the options with a word in their names
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the command and a word."""
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="a command, and the name of a group or a part of an option's name"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the help that the words select."""
    parser, words = arguments.command_line, list(arguments.words)
    while words and (commands := commands_of(parser)):
        if words[0] not in commands:
            raise InvalidArgument("WORD", f"{words[0]!r} is none of {', '.join(commands)}")
        parser = commands[words.pop(0)]
    if len(words) > 1:
        raise InvalidArgument("WORD", f"{' '.join(words)!r}: one word after a command")
    _show(help_about(parser, words[0]) if words else parser.format_help())
    return 0


def _show(text: str) -> None:
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        pydoc.pager(text)
    else:
        print(text, end="")
