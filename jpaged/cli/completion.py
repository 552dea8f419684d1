"""The subcommand `completion`: a script that completes the command line in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from jpaged.cli.help import get_commands

DESCRIPTION = """\
Print a script that completes commands, options, their choices and paths in a shell.

    eval "$(jpaged completion bash)"                                  in ~/.bashrc
    jpaged completion zsh > ~/.zfunc/_jpaged                          in a folder of fpath
    jpaged completion tcsh > ~/.jpaged.tcsh                           then source it in ~/.tcshrc
"""
SHELLS = ("bash", "zsh", "tcsh")
_FILES = frozenset({"FILE", "MODEL", "SOURCE"})
_FOLDERS = frozenset({"DIR", "FOLDER", "DESTINATION"})
"""Metavars of files and of folders."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the shell."""
    parser.add_argument("shell", choices=SHELLS, help="shell to print the script for")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab  # which nothing else needs

    parser = arguments.command_line
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield every argument of a command and its subcommands."""
    yield from parser._actions
    for command in get_commands(parser).values():
        yield from _actions(command)
