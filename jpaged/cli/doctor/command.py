"""The subcommand `doctor`: checks the installation, and shows the effective settings."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from jpaged import json_text
from jpaged.cli.doctor import devices, machine, packages
from jpaged.cli.doctor.finding import Finding
from jpaged.cli.options import add_config_flags, config_from, config_values
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.version import __version__

HELP = "check the installation and list missing components"
DESCRIPTION = """\
Check the installation: list missing components with the features they disable, and show how a model would be served.

    jpaged doctor
    jpaged doctor MODEL --tensor-parallel-size 2 --port 8000
    jpaged doctor --json

The command accepts the options of `jpaged serve` and starts no server. It reads only the model's config and tokenizer,
and downloads nothing. Exit code 0: no check found a problem that prevents such a server; 1: at least one did.
"""
_STYLES = {"ok": "green", "off": "dim", "warn": "yellow", "stop": "bold red"}
_NAME_COLUMNS, _INDENT = 24, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the output format, the timeout, and every option of a server."""
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="timeout for the device check in seconds (default: 60)"
    )
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print all findings; return 1 if one of them prevents a server from starting."""
    if not (arguments.timeout > 0 and math.isfinite(arguments.timeout)):
        raise InvalidArgument("--timeout", f"{arguments.timeout} is not a finite number above 0")
    config = config_from(arguments)
    found = list(_look(config, config_values(arguments), arguments.timeout))
    stops = [one for one in found if one.state == "stop"]
    if arguments.json:
        listed = [asdict(one) for one in found]
        print(json_text.dumps({"version": __version__, "ok": not stops, "findings": listed}, indent=2))
    else:
        _show(found, stops, config.model.model)
    return 1 if stops else 0


def _look(config: EngineConfig, options: dict[str, object], timeout_s: float) -> Iterator[Finding]:
    yield from packages.python()
    yield from packages.requirements()
    yield from packages.extras()
    yield from packages.undriven()
    yield from devices.findings(devices.ask(options, timeout_s))
    yield from machine.findings(config)
    yield from machine.environment()


def _show(found: Sequence[Finding], stops: Sequence[Finding], model: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for group in dict.fromkeys(one.group for one in found):
        console.print(Text(f"{group}", style="bold"))
        for one in found:
            if one.group == group:
                _show_one(console, one)
    if stops:
        names = ", ".join(one.name for one in stops)
        console.print(
            Text(f"Problems that prevent `jpaged serve {model}` ({len(stops)}): {names}", style=_STYLES["stop"])
        )
    else:
        console.print(f"No problem found that prevents `jpaged serve {model}`.", markup=False)


def _show_one(console: Console, one: Finding) -> None:
    line = Text("  ")
    line.append(f"{one.state:<5} ", _STYLES[one.state])
    line.append(f"{one.name:<{_NAME_COLUMNS}} {one.value}")
    console.print(line)
    width = max(40, console.width - _INDENT)
    for text in filter(None, (one.note, one.remedy and f"-> {one.remedy}")):
        console.print(Text(textwrap.indent(textwrap.fill(text, width), " " * _INDENT), "dim"))
