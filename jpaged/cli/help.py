"""The subcommand `help`, paged on a terminal, the flag --help, and the layout of both.

jpaged serve --help            everything, in groups
jpaged serve --help=cache      the group of that name
jpaged serve --help=swap       the options with that in their name

Help is as wide as the terminal up to a readable width, with a usage of one line. Lazy parsers take their arguments when
they are first used.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from jpaged.errors import InvalidArgument, Unsupported


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


class LateParser(argparse.ArgumentParser):
    """Parser that adds its arguments when it first parses, or when they are queried."""

    _is_complete = False

    def take_arguments(self) -> None:
        """Add the arguments; called once, before they are needed."""
        raise NotImplementedError

    def complete(self) -> None:
        """Add the arguments unless they have been added."""
        if not self._is_complete:
            self._is_complete = True
            self.take_arguments()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line after adding all arguments; vLLM's flags are replaced by the command's own.

        Ends the program with this command's usage if an argument is unrecognized. The result has `notes`, a line for
        each replaced flag.
        """
        self.complete()
        words, notes = list(sys.argv[1:] if args is None else args), list[str]()
        is_help = any(word.partition("=")[0] in ("-h", "--help") for word in words)
        if has_engine_options(self) and not is_help:
            from jpaged.cli.vllm_flags import translate  # imports the configuration
            from jpaged.config import vllm_environment

            words, notes = translate(self, words, vllm_environment())
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            from jpaged.cli.vllm_flags import suggest

            hint = suggest(self, unknown, has_vllm_flags=has_engine_options(self))
            self.error("; ".join(filter(None, (f"unrecognized arguments: {' '.join(unknown)}", hint))))
        found.notes = [*getattr(found, "notes", ()), *notes]
        return found, unknown


def has_engine_options(parser: argparse.ArgumentParser) -> bool:
    """Return True if a command has the options of an engine, and so accepts vLLM's flags."""
    return any(action.dest == "config_model" for action in parser._actions)


def get_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a command's subcommands, by name, in order; lazy ones are completed.

    Commands of optional parts that are not installed are left out.
    """
    found = {}
    for name, command in _subparsers(parser).items():
        with contextlib.suppress(Unsupported):
            _complete(command)
            found[name] = command
    return found


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }


def _complete(parser: argparse.ArgumentParser) -> None:
    if isinstance(parser, LateParser):
        parser.complete()


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
    while words and (commands := _subparsers(parser)):
        if words[0] not in commands:
            raise InvalidArgument("WORD", f"{words[0]!r} is not one of {', '.join(commands)}")
        parser = commands[words.pop(0)]
        _complete(parser)
    if len(words) > 1:
        raise InvalidArgument("WORD", f"{' '.join(words)!r}: only one word may follow a command")
    _show(help_about(parser, words[0]) if words else parser.format_help())
    return 0


def _show(text: str) -> None:
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        import pydoc  # imports much

        pydoc.pager(text)
    else:
        print(text, end="")


_MAX_WIDTH = 110
"""Longer lines are hard to read."""
_MAX_FLAG_COLUMNS = 30
_MAX_USAGE_FLAGS = 8
"""Maximum flags that the usage lists individually."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the width, keeps indented lines and tables, and shortens the usage."""

    def __init__(self, prog: str, indent_increment: int = 2, max_help_position: int = _MAX_FLAG_COLUMNS) -> None:
        width = max(40, min(_MAX_WIDTH, shutil.get_terminal_size().columns - 2))
        super().__init__(prog, indent_increment, min(max_help_position, width // 3), width)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """List all flags if there are few, otherwise only required ones."""
        listed = list(actions)
        needed = [action for action in listed if action.required or not action.option_strings]
        if usage is None and len(listed) - len(needed) > _MAX_USAGE_FLAGS:
            usage = " ".join(["%(prog)s", "[OPTION ...]", *(self._word(action) for action in needed)])
        super().add_usage(usage, listed, groups, prefix)

    def _word(self, action: argparse.Action) -> str:
        """Return an argument as the usage shows it."""
        shown = action.metavar or action.dest.upper()
        name = " ".join(shown) if isinstance(shown, tuple) else shown
        values = self._format_args(action, name).replace("%", "%%")
        return " ".join([*action.option_strings[-1:], values]).strip()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fill paragraphs that are neither indented nor tables; keep all others."""
        return "\n\n".join(
            paragraph
            if re.search(r"^\s|\S {2,}\S", paragraph, re.MULTILINE)
            else textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent)
            for paragraph in text.strip("\n").split("\n\n")
        )
