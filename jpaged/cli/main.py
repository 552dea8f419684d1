"""Parser of the command line, and runner of one subcommand. Defines the output and exit codes of errors.

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
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from jpaged.cli.help import HelpFormatter, LateParser, add_help
from jpaged.errors import InvalidArgument, JpagedError, Unsupported, describe_error, printable
from jpaged.version import __version__


class Command(NamedTuple):
    """A command: its help text and its module.

    The module has DESCRIPTION, add_arguments(parser) and run(arguments) -> exit code.

    Attributes:
        extra: name of the optional part of jpaged that has the command, and of its extra; None for the core.
    """

    help: str
    module: str
    extra: str | None = None


COMMANDS: Mapping[str, Command] = {
    "serve": Command("serve a model over gRPC", "jpaged.cli.serve"),
    "route": Command("route calls to many servers of one model", "jpaged.route.cli", "route"),
    "generate": Command("generate from prompts, without a server", "jpaged.cli.generate"),
    "batch": Command("run an OpenAI batch file against servers", "jpaged.cli.batch"),
    "health": Command("check whether a server is serving", "jpaged.cli.health"),
    "bench": Command("run a benchmark", "jpaged.bench.cli", "bench"),
    "convert": Command("write a model as safetensors or as Orbax", "jpaged.cli.convert"),
    "plan": Command("estimate fit, speed and cost of a deployment on TPUs or GPUs", "jpaged.plan.cli", "plan"),
    "top": Command("watch the KV pool of a running server", "jpaged.inspector.cli", "inspector"),
    "demo": Command("serve the embedded model and stream from it", "jpaged.cli.demo"),
    "doctor": Command("check the installation and list missing components", "jpaged.cli.doctor"),
    "completion": Command("print a shell completion script", "jpaged.cli.completion"),
    "help": Command("show help for commands and options", "jpaged.cli.help"),
}
"""Commands by name. Their modules are imported when the command line needs them.

The core imports the modules of optional parts only through this table.
"""
_OF_VLLM = {
    **dict.fromkeys(("chat", "complete"), "send requests with curl or the openai package, or use jpaged generate"),
    "run-batch": "use jpaged batch",
    "collect-env": "use jpaged doctor",
}
"""Commands of vLLM that have another name here."""
_PACKAGES_OF_EXTRAS = {"httpx2": "bench", "matplotlib": "bench", "lm_eval": "lm-eval"}
"""Packages that only optional parts import, and their extras."""

_EPILOG = """\
jpaged COMMAND --help lists a command's options; --help=WORD limits them to the group WORD or to
options with WORD in their names.
"""
_MAX_SHOWN = 4000
"""Maximum characters of an error, because files and options may be part of it."""
_BUG, _INTERRUPTED, _NOT_READ = 70, 130, 141
"""Exit codes: EX_SOFTWARE of sysexits.h, and a shell's codes for SIGINT and SIGPIPE."""


class CommandImportError(Exception):
    """A command's module cannot be imported, because a required package is missing or broken; the cause names it."""


def load(name: str, module: str | None = None) -> ModuleType:
    """Import the module of a command.

    Args:
        module: another module of the command, such as that of a benchmark.

    Raises:
        Unsupported: this installation was built without the command, or its extra is not installed.
        CommandImportError: a required package is missing or broken.
    """
    try:
        return import_module(module or COMMANDS[name].module)
    except Exception as error:
        if (missing := _missing_part(error)) is not None:
            raise missing from error
        from jpaged.cli import packages

        if not packages.is_broken(error):
            raise
        raise CommandImportError(name) from error


def _missing_part(error: BaseException) -> Unsupported | None:
    """Return the error for a missing module of an optional part or an extra; None if it belongs to neither.

    An extra has only third-party packages. The folder of an optional part is missing if it was deleted, as from an
    image.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    package, _, rest = (error.name or "").partition(".")
    if (extra := _PACKAGES_OF_EXTRAS.get(package)) is not None:
        return Unsupported(f"{package} is not installed: pip install 'jpaged[{extra}]'")
    part = rest.partition(".")[0] if package == "jpaged" else ""
    names = [name for name, command in COMMANDS.items() if part and command.extra == part]
    if not names:
        return None
    remedy = f"pip install --force-reinstall --no-deps jpaged=={__version__}"
    return Unsupported(f"this installation was built without `jpaged {names[0]}`; for the full package: {remedy}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        words = _normalized(words)
        code = _run(words)
        sys.stdout.flush()  # flush here: at exit, an error would be printed with a traceback
    except KeyboardInterrupt:
        return _INTERRUPTED
    except CommandImportError as error:
        from jpaged.cli import packages

        return packages.refuse(words, error.__cause__ or error)
    except BaseException as error:  # the last resort at the top level
        name = f"jpaged {words[0]}" if words and words[0] in COMMANDS else "jpaged"
        return _print_error(name, error)
    return code


def _run(words: Sequence[str]) -> int:
    if words and words[0] in _OF_VLLM:
        raise InvalidArgument(words[0], f"is a command of vLLM: {_OF_VLLM[words[0]]}")
    try:
        arguments = make_parser().parse_args(words)
        for note in getattr(arguments, "notes", ()):
            print(f"jpaged {arguments.command}: {printable(note)}", file=sys.stderr)
        return int(load(arguments.command).run(arguments))
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends the program this way if the reader has gone
            return _NOT_READ
        return end.code if isinstance(end.code, int) else 2  # argparse has printed the usage, or the error


def _print_error(name: str, error: BaseException) -> int:
    """Print the error that ended a command in one sentence; return the exit code."""
    if isinstance(error, BrokenPipeError) and error.filename is None:
        _silence_stdout()
        return _NOT_READ
    from jpaged.config import shows_traces

    if shows_traces():
        traceback.print_exception(error)
    error = _missing_part(error) or error
    text, code = describe_error(error), 1
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


class _CommandParser(LateParser):
    """Parser that takes its arguments from the command's module."""

    def take_arguments(self) -> None:
        """Import the module and add its arguments."""
        module = load(self.prog.rpartition(" ")[2])
        self.description = module.DESCRIPTION
        module.add_arguments(self)


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
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    for name, command in COMMANDS.items():
        add_help(
            commands.add_parser(
                name, help=command.help, allow_abbrev=False, add_help=False, formatter_class=HelpFormatter
            )
        )
    return parser


def _normalized(words: Sequence[str]) -> list[str]:
    """Return the words with the other spellings of flags, those of vLLM, replaced.

    Underscores in names become dashes (`--max_model_len=8`), except those of JSON keys (`--kv-transfer-config.kv_role`)
    and in values. Flags of JSON keys become one flag with the JSON object.
    """
    fixed, is_dotted = [], False
    for word in words:
        name, equals, value = word.partition("=")
        flag, dot, key = name.partition(".")
        is_flag = word.startswith("--")
        is_dotted = is_dotted or (is_flag and bool(dot))
        fixed.append(flag.replace("_", "-") + dot + key + equals + value if is_flag else word)
    if is_dotted:
        from jpaged.cli.options import merge_json_flags

        return merge_json_flags(fixed)
    return fixed
