"""The flag --help: the whole help of a command, or the part that a word selects.

jpaged serve --help            everything, in groups
jpaged serve --help=cache      the group of that name
jpaged serve --help=swap       the options with that in their name
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class HelpAction(argparse.Action):
    """Prints the help of a command, whole or the part that a word selects, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        text = "print this help, or only the group named WORD or the options with WORD in their names, and exit"
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, metavar="WORD", help=text)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print the help, or reject a word that matches nothing."""
        print(parser.format_help() if values is None else help_about(parser, values), end="")
        parser.exit()


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add -h and --help to a parser that was created without them."""
    parser.add_argument("-h", "--help", action=HelpAction)


def help_about(parser: argparse.ArgumentParser, word: str) -> str:
    """Return the part of a command's help that a word selects: a group, or options with it in their names.

    Exits the program with an error if it matches nothing.
    """
    groups = [group for group in parser._action_groups if group._group_actions]
    wanted = word.lstrip("-").replace("_", "-").lower()
    formatter = parser.formatter_class(prog=parser.prog)
    named = [group for group in groups if group.title is not None and group.title.lower() == wanted]
    for group in named or groups:
        actions = group._group_actions if named else [one for one in group._group_actions if _is_like(one, wanted)]
        if actions:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(actions)
            formatter.end_section()
    text = formatter.format_help()
    if not text.strip():
        titles = ", ".join(str(group.title) for group in groups)
        parser.error(f"argument --help: no group or option matches {word!r}; the groups are {titles}")
    return text


def _is_like(action: argparse.Action, wanted: str) -> bool:
    names = action.option_strings or [str(action.metavar or action.dest)]
    return bool(wanted) and any(wanted in name.lower() for name in names)
