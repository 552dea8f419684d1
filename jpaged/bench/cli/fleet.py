"""The subcommand `bench fleet`: a day of requests on many replicas in simulated time."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jpaged import json_text
from jpaged.bench import results
from jpaged.bench.cli.flags import (
    add_output_json,
    add_simulated_engine_flags,
    format_value,
    require_range,
    require_writable,
)
from jpaged.config import EvictionPolicyName
from jpaged.errors import InvalidArgument
from jpaged.plan.cli import prices_from
from jpaged.plan.fleet.autoscaler import Autoscaling, read_autoscaling
from jpaged.plan.fleet.day import Day, Session, TurnLengths, draw_sessions
from jpaged.plan.fleet.fleet import FleetOptions, Forecast, SimulatedFleet, forecast
from jpaged.plan.fleet.outcomes import LatencyGoals, Outcome, curve, draw, summary
from jpaged.plan.fleet.replica import ReplicaPool
from jpaged.plan.fleet.routing import RULES
from jpaged.plan.fleet.topology import PoolKind, Serving, get_kind
from jpaged.plan.simulator.deployment import MODELS
from jpaged.types import MAX_SEED

DESCRIPTION = """\
Simulate a day of requests on many replicas: the real scheduler and KV cache in each replica, routers, failures, drains,
the autoscaler of deploy/, and the costs.

    jpaged bench fleet                                              1000 replicas, a day compressed to 20 s
    jpaged bench fleet --router random least-load prefix prefix+load --failures 20 --plot routers.png
    jpaged bench fleet --topology v6e:1x1=600 --topology h100=400 --price v6e=2.7,h100=3
    jpaged bench fleet --replicas 8 --day 3600 --rate 12 --autoscale deploy

The load is a daily curve with bursts, tenants with system prompts, and conversations whose turns include their history.
Step times come from the model of `jpaged plan`; everything else is the engine's own code. docs/fleet.md describes what
is simulated and how closely it matches real processes.
"""

_MAX_REPLICAS = 100_000
_MANY_TURNS = 2000
"""Number of requests from which the estimated duration is printed first."""
_LENGTHS = (
    ("system", "mean tokens of a tenant's system prompt"),
    ("said", "mean tokens of a user turn"),
    ("answered", "mean tokens of an answer"),
)
_DEFAULTS = {"system": TurnLengths(3000.0, 0.5), "said": TurnLengths(150.0, 1.0), "answered": TurnLengths(80.0, 0.8)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the fleet, its day, events and outputs."""
    _add_fleet_flags(parser)
    _add_replica_flags(parser)
    _add_day_flags(parser)
    group = parser.add_argument_group("events")
    group.add_argument("--failures", type=int, default=0, metavar="N", help="replicas that crash (default: 0)")
    group.add_argument(
        "--drains", type=int, default=0, metavar="N", help="replicas that are drained and restarted (default: 0)"
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for requests in flight to finish on a drain (default: 60)",
    )
    group.add_argument(
        "--cold-start",
        type=float,
        metavar="S",
        help="seconds from a replica's start until it serves (default: 3 s, measured with the small model, plus "
        "loading the weights at 2 GB/s)",
    )
    group.add_argument(
        "--autoscale",
        type=Path,
        metavar="DIR",
        help="autoscale by the rules of a folder like deploy/; --replicas is the maximum",
    )
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goal-ttft", type=float, default=1000.0, metavar="MS", help="goal for the time to first token (default: 1000)"
    )
    group.add_argument(
        "--goal-itl",
        type=float,
        default=50.0,
        metavar="MS",
        help="goal for the mean inter-token latency of an answer (default: 50)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    group.add_argument("--plot", type=Path, metavar="FILE", help="plot the day (.png)")
    add_output_json(group)


def _add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet")
    group.add_argument(
        "--model", choices=MODELS, default="llama-3.1-8b", help="model that each replica serves (default: llama-3.1-8b)"
    )
    group.add_argument(
        "--topology",
        action="append",
        metavar="T[=N]",
        help="devices of each replica, as in `jpaged plan`: v6e:1x1, h100, h100:2; repeatable, with the number of "
        "replicas of each (default: v6e:1x1)",
    )
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="number of replicas, for a single topology (default: 1000, or maxReplicas)",
    )
    group.add_argument("--price", metavar="USD", help="price of a chip-hour: 2.7, or v6e=2.7,h100=3")
    group.add_argument(
        "--router",
        nargs="+",
        choices=RULES,
        default=["prefix+load"],
        help="routing policies to compare (default: prefix+load)",
    )
    group.add_argument(
        "--window",
        type=float,
        default=0.25,
        metavar="S",
        help="maximum age of a router's view of the replicas in seconds (default: 0.25)",
    )
    group.add_argument("--processes", type=int, metavar="N", help="simulation processes (default: one per CPU)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random numbers (default: 0)")


