"""The subcommand `bench`: one subcommand per benchmark, imported on demand.

Importing all of them takes 0.2 s, which a starting server should not pay.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from jpaged.cli.help.action import add_help
from jpaged.cli.help.formatter import HelpFormatter
from jpaged.cli.help.parsers import LateParser

HELP = "measure"
DESCRIPTION = """\
Measure. Without options each of these runs the embedded model, in about a minute.

throughput  requests and tokens a second of LLM.generate
latency     how long it takes for one batch
serve       a server under load, of ours or with OpenAI's API
startup     how long a server takes until it answers
compare     two results side by side
probe       bandwidth and FLOPs of this machine
simulate    serves a trace in simulated time, on any accelerator, with the real scheduler
fleet       serves a day on a thousand replicas in simulated time, with routers, failures and prices
kernels     times the attention kernels of this device
"""

BENCHMARKS: Mapping[str, str] = {
    "throughput": "measure requests and tokens a second, offline",
    "latency": "measure how long one batch takes, offline",
    "serve": "measure a server under load",
    "startup": "measure how long a server takes until it answers",
    "compare": "compare two results",
    "probe": "measure bandwidth and FLOPs of this machine",
    "simulate": "serve a trace in simulated time",
    "fleet": "serve a day on many replicas in simulated time",
    "kernels": "time the attention kernels",
}
"""Help text of each; its module has DESCRIPTION, add_arguments(parser) and run(arguments) -> exit code."""


class _BenchmarkParser(LateParser):
    """Parser that takes its arguments from the benchmark's module."""

    def take_arguments(self) -> None:
        """Import the module and add its arguments."""
        module = _module_of(self.prog.rpartition(" ")[2])
        self.description = module.DESCRIPTION
        module.add_arguments(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per benchmark."""
    benchmarks = parser.add_subparsers(
        dest="benchmark", required=True, metavar="BENCHMARK", parser_class=_BenchmarkParser
    )
    for name, text in BENCHMARKS.items():
        add_help(
            benchmarks.add_parser(name, help=text, allow_abbrev=False, add_help=False, formatter_class=HelpFormatter)
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark and return its exit code."""
    return int(_module_of(arguments.benchmark).run(arguments))


def _module_of(benchmark: str) -> ModuleType:
    return import_module(f"jpaged.cli.bench.{benchmark}")
