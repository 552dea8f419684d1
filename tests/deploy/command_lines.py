"""Holds the command lines that deployments write to the options that `jpaged` has."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence

from jpaged.cli.main import make_parser
from jpaged.cli.options import config_from
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of `jpaged WORDS...`.

    Raises:
        InvalidArgument: jpaged would refuse them, with what it would say.
    """
    if not words or words[0] != "jpaged":
        raise InvalidArgument("command", f"{list(words)} does not run jpaged")
    complaint = io.StringIO()
    with contextlib.redirect_stderr(complaint):
        try:
            return make_parser().parse_args(words[1:])
        except SystemExit:
            raise InvalidArgument("command", complaint.getvalue().strip().splitlines()[-1]) from None


def serve_config(words: Sequence[str]) -> EngineConfig | None:
    """The options of a `jpaged serve`, checked; None for another subcommand."""
    arguments = parse(words)
    return config_from(arguments) if arguments.command == "serve" else None