def _add_replica_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replica")
    group.add_argument(
        "--max-model-len", type=int, default=8192, metavar="TOKENS", help="maximum length of a sequence (default: 8192)"
    )
    add_simulated_engine_flags(group, max_num_seqs=128, max_num_batched_tokens=2048, block_size=64)
    group.add_argument(
        "--eviction-policy",
        choices=get_args(EvictionPolicyName),
        default="auto",
        help="eviction order of cached blocks (default: auto)",
    )


def _add_day_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("day")
    group.add_argument(
        "--day", type=float, default=20.0, metavar="S", help="simulated length of the day in seconds (default: 20)"
    )
    group.add_argument("--rate", type=float, metavar="R", help="mean requests per second (default: 3 per replica)")
    group.add_argument("--tenants", type=int, default=200, metavar="N", help="number of tenants (default: 200)")
    group.add_argument(
        "--tenant-skew",
        type=float,
        default=1.0,
        metavar="X",
        help="exponent of the tenants' Zipf distribution (default: 1)",
    )
    group.add_argument(
        "--swing", type=float, default=0.6, metavar="X", help="amplitude of the daily curve (default: 0.6 of the mean)"
    )
    group.add_argument(
        "--burst-shape",
        type=float,
        default=4.0,
        metavar="X",
        help="shape of the bursts; smaller is burstier (default: 4)",
    )
    group.add_argument("--turns", type=float, default=3.0, metavar="N", help="mean turns per conversation (default: 3)")
    group.add_argument(
        "--thinking", type=float, default=4.0, metavar="S", help="mean pause between turns in seconds (default: 4)"
    )
    for name, text in _LENGTHS:
        mean = _DEFAULTS[name].mean
        group.add_argument(f"--{name}-len", type=float, default=mean, metavar="N", help=f"{text} (default: {mean:g})")


def run(arguments: argparse.Namespace) -> int:
    """Simulate a day for each router and print the results."""
    _check(arguments)
    scaling = None if arguments.autoscale is None else read_autoscaling(arguments.autoscale)
    pools, kinds, places = _fleet(arguments, scaling)
    day = _day(arguments, len(places))
    goals = LatencyGoals(arguments.goal_ttft / 1e3, arguments.goal_itl / 1e3)
    sessions = draw_sessions(day, arguments.seed)
    if not sessions:
        problem = f"{day.rate_per_s:g} requests/s is too low: no conversation starts in a day of {day.seconds:g} s"
        raise InvalidArgument("--rate", problem)
    setting = _setting(arguments, kinds, places, day, sessions, scaling)
    if not arguments.json:
        print(_words(setting))
        if len(sessions) * day.mean_turns > _MANY_TURNS:
            options = _options(arguments, arguments.router[0], scaling)
            print(_forecast_words(forecast(pools, kinds, places, day, sessions, options), options), flush=True)
    runs = []
    for rule in arguments.router:
        options = _options(arguments, rule, scaling)
        with _progress(rule, day) as told:
            outcome = SimulatedFleet(pools, kinds, places, day, sessions, options).run(told)
        runs.append(summary(outcome, goals) | {"simulation": _effort(outcome), "curve": curve(outcome, goals)})
    result = results.header("fleet", arguments.seed) | {"setting": setting, "runs": runs}
    if arguments.json:
        print(json_text.dumps(result))
    else:
        Console().print(_table(runs))
        print(_day_words(runs[-1], day, len(places)))
    if arguments.output_json is not None:
        results.write(arguments.output_json, result)
    if arguments.plot is not None:
        draw(runs, arguments.plot, setting["what"])
    return 0


