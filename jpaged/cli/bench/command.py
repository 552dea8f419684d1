"""The subcommand `bench`: one subcommand of its own a benchmark."""

from __future__ import annotations

import argparse
from types import ModuleType

from jpaged.cli.bench import compare, kernels, latency, probe, serve, simulate, startup, throughput

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
kernels     times the attention kernels of this device
"""

BENCHMARKS: dict[str, ModuleType] = {
    "throughput": throughput,
    "latency": latency,
    "serve": serve,
    "startup": startup,
    "compare": compare,
    "probe": probe,
    "simulate": simulate,
    "kernels": kernels,
}
"""Each module has HELP, add_arguments(parser) and run(arguments) -> exit code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand a benchmark."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, module in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False)
        benchmark.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(benchmark)


def run(arguments: argparse.Namespace) -> int:
    """The exit code of the benchmark."""
    return int(BENCHMARKS[arguments.benchmark].run(arguments))
