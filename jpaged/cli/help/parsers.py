"""The parsers of subcommands, and those that take their arguments late."""

from __future__ import annotations

import argparse
from typing import Any


class LateParser(argparse.ArgumentParser):
    """Takes its arguments when the first command line is read, or when somebody asks for them."""

    _is_complete = False

    def take_arguments(self) -> None:
        """Adds the arguments; called once, before they are needed."""
        raise NotImplementedError

    def complete(self) -> None:
        """Sees to it that the arguments are there."""
        if not self._is_complete:
            self._is_complete = True
            self.take_arguments()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reads a command line with all arguments in place."""
        self.complete()
        return super().parse_known_args(args, namespace)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's subcommands, by name, in their order; late ones are complete."""
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