@contextlib.contextmanager
def _progress(rule: str, day: Day) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr; it stops at the day's end while the last turns finish."""
    columns = (TextColumn(rule), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} s simulated"))
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=2
    ) as bar:
        task = bar.add_task("", total=day.seconds)
        yield lambda now_s: bar.update(task, completed=min(now_s, day.seconds))


def _check(arguments: argparse.Namespace) -> None:
    """Reject invalid arguments before the simulation."""
    for flag, value, low, high in (
        ("--day", arguments.day, 1.0, 86_400.0),
        ("--window", arguments.window, 0.01, 60.0),
        ("--tenants", arguments.tenants, 1, 100_000),
        ("--tenant-skew", arguments.tenant_skew, 0.0, 10.0),
        ("--swing", arguments.swing, 0.0, 1.0),
        ("--burst-shape", arguments.burst_shape, 0.01, 1e6),
        ("--turns", arguments.turns, 1.0, 1000.0),
        ("--thinking", arguments.thinking, 0.0, 86_400.0),
        ("--failures", arguments.failures, 0, 1_000_000),
        ("--drains", arguments.drains, 0, 1_000_000),
        ("--drain-timeout", arguments.drain_timeout, 0.0, 86_400.0),
        ("--goal-ttft", arguments.goal_ttft, 0.0, 1e9),
        ("--goal-itl", arguments.goal_itl, 0.0, 1e9),
        ("--max-model-len", arguments.max_model_len, 2, 2**31 - 1),
        ("--max-num-seqs", arguments.max_num_seqs, 1, 65_536),
        ("--max-num-batched-tokens", arguments.max_num_batched_tokens, 1, 1_048_576),
        ("--block-size", arguments.block_size, 1, 65_536),
        ("--num-host-blocks", arguments.num_host_blocks, 0, 100_000_000),
        ("--seed", arguments.seed, 0, MAX_SEED),
        *((f"--{name}-len", getattr(arguments, f"{name}_len"), 1.0, 1e7) for name, _ in _LENGTHS),
    ):
        require_range(flag, value, low, high)
    if arguments.cold_start is not None:
        require_range("--cold-start", arguments.cold_start, 0.0, 86_400.0)
    if arguments.rate is not None:
        require_range("--rate", arguments.rate, 1e-6, 1e9)
    if arguments.processes is not None:
        require_range("--processes", arguments.processes, 1, 1024)
    if twice := [rule for rule in arguments.router if arguments.router.count(rule) > 1]:
        raise InvalidArgument("--router", f"{twice[0]} is given more than once")
    require_writable("--output-json", arguments.output_json)
    if arguments.plot is not None:
        results.require_drawable(arguments.plot)


def _fleet(
    arguments: argparse.Namespace, scaling: Autoscaling | None
) -> tuple[list[ReplicaPool], list[PoolKind], list[int]]:
    """Return the kinds of replicas, and the kind of each replica."""
    counts = _topologies(arguments, 1000 if scaling is None else scaling.max_replicas)
    if scaling is not None:
        if arguments.window > scaling.scrape_s:
            raise InvalidArgument(
                "--window",
                f"{arguments.window:g} s is over the scrape_interval of --autoscale, {scaling.scrape_s:g} s",
            )
        if len(counts) > 1:
            raise InvalidArgument(
                "--autoscale", f"allows one --topology, not {len(counts)}: a Deployment has one kind of pod"
            )
        (count,) = counts.values()
        if not scaling.min_replicas <= count <= scaling.max_replicas:
            limits = f"from minReplicas to maxReplicas of --autoscale, {scaling.min_replicas} to {scaling.max_replicas}"
            raise InvalidArgument("--replicas", f"{count} is out of range: must be {limits}")
    prices = prices_from(arguments.price)
    serving = Serving(
        arguments.model,
        arguments.max_model_len,
        arguments.block_size,
        arguments.max_num_seqs,
        arguments.max_num_batched_tokens,
        num_host_blocks=arguments.num_host_blocks,
        options={
            "enable_prefix_caching": arguments.enable_prefix_caching,
            "eviction_policy": arguments.eviction_policy,
        },
    )
    pools, kinds, places = [], [], []
    for number, (name, count) in enumerate(counts.items()):
        pool, kind = get_kind(name, serving, prices, arguments.cold_start)
        pools.append(pool)
        kinds.append(kind)
        places += [number] * count
    _check_prices(prices, kinds)
    return pools, kinds, places


