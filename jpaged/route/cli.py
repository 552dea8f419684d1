"""The subcommand `route`: one port that forwards to many servers, until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import math
import sys
from typing import TYPE_CHECKING

from jpaged.cli.options import add_config_flags, add_credential_flags, config_from, credentials_from, to_flag
from jpaged.config import EngineConfig, iter_options
from jpaged.errors import InvalidArgument

if TYPE_CHECKING:
    from jpaged.route.router import RouteOptions

DESCRIPTION = """\
Router: the same gRPC API in front of many servers of one model. A prompt goes to a server that has its prefix cached or
was sent it before, otherwise to the least loaded server. If a server goes away, its streams resume on another one.

    jpaged route --target 10.0.0.7:50051 --target 10.0.0.8:50051
    jpaged route --target dns:///jpaged-headless:50051 --metrics-port 9400

SIGTERM or Ctrl-C drains; a second one cuts the drain short. See docs/route.md.
"""
SECTIONS = ("server", "access", "telemetry")
NOT_HERE = (
    "served_model_name",
    "served_model_aliases",
    "max_messages_per_second",
    "stream_interval",
    "enable_open_inference",
    "enable_vllm_engine",
    "disable_control",
    "isolate_tenants",
    "max_pinned_blocks",
    "pin_prefix",
    "public_metrics",
    "public_page",
    "tenant_requests_per_minute",
    "tenant_tokens_per_minute",
    "tenant_max_streams",
    "tenant_max_n",
    "tenant_max_prompt_tokens",
    "control_port",
    "control_host",
    "otlp_traces_endpoint",
    "enable_log_requests",
)
"""Options of the sections that apply only to servers."""
MAX_RESUME_S, MAX_PREFIXES, MAX_CALLS = 86400.0, 1 << 26, 1 << 20
_CREDENTIALS = "target-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add flags for the servers, resuming of streams, and the port."""
    group = parser.add_argument_group("servers", "Servers and routing.")
    group.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="backend server; dns:///NAME:PORT stands for every address of a name, resolved every 5 s; repeatable. "
        "Prefix cache contents come from the KV event endpoint that the server announces (its "
        "--kv-events-endpoint), or from HOST:PORT,kv-events=tcp://*:PORT,kv-events-replay=tcp://*:PORT; "
        "kv-events=none turns them off",
    )
    group.add_argument(
        "--targets-file", metavar="FILE", help="file with further targets, one per line, reloaded when it changes"
    )
    group.add_argument(
        "--resume-within",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to look for another server for a stream whose server is gone; 0 ends the stream (default: 60)",
    )
    group.add_argument(
        "--max-known-prefixes",
        type=int,
        default=1 << 17,
        metavar="N",
        help=f"prefix hashes to keep, 200 bytes each; 0 routes by load only (default: {1 << 17})",
    )
    group.add_argument(
        "--max-calls",
        type=int,
        default=8192,
        metavar="N",
        help="maximum number of open calls; an open stream takes 50 KiB (default: 8192)",
    )
    add_credential_flags(parser, prefix=_CREDENTIALS, title="access to servers")
    add_config_flags(parser, SECTIONS, without=NOT_HERE)


def run(arguments: argparse.Namespace) -> int:
    """Run the router; return 0 after a drain."""
    config = config_from(arguments)
    options = options_from(arguments, config)
    return asyncio.run(_route(options, config))


def options_from(arguments: argparse.Namespace, config: EngineConfig) -> RouteOptions:
    """Return the router options of the flags.

    Raises:
        InvalidArgument: a value is out of range; names the flag.
    """
    from jpaged.route.router import RouteOptions
    from jpaged.route.targets import require_targets

    within_s, num_prefixes = arguments.resume_within, arguments.max_known_prefixes
    if not (math.isfinite(within_s) and 0 <= within_s <= MAX_RESUME_S):
        raise InvalidArgument("--resume-within", f"{within_s} is not from 0 to {MAX_RESUME_S:g}")
    if not 0 <= num_prefixes <= MAX_PREFIXES:
        raise InvalidArgument("--max-known-prefixes", f"{num_prefixes} is not from 0 to {MAX_PREFIXES}")
    if not 1 <= arguments.max_calls <= MAX_CALLS:
        raise InvalidArgument("--max-calls", f"{arguments.max_calls} is not from 1 to {MAX_CALLS}")
    if not arguments.target and arguments.targets_file is None:
        raise InvalidArgument("--target", "is missing: give --target or --targets-file")
    if arguments.target:
        require_targets("--target", arguments.target)
    shown = credentials_from(arguments, prefix=_CREDENTIALS)
    own = {"target": ", ".join(arguments.target), "targets_file": arguments.targets_file or "None"}
    own |= {"resume_within": f"{within_s:g} s", "max_known_prefixes": str(num_prefixes)}
    own |= {"max_calls": str(arguments.max_calls)}
    here = {name for name, section, _ in iter_options() if section in SECTIONS and name not in NOT_HERE}
    told = [(name, value, "set or resolved") for name, value in own.items()]
    told += [option for option in config.explain() if option[0] in here]
    told = [(name.replace("_", "-"), value, source) for name, value, source in told if value != "None"]
    return RouteOptions(
        targets=tuple(arguments.target),
        targets_file=arguments.targets_file,
        tls=shown.tls,
        api_key=shown.api_key,
        resume_within_s=within_s,
        max_known_prefixes=num_prefixes,
        max_calls=arguments.max_calls,
        shown_options=told,
    )


async def _route(options: RouteOptions, config: EngineConfig) -> int:
    from jpaged.cli.serve import LISTENING
    from jpaged.cli.startup import PROBES
    from jpaged.route.router import Router
    from jpaged.telemetry.logs import set_up_logs

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    set_up_logs(config.telemetry.log_format, has_requests=False)
    logging.getLogger("jpaged.route").setLevel(logging.INFO)  # log which servers take calls
    try:
        router = Router(options, config.server, config.access)
        port = await router.start()
    except InvalidArgument as error:
        raise InvalidArgument(to_flag(error.field), error.problem) from error
    router.stop_on_signals()
    host = config.server.host
    if router.metrics_port is not None:
        say(f"metrics on http://{host}:{router.metrics_port}/metrics")
    if router.probe_port is not None:
        say(f"{PROBES}{host}:{router.probe_port}")
    say(f"{LISTENING}{host}:{port}, routing to {', '.join(options.targets) or options.targets_file}")
    gc.freeze()  # loaded objects stay: a full collection would delay every stream
    code = await router.run()
    say("stopped")
    return code
