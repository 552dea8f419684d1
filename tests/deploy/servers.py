"""What holds for all that starts a server, whatever describes it: an image, a compose file, a pod.

Command lines are held to the options that `jpaged` has, and what stands around them to the options that they name.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jpaged.cli.main import make_parser
from jpaged.cli.options import config_from
from jpaged.config import EngineConfig
from jpaged.errors import InvalidArgument
from jpaged.route.cli import options_from

FLUSH_S = 2.0
"""What a server takes after a drain, at most, to flush what clients read."""


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
    """The options of a `jpaged serve`, or of the port of a `jpaged route`, checked; None for another subcommand."""
    arguments = parse(words)
    if arguments.command == "route":
        options_from(arguments, config_from(arguments))
    return config_from(arguments) if arguments.command in ("serve", "route") else None


def route_targets(words: Sequence[str]) -> list[str]:
    """Whom a `jpaged route` passes calls on to; none for another subcommand."""
    arguments = parse(words)
    return list(arguments.target) if arguments.command == "route" else []


def health_port(words: Sequence[str]) -> int | None:
    """Which port a health check's command asks; None where it is none."""
    arguments = parse(words)
    return int(arguments.address.rpartition(":")[2]) if arguments.command == "health" else None


def num_devices(config: EngineConfig) -> int:
    """Devices that the options ask for."""
    return config.parallel.tensor_parallel_size * config.parallel.data_parallel_size


@dataclass(frozen=True, slots=True)
class Server:
    """A server as something describes it; None where that says nothing about it.

    Attributes:
        ports: what is said to be open, beside the names that manifests give.
        probed: the port that each check of its health asks.
        grace_s: from the signal to end until it is killed; a pod sleeps for `sleep_s` of it first.
        num_devices: that it can see.
    """

    config: EngineConfig
    ports: frozenset[int] | None = None
    probed: Mapping[str, int | None] = field(default_factory=dict)
    grace_s: float | None = None
    sleep_s: float = 0.0
    memory_gib: float | None = None
    num_devices: int | None = None

    def problems(self) -> Iterator[str]:
        """What of the description does not fit the options."""
        server, swap_gib = self.config.server, self.config.cache.swap_space
        if self.ports is not None and self.ports != {server.port, server.metrics_port}:
            yield f"ports are {sorted(self.ports)}; the server opens {server.port} and {server.metrics_port}"
        for name, port in self.probed.items():
            answering = server.port if server.probe_port is None else server.probe_port
            if port != answering:
                yield f"{name} asks port {port}; the server answers health on {answering}"
        if self.probed and server.probe_port is None:
            yield "probes share a port with strangers, whose connections make them fail: --probe-port is needed"
        if self.probed and server.host != "0.0.0.0":
            yield f"listens on {server.host}, where nothing outside reaches it"
        needed_s = self.sleep_s + server.shutdown_timeout + FLUSH_S
        if self.grace_s is not None and self.grace_s <= needed_s:
            yield f"is killed after {self.grace_s:g} s, not above the {needed_s:g} s that a drain may take"
        if self.num_devices and num_devices(self.config) != self.num_devices:
            yield f"has {self.num_devices} devices for options that ask for {num_devices(self.config)}"
        if self.memory_gib is not None and swap_gib >= self.memory_gib:
            yield f"--swap-space {swap_gib:g} GiB does not fit into {self.memory_gib:g} GiB"
