"""The subcommand `bench`: one module per benchmark, imported on demand.

serve.py       bench serve
servers.py     the server that `bench serve` measures
throughput.py  bench throughput
latency.py     bench latency
offline.py     the LLM that these two measure
startup.py     bench startup
compare.py     bench compare
probe.py       bench probe
kernels.py     bench kernels
simulate.py    bench simulate
fleet.py       bench fleet
flags.py       flags and result tables shared by several benchmarks
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import ModuleType

from jpaged.cli.help import HelpFormatter, LateParser, add_help
from jpaged.cli.main import load

DESCRIPTION = """\
Run a benchmark. Without options, each benchmark runs the embedded model and takes about a minute.

throughput  offline throughput of LLM.generate, in requests and tokens per second
latency     offline latency of one batch
serve       a server under load: jpaged or any OpenAI-compatible server
startup     time from start until a server answers requests
compare     two results side by side
probe       memory bandwidth and FLOP/s of this machine
simulate    a trace in simulated time, on any accelerator, with the real scheduler
fleet       a day on a thousand replicas in simulated time, with routers, failures and prices
kernels     the attention kernels of this device
"""

BENCHMARKS: Mapping[str, str] = {
    "throughput": "measure offline throughput",
    "latency": "measure the offline latency of one batch",
    "serve": "measure a server under load",
    "startup": "measure the time until a server answers requests",
    "compare": "compare two results",
    "probe": "measure memory bandwidth and FLOP/s of this machine",
    "simulate": "serve a trace in simulated time",
    "fleet": "serve a day on many replicas in simulated time",
    "kernels": "time the attention kernels",
}
"""Help text of each; its module has DESCRIPTION, add_arguments(parser) and run(arguments) -> exit code."""


class _BenchmarkParser(LateParser):
    """Parser that takes its arguments from the benchmark's module."""

    def take_arguments(self) -> None:
        """Import the module and add its arguments."""
        module = _get_module(self.prog.rpartition(" ")[2])
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
    return int(_get_module(arguments.benchmark).run(arguments))


def _get_module(benchmark: str) -> ModuleType:
    return load("bench", f"jpaged.bench.cli.{benchmark}")
