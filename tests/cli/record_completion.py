"""Records the arguments of every command for shell completion: python -m tests.cli.record_completion"""

import argparse
from typing import Any

from jpaged import json_text
from jpaged.cli.completion import RECORD
from jpaged.cli.help import get_commands
from jpaged.cli.main import make_parser


def record() -> str:
    """The text of the file."""
    return "\n".join(_lines(_node(make_parser(), "jpaged"))) + "\n"


def _lines(node: dict[str, Any]) -> list[str]:
    """A line of JSON for each argument, so that a change of one is a change of one line."""
    written = [json_text.dumps(one) for one in node["arguments"]]
    begin = f'{{"description": {json_text.dumps(node["description"])}, "help": {json_text.dumps(node["help"])},'
    lines = [begin, '"arguments": [', *(f"{one}," for one in written[:-1]), *written[-1:], '], "commands": {']
    for number, (name, command) in enumerate(node["commands"].items(), start=1):
        first, *more = _lines(command)
        lines += [f"{json_text.dumps(name)}: {first}", *more]
        if number < len(node["commands"]):
            lines[-1] += ","
    return [*lines, "}}"]


def _node(parser: argparse.ArgumentParser, help: str) -> dict[str, Any]:
    commands = get_commands(parser)  # first: it adds the arguments
    actions = [one for one in parser._actions if not isinstance(one, argparse._SubParsersAction)]
    helps = {
        one.dest: one.help
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for one in action._get_subactions()
    }
    return {
        "description": " ".join((parser.description or "").partition("\n\n")[0].split()),
        "help": help,
        "arguments": [_argument(parser, action) for action in actions],
        "commands": {name: _node(command, helps[name] or "") for name, command in commands.items()},
    }


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> dict[str, Any]:
    found: dict[str, Any] = {
        "flags": list(action.option_strings) or [action.dest],
        "help": parser._get_formatter()._expand_help(action) if action.help else "",
    }
    if isinstance(action, argparse._VersionAction):
        return found | {"action": "version", "version": ""}
    if isinstance(action, argparse._HelpAction):
        return found | {"action": "help"}
    if action.nargs == 0:
        return found | {"action": "store_true"}
    if isinstance(action, argparse._AppendAction):
        found["action"] = "append"
    for name in ("nargs", "metavar"):
        if (value := getattr(action, name)) is not None:
            found[name] = value
    if action.choices is not None:
        found["choices"] = list(action.choices)
    return found


if __name__ == "__main__":
    RECORD.write_text(record(), encoding="utf-8")
