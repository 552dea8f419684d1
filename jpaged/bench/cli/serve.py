"""The subcommand `bench serve`: a server under load, as its clients see it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jpaged.bench import results
from jpaged.bench.cli.flags import (
    add_dataset_flags,
    add_hardware_flag,
    add_output_json,
    dataset_from,
    print_result,
    print_turns,
    require_range,
    require_writable,
)
from jpaged.bench.datasets import SESSION_DATASETS, DatasetOptions, Sample
from jpaged.bench.limits import as_record, serving_shares
from jpaged.bench.load_generator import (
    BACKENDS,
    ArrivalProcess,
    Driven,
    Ramp,
    RampStrategy,
    conversations,
    drive,
    recorded_times_s,
    warm_up,
)
from jpaged.bench.metrics import (
    Trace,
    details,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    summarize,
)
from jpaged.cli.options import add_credential_flags, to_flag
from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jpaged.bench.cli.servers import ReadyServer

DESCRIPTION = """\
Measure a server under load from the client's side: time to first token, time per token, throughput, goodput.

    jpaged bench serve                                              starts a server of the demo model
    jpaged bench serve --target localhost:50051 --request-rate 4 8 16 inf --plot rates.png
    jpaged bench serve --port 8000 --tokenizer ./model --output-json peer.json          an OpenAI-compatible server
    jpaged bench serve --model ./model -- --max-num-seqs 64         flags of `jpaged serve` follow after --

Flags (except their defaults) and result keys are vLLM's, so that `jpaged bench compare` and other tools can read both.
Several rates form a sweep: one run per rate, each with its own prompts, and one plot. Requests are greedy and generate
all their tokens unless --no-ignore-eos is given.

    jpaged bench serve --dataset-name multi_turn --num-prompts 20 --request-rate 2      conversations of five turns
    jpaged bench serve --dataset-name trace --dataset-path mooncake_trace.jsonl --trace-speedup 10

Conversations start at the request rate. A trace is sent at its recorded times unless --request-rate is given.
"""

_MAX_SHOWN_ERRORS = 3
_SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_PORTS = {"jpaged": 50051}
_HTTP_PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the server, the load, and the outputs."""
    _add_server_flags(parser)
    _add_load_flags(parser)
    add_dataset_flags(parser)
    _add_result_flags(parser)
    add_credential_flags(parser)
    parser.add_argument("server_flags", nargs="*", metavar="-- FLAG", help="flags of the server to start")


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend",
        "--endpoint-type",
        choices=(*BACKENDS, "vllm"),
        help="API of the server; vllm: openai (default: openai with --base-url, --host or --port, else jpaged, gRPC)",
    )
    group.add_argument(
        "--target",
        metavar="HOST:PORT",
        help="address of a running jpaged server (default: start one for the benchmark)",
    )
    group.add_argument(
        "--model", metavar="MODEL", help="model to start (default: demo), or name of the model to request"
    )
    group.add_argument(
        "--base-url",
        metavar="URL",
        help="URL of an OpenAI-compatible server (default: http://127.0.0.1:8000)",
    )
    group.add_argument("--host", help="host of the server, instead of --base-url or --target (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=int, metavar="N", help="port of the server at --host (default: 8000; 50051 for jpaged)"
    )
    group.add_argument("--served-model-name", metavar="MODEL", help="name of the model to request (default: --model)")
    group.add_argument(
        "--endpoint", metavar="PATH", help="path of the API (default: /v1/completions or /v1/chat/completions)"
    )
    group.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="header of every HTTP request")
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="extra fields of every request body"
    )
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="the model's folder or Hugging Face Hub id, to count tokens of texts and to compute the limit",
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="data type of the server's model, to compute the limit",
    )
    add_hardware_flag(parser)


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate",
        nargs="+",
        type=float,
        default=[math.inf],
        metavar="R",
        help="requests per second, one run per value; inf sends all at once (default: inf)",
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="N", help="1: Poisson arrivals; below 1: bursty (default: 1)"
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="maximum number of requests in flight (default: no limit)"
    )
    group.add_argument("--ramp-up-strategy", choices=get_args(RampStrategy), help="increase the rate over the run")
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R", help="initial requests per second of the ramp")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R", help="final requests per second of the ramp")
    group.add_argument("--num-warmups", type=int, default=4, metavar="N", help="warm-up requests (default: 4)")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ignore end-of-sequence tokens and generate all tokens (default: on)",
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="N", help="sampling temperature (default: 0, greedy)"
    )
    for name in _SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument(to_flag(name), type=kind, metavar="N", help=f"{name} of requests to an OpenAI backend")
    for name in ("--trust-remote-code", "--disable-tqdm"):
        group.add_argument(name, action="store_true", help="has no effect; a flag of vLLM")


