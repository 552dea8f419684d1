"""The subcommand `completion`: a script that completes the command line in a shell.

A shell may run it at every start, so it imports no command: `completion.json` has their arguments. After a change of
arguments, `python -m tests.cli.record_completion` writes the file again.

    {"description": ..., "help": ..., "arguments": [{"flags": [...], "action": ..., "help": ..., ...}, ...],
     "commands": {"serve": {"description": ..., ...}, ...}}
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jpaged.cli.main import COMMANDS

DESCRIPTION = """\
Print a script that completes commands, options, their choices and paths in a shell.

    eval "$(jpaged completion bash)"                                  in ~/.bashrc
    jpaged completion zsh > ~/.zfunc/_jpaged                          in a folder of fpath
    jpaged completion tcsh > ~/.jpaged.tcsh                           then source it in ~/.tcshrc
"""
SHELLS = ("bash", "zsh", "tcsh")
RECORD = Path(__file__).with_suffix(".json")
_FILES = frozenset({"FILE", "MODEL", "SOURCE"})
_FOLDERS = frozenset({"DIR", "FOLDER", "DESTINATION"})
"""Metavars of files and of folders."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the shell."""
    parser.add_argument("shell", choices=SHELLS, help="shell to print the script for")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    import shtab  # which nothing else needs

    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    absent = [name for name, command in COMMANDS.items() if command.extra and not find_spec(f"jpaged.{command.extra}")]
    for name in absent:
        del recorded["commands"][name]
    parser = argparse.ArgumentParser(prog="jpaged", add_help=False)
    _add(parser, recorded, shtab.FILE, shtab.DIRECTORY)
    print(shtab.complete(parser, arguments.shell))
    return 0


def _add(parser: argparse.ArgumentParser, recorded: dict[str, Any], file: object, folder: object) -> None:
    """Add recorded arguments to a parser, with what completes files and folders."""
    parser.description = recorded["description"]
    for argument in recorded["arguments"]:
        keywords = {key: value for key, value in argument.items() if key != "flags"}
        keywords["help"] = keywords["help"].replace("%", "%%")  # argparse formats help texts
        if isinstance(keywords.get("metavar"), list):
            keywords["metavar"] = tuple(keywords["metavar"])
        action = parser.add_argument(*argument["flags"], **keywords)
        if action.metavar in _FILES:
            action.complete = file  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = folder  # type: ignore[attr-defined]
    if recorded["commands"]:
        commands = parser.add_subparsers(metavar="COMMAND")
        for name, command in recorded["commands"].items():
            one = commands.add_parser(name, help=command["help"].replace("%", "%%"), add_help=False)
            _add(one, command, file, folder)
