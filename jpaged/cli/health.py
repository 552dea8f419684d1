"""The subcommand `health`: a server's state as an exit code."""

from __future__ import annotations

import argparse
import math

from jpaged.cli.options import add_credential_flags, credentials_from
from jpaged.client.channel import check_health, require_target
from jpaged.config import ServerOptions
from jpaged.errors import InvalidArgument, JpagedError
from jpaged.types import require_whole_characters

DESCRIPTION = """\
Check whether a server is serving, for example as a container's health check.

    jpaged health localhost:50051 && echo ready

Exit code 0: SERVING; 1: loading, draining, or unreachable.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the address, the service and the timeout."""
    default = ServerOptions()
    address = f"{default.host}:{default.port}"
    parser.add_argument(
        "address", nargs="?", default=address, metavar="HOST:PORT", help=f"address of the server (default: {address})"
    )
    parser.add_argument("--service", default="", metavar="NAME", help="name of a service (default: the whole server)")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="timeout in seconds (default: 3)")
    add_credential_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the status; return 0 only for SERVING."""
    if not (arguments.timeout > 0 and math.isfinite(arguments.timeout)):
        raise InvalidArgument("--timeout", f"{arguments.timeout} is not a finite number above 0")
    require_target("HOST:PORT", arguments.address)
    require_whole_characters("--service", arguments.service)
    shown = credentials_from(arguments)
    try:
        status = check_health(
            arguments.address,
            service=arguments.service,
            timeout_s=arguments.timeout,
            tls=shown.tls,
            proxy=shown.proxy,
        )
    except JpagedError as error:
        print(f"{arguments.address}: {error}")
        return 1
    print(f"{arguments.address}: {status}")
    return 0 if status == "SERVING" else 1