def _check_prices(prices: Mapping[str, float], kinds: Sequence[PoolKind]) -> None:
    """Reject prices of unknown kinds, and prices for only some topologies."""
    names = {name for kind in kinds for name in (kind.name, kind.family, "")}
    if unused := sorted(prices.keys() - names):
        shown = ", ".join(kind.name for kind in kinds)
        raise InvalidArgument("--price", f"{unused[0]} matches none of the topologies ({shown})")
    without = [kind.name for kind in kinds if kind.usd_per_hour is None]
    if prices and without:
        raise InvalidArgument("--price", f"{without[0]} has no price, but other topologies have one")


def _topologies(arguments: argparse.Namespace, default: int) -> dict[str, int]:
    """Return the number of replicas of each topology; the default applies to a single one."""
    words = arguments.topology or ["v6e:1x1"]
    counts: dict[str, int] = {}
    for word in words:
        name, equals, number = word.partition("=")
        if name in counts:
            raise InvalidArgument("--topology", f"{name} is given more than once")
        if not equals:
            if len(words) > 1:
                raise InvalidArgument(
                    "--topology", f"{name} is one of several: add its number of replicas, as in {name}=10"
                )
            counts[name] = default if arguments.replicas is None else arguments.replicas
            continue
        if arguments.replicas is not None:
            raise InvalidArgument("--replicas", f"conflicts with --topology {word}: give only one of them")
        if not number.isdecimal() or not number.isascii() or len(number) > 9:
            raise InvalidArgument("--topology", f"{number!r} is not a number of replicas for {name}")
        counts[name] = int(number)
    for name, count in counts.items():
        flag = "--replicas" if arguments.replicas is not None else "--topology"
        if not 1 <= count <= _MAX_REPLICAS:
            raise InvalidArgument(flag, f"{count} of {name} is out of range: must be from 1 to {_MAX_REPLICAS}")
    return counts


def _day(arguments: argparse.Namespace, num_replicas: int) -> Day:
    system, said, answered = (
        TurnLengths(getattr(arguments, f"{name}_len"), _DEFAULTS[name].sigma) for name, _ in _LENGTHS
    )
    return Day(
        seconds=arguments.day,
        rate_per_s=3.0 * num_replicas if arguments.rate is None else arguments.rate,
        max_model_len=arguments.max_model_len,
        swing=arguments.swing,
        num_tenants=arguments.tenants,
        skew=arguments.tenant_skew,
        burst_shape=arguments.burst_shape,
        mean_turns=arguments.turns,
        mean_thinking_s=arguments.thinking,
        min_thinking_s=2 * arguments.window,
        system=system,
        said=said,
        answered=answered,
    )


def _options(arguments: argparse.Namespace, rule: Any, scaling: Autoscaling | None) -> FleetOptions:
    return FleetOptions(
        rule=rule,
        seed=arguments.seed,
        window_s=arguments.window,
        num_processes=arguments.processes or os.cpu_count() or 1,
        num_failures=arguments.failures,
        num_drains=arguments.drains,
        drain_s=arguments.drain_timeout,
        autoscaling=scaling,
    )


