"""Parsers of subcommands, and lazy parsers."""

from __future__ import annotations

import argparse
from typing import Any


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
        """Parse a command line after adding all arguments."""
        self.complete()
        return super().parse_known_args(args, namespace)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a command's subcommands, by name, in order; lazy ones are completed."""
    found = {
        name: command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }
    for command in found.values():
        if isinstance(command, LateParser):
            command.complete()
    return found