def _add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl,e2el",
        metavar="NAMES",
        help="latencies to report percentiles of: ttft, tpot, itl, e2el, client_queue_time, "
        "e2el_including_client_queue (default: ttft,tpot,itl,e2el)",
    )
    group.add_argument(
        "--metric-percentiles", default="50,90,99", metavar="P", help="percentiles to report (default: 50,90,99)"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="service-level objectives for goodput: ttft, tpot and e2el, in milliseconds",
    )
    group.add_argument(
        "--save-result", action="store_true", help="write a result file per run, named as vLLM names them"
    )
    group.add_argument(
        "--save-detailed", action="store_true", help="include every request's times and text in the result file"
    )
    group.add_argument(
        "--result-dir", type=Path, metavar="DIR", help="folder of the result files (default: current directory)"
    )
    group.add_argument("--result-filename", metavar="NAME", help="name of the result file, for a single run")
    group.add_argument("--label", metavar="NAME", help="label in the file name and the plot (default: the backend)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="metadata to store in the result")
    group.add_argument("--plot", type=Path, metavar="FILE", help="plot latencies against the request rate (.png)")
    add_output_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the numbers of every run; return 1 if a request failed."""
    from jpaged.bench.cli.servers import connect  # imports an HTTP client and the hub's

    _find_server(arguments)
    options, load = dataset_from(arguments), _loads(arguments)
    _check(arguments)
    if options.dataset_name in SESSION_DATASETS and arguments.backend != "jpaged" and options.prompt_format == "ids":
        is_sent = options.dataset_name == "trace" and arguments.backend == "openai"
        if not is_sent:
            raise InvalidArgument("--prompt-format", "must be text: the ids of answers are known only over gRPC")
    console = Console(stderr=True)
    with connect(arguments, console) as served:
        runs = [
            _measure(arguments, served, replace(options, seed=options.seed + number), arrivals)
            for number, arrivals in enumerate(load)
        ]
    _save(arguments, served, options, dict(zip(map(results.speed_word, load), runs, strict=True)))
    return 1 if any(result["failed"] for result in runs) else 0


def _find_server(arguments: argparse.Namespace) -> None:
    """Replace the flags of vLLM's benchmark by those that they stand for.

    Raises:
        InvalidArgument: two of them conflict, or one is not supported by the backend.
    """
    host, port = arguments.host, arguments.port
    is_named = host is not None or port is not None
    backend = arguments.backend or ("openai" if is_named or arguments.base_url is not None else "jpaged")
    arguments.backend = "openai" if backend == "vllm" else backend
    is_ours = arguments.backend == "jpaged"
    if is_named:
        name = "target" if is_ours else "base_url"
        if getattr(arguments, name) is not None:
            flag = "--host" if port is None else "--port"
            raise InvalidArgument(flag, f"conflicts with {to_flag(name)}: give only one of them")
        port = _PORTS.get(arguments.backend, _HTTP_PORT) if port is None else port
        require_range("--port", port, 1, 65535)
        host = host or "127.0.0.1"
        address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        setattr(arguments, name, address if is_ours else f"http://{address}")
    arguments.model = arguments.served_model_name or arguments.model
    sampling = {name: value for name in _SAMPLING if (value := getattr(arguments, name)) is not None}
    if sampling and is_ours:
        raise InvalidArgument(to_flag(next(iter(sampling))), "works only with an OpenAI backend")
    arguments.extra_body = {**sampling, **arguments.extra_body}


def _loads(arguments: argparse.Namespace) -> list[ArrivalProcess]:
    """Return the arrivals of each run."""
    rates = arguments.request_rate
    if twice := [rate for rate in rates if rates.count(rate) > 1]:
        raise InvalidArgument("--request-rate", f"{twice[0]} is given more than once")
    ramp = None
    given = (arguments.ramp_up_start_rps, arguments.ramp_up_end_rps)
    if arguments.ramp_up_strategy is not None:
        if None in given:
            raise InvalidArgument("--ramp-up-strategy", "needs --ramp-up-start-rps and --ramp-up-end-rps")
        if arguments.request_rate != [math.inf]:
            raise InvalidArgument("--ramp-up-strategy", "replaces --request-rate: remove one of them")
        ramp = Ramp(arguments.ramp_up_strategy, *given)
    elif given != (None, None):
        raise InvalidArgument("--ramp-up-start-rps", "requires --ramp-up-strategy")
    return [ArrivalProcess(rate, arguments.burstiness, ramp) for rate in arguments.request_rate]


def _check(arguments: argparse.Namespace) -> None:
    """Reject invalid arguments before a server is started or a request sent."""
    parse_goodput(arguments.goodput)
    parse_metrics(arguments.percentile_metrics)
    parse_percentiles(arguments.metric_percentiles)
    results.parse_metadata(arguments.metadata)
    require_range("--num-warmups", arguments.num_warmups, 0)
    if arguments.max_concurrency is not None:
        require_range("--max-concurrency", arguments.max_concurrency, 1)
    if not 0 <= arguments.temperature <= 100:
        raise InvalidArgument("--temperature", f"{arguments.temperature} is out of range: must be from 0 to 100")
    if arguments.result_filename is not None and len(arguments.request_rate) > 1:
        raise InvalidArgument("--result-filename", "names one file, but each --request-rate needs its own")
    require_writable("--output-json", arguments.output_json)
    if arguments.plot is not None:
        results.require_drawable(arguments.plot)


def _measure(
    arguments: argparse.Namespace, served: ReadyServer, options: DatasetOptions, arrivals: ArrivalProcess
) -> dict[str, Any]:
    """Run once; print and return the numbers."""
    driven, counts = asyncio.run(_drive(arguments, served, options, arrivals))
    metrics, rate = parse_metrics(arguments.percentile_metrics), results.rate_word(arrivals.rate)
    result = results.header("serve", options.seed) | {
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "label": arguments.label or arguments.backend,
        "model_id": served.model,
        "tokenizer_id": arguments.tokenizer or served.model,
        "dtype": served.dtype,
        "num_prompts": options.num_prompts,
        **results.parse_metadata(arguments.metadata),
        "request_rate": rate,
        "burstiness": arrivals.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **({} if arrivals.ramp is None else _ramp_record(arrivals.ramp)),
        "ignore_eos": arguments.ignore_eos,
        "temperature": arguments.temperature,
        "workload": results.workload(options),
        "server": served.facts,
        "server_counts": counts,
        **summarize(
            driven.traces,
            driven.duration_s,
            metrics=metrics,
            percentiles=parse_percentiles(arguments.metric_percentiles),
            goodput=parse_goodput(arguments.goodput),
        ),
        "limits": as_record(served.limits, served.no_limits),
    }
    if served.limits is not None and served.shape is not None:
        result |= serving_shares(served.shape, served.limits, driven.traces, driven.duration_s)
    if arguments.save_detailed:
        result |= details(driven.traces)
    speed = "a ramp" if arrivals.ramp is not None else f"{rate} requests/s"
    print_result(Console(), result, f"{served.model} over {arguments.backend}, {speed}", metrics)
    print_turns(Console(), result)
    _print_errors(driven.traces)
    return result


async def _drive(
    arguments: argparse.Namespace, served: ReadyServer, options: DatasetOptions, arrivals: ArrivalProcess
) -> tuple[Driven, dict[str, int]]:
    """Return the run, and the server's counts during it."""
    samples = options.make(served.vocabulary)
    times_s = _times_s(samples, arrivals, np.random.default_rng(options.seed))
    backend = served.backend()
    try:
        if arguments.num_warmups:
            others = options.for_warm_up().make(served.vocabulary)
            await warm_up(backend, others[0], arguments.num_warmups, arguments.max_concurrency)
        gc.collect()
        gc.freeze()  # the garbage collector then skips the samples while answers are timed
        before = served.counts()
        with _progress(len(samples)) as on_end:
            driven = await drive(backend, samples, times_s, max_concurrency=arguments.max_concurrency, on_end=on_end)
        return driven, {name: count - before[name] for name, count in served.counts().items() if name in before}
    finally:
        await backend.close()


def _times_s(samples: Sequence[Sample], arrivals: ArrivalProcess, rng: np.random.Generator) -> np.ndarray:
    """Return the start of each conversation: as recorded if there is no rate, otherwise as the arrivals say."""
    if arrivals.ramp is None and math.isinf(arrivals.rate) and (recorded := recorded_times_s(samples)) is not None:
        return recorded
    return arrivals.times_s(len(conversations(samples)), rng)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Show a progress bar on stderr, redrawn twice a second to keep its cost low."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as bar:
        task = bar.add_task("", total=total)
        yield lambda trace: bar.advance(task)


def _ramp_record(ramp: Ramp) -> dict[str, Any]:
    return {
        "ramp_up_strategy": ramp.strategy,
        "ramp_up_start_rps": ramp.start_rps,
        "ramp_up_end_rps": ramp.end_rps,
    }


def _print_errors(traces: Sequence[Trace]) -> None:
    errors = dict.fromkeys(trace.error for trace in traces if trace.error)
    for error in list(errors)[:_MAX_SHOWN_ERRORS]:
        count = sum(trace.error == error for trace in traces)
        print(f"{count} failed: {error}", file=sys.stderr)


def _save(
    arguments: argparse.Namespace, served: ReadyServer, options: DatasetOptions, by_speed: Mapping[str, dict[str, Any]]
) -> None:
    runs = list(by_speed.values())
    if arguments.save_result:
        for speed, result in by_speed.items():
            path = results.result_path(
                arguments.result_dir,
                arguments.result_filename,
                label=arguments.label or arguments.backend,
                speed=speed,
                max_concurrency=arguments.max_concurrency,
                model=served.model,
            )
            results.write(path, result)
            print(f"written to {path}", file=sys.stderr)
    if arguments.output_json is not None:
        whole = runs[0] if len(runs) == 1 else results.header("serve", options.seed) | {"runs": runs}
        results.write(arguments.output_json, whole)
    if arguments.plot is not None:
        name = Path(served.model).name
        results.draw({arguments.label or name: runs}, arguments.plot, plot_title(name, arguments.backend, runs))


def plot_title(name: str, backend: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the title of a plot, with the number of requests that were sent."""
    most = max(run["completed"] + run["failed"] for run in runs)
    return f"{name} over {backend}: {most} requests{' per rate' if len(runs) > 1 else ''}"


def _json_object(word: str) -> dict[str, Any]:
    try:
        value = json.loads(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{word!r} is not a JSON object")
    return value