def _setting(
    arguments: argparse.Namespace,
    kinds: Sequence[PoolKind],
    places: Sequence[int],
    day: Day,
    sessions: Sequence[Session],
    scaling: Autoscaling | None,
) -> dict[str, Any]:
    """Return the simulated setting, for output and the result file."""
    fleet = " + ".join(f"{places.count(number)} x {kind.name}" for number, kind in enumerate(kinds))
    lapse = 86_400 / day.seconds
    return {
        "what": f"{arguments.model} on {fleet}, {day.rate_per_s:g} requests/s over a day of {day.seconds:g} s",
        "model": arguments.model,
        "replicas": {kind.name: places.count(number) for number, kind in enumerate(kinds)},
        "kv_tokens": {kind.name: kind.capacity for kind in kinds},
        "usd_per_replica_hour": {kind.name: kind.usd_per_hour for kind in kinds},
        "cold_start_s": {kind.name: kind.cold_start_s for kind in kinds},
        "eviction_policy": arguments.eviction_policy,
        "num_host_blocks": arguments.num_host_blocks,
        "num_conversations": len(sessions),
        "num_tenants": day.num_tenants,
        "day_s": day.seconds,
        "time_lapse": lapse,
        "rate_per_s": day.rate_per_s,
        "window_s": arguments.window,
        "goal_ttft_ms": arguments.goal_ttft,
        "goal_itl_ms": arguments.goal_itl,
        "failures": arguments.failures,
        "drains": arguments.drains,
        "autoscaling": None if scaling is None else f"{scaling.min_replicas} to {scaling.max_replicas}",
    }


def _words(setting: Mapping[str, Any]) -> str:
    lapse = setting["time_lapse"]
    return (
        f"{setting['what']}: {setting['num_conversations']} conversations of {setting['num_tenants']} tenants. "
        + (f"The daily curve and its bursts run {lapse:.0f} times faster than in a 24-hour day; " if lapse > 1 else "")
        + f"steps, answers and starts are not scaled. Routers see data that is up to {setting['window_s']:g} s old."
    )


def _forecast_words(expected: Forecast, options: FleetOptions) -> str:
    """Return a text with the expected duration and memory of the simulation."""
    minutes, gigabytes = expected.wall_s / 60, expected.memory_bytes / 1e9
    return (
        f"About {expected.num_turns:,} requests for each router: about {minutes:.1f} minutes with "
        f"{options.num_processes} processes on separate cores, and at most about {gigabytes:.1f} GB of memory."
    )


def _effort(outcome: Outcome) -> dict[str, float]:
    """Return the time that the simulation took."""
    return {"wall_s": outcome.wall_s, "cpu_s": outcome.cpu_s}


def _day_words(run: Mapping[str, Any], day: Day, num_replicas: int) -> str:
    """Return a text with the expected duration of a simulated day of 24 hours."""
    hours = run["simulation"]["wall_s"] / run["elapsed_s"] * 86_400 / 3600
    return (
        f"{run['elapsed_s']:.0f} s of {num_replicas} replicas took {run['simulation']['wall_s']:.0f} s; "
        f"a day of 24 hours at {day.rate_per_s:g} requests/s would take {hours:.0f} hours here."
    )


_ROWS = (
    *("num_turns", "requests_per_s", "goodput_requests_per_s", "good_percent"),
    *("ttft_mean_ms", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"),
    *("itl_mean_ms", "itl_p50_ms", "itl_p90_ms", "itl_p99_ms"),
    *("prefix_hit_percent", "host_hit_percent", "busy_percent", "busiest_over_mean", "preemptions"),
    *("replica_hours", "usd", "usd_per_million_tokens", "usd_per_million_good_tokens"),
)


def _table(runs: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    table.add_column("")
    for one in runs:
        table.add_column(one["router"], justify="right")
    for key in _ROWS:
        if any(one.get(key) is not None for one in runs):
            table.add_row(key.replace("_", " "), *(format_value(one.get(key)) for one in runs))
    for key in runs[0]["interruptions"]:
        if any(one["interruptions"][key] for one in runs) and any(
            one["interruptions"]["num_failures"] + one["interruptions"]["num_drains"] for one in runs
        ):
            table.add_row(key.replace("_", " "), *(format_value(one["interruptions"][key]) for one in runs))
    return table
