"""Parses the command line and runs one subcommand. Defines the output and exit codes of errors.

0  done      1  failed while running      2  the command line is invalid      70  a bug in jpaged
130  interrupted      141  the reader of the output has gone

Every error is one sentence; JPAGED_TRACEBACK=1 also prints the traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from jpaged.cli import batch, completion, convert, demo, doctor, generate, health, plan, route, serve, top
from jpaged.cli import help as help_command
from jpaged.cli.bench import command as bench
from jpaged.cli.help import HelpFormatter, add_help
from jpaged.config import shows_traces
from jpaged.errors import InvalidArgument, JpagedError, printable, sentence_of
from jpaged.version import __version__

COMMANDS: dict[str, ModuleType] = {
    "serve": serve,
    "route": route,
    "generate": generate,
    "batch": batch,
    "health": health,
    "bench": bench,
    "convert": convert,
    "plan": plan,
    "top": top,
    "demo": demo,
    "doctor": doctor,
    "completion": completion,
    "help": help_command,
}
"""Each module has HELP and DESCRIPTION, add_arguments(parser) and run(arguments) -> exit code."""

_EPILOG = """\
jpaged COMMAND --help lists a command's options; --help=WORD limits them to the group WORD or to
options with WORD in their names.
"""
_MAX_SHOWN = 4000
"""Maximum characters of an error, because files and options may be part of it."""
_BUG, _INTERRUPTED, _NOT_READ = 70, 130, 141
"""Exit codes: EX_SOFTWARE of sysexits.h, and a shell's codes for SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = _with_dashes(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()  # flush here: at exit, an error would be printed with a traceback
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BaseException as error:  # the last resort at the top level
        name = f"jpaged {words[0]}" if words and words[0] in COMMANDS else "jpaged"
        return _tell(name, error)
    return code


def _run(words: Sequence[str]) -> int:
    try:
        arguments = make_parser().parse_args(words)
        return int(COMMANDS[arguments.command].run(arguments))
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends the program this way if the reader has gone
            return _NOT_READ
        return end.code if isinstance(end.code, int) else 2  # argparse has printed the usage, or the error


def _tell(name: str, error: BaseException) -> int:
    """Print the error that ended a command in one sentence; return the exit code."""
    if isinstance(error, BrokenPipeError) and error.filename is None:
        _silence_stdout()
        return _NOT_READ
    if shows_traces():
        traceback.print_exception(error)
    text, code = sentence_of(error), 1
    if isinstance(error, InvalidArgument):
        text, code = f"error: {text}", 2
    elif not isinstance(error, JpagedError | OSError | MemoryError):
        code = _BUG
    text = "\n".join(
        map(printable, text.split("\n"))
    )  # file names may not be UTF-8, and servers may send control characters
    if len(text) > _MAX_SHOWN:
        text = f"{text[: _MAX_SHOWN // 2]} ... {text[-_MAX_SHOWN // 2 :]} ({len(text)} characters)"
    with contextlib.suppress(OSError):  # stderr may be closed too
        print(f"{name}: {text}", file=sys.stderr, flush=True)
    return code


def _silence_stdout() -> None:
    """Discard buffered output: Python would retry the write at exit, and print the error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; commands about the command line get it as `command_line`."""
    parser = argparse.ArgumentParser(
        prog="jpaged",
        description="Serve large language models from a paged KV cache.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(command_line=parser)
    parser.add_argument("--version", action="version", version=f"jpaged {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            allow_abbrev=False,
            add_help=False,
            formatter_class=HelpFormatter,
        )
        add_help(command)
        module.add_arguments(command)
    return parser


def _with_dashes(words: Sequence[str]) -> list[str]:
    """Replace underscores in flag names by dashes (`--max_model_len=8`); values stay unchanged."""
    fixed = []
    for word in words:
        name, equals, value = word.partition("=")
        fixed.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return fixed
