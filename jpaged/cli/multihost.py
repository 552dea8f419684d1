"""`jpaged serve` as one of several processes: process 0 leads, the others follow."""

from __future__ import annotations

import asyncio
import logging
import queue
import signal
import sys
import threading
from typing import TYPE_CHECKING

from jpaged.cli.options import to_flag
from jpaged.cli.startup import PROBES, Progress, StartupReport
from jpaged.config import EngineConfig, shows_traces
from jpaged.distributed_env import MultiHost
from jpaged.errors import InvalidArgument, JpagedError, describe_error
from jpaged.server.health import Health, ProbeServer
from jpaged.server.lifecycle import Server
from jpaged.service.loaded_model import LoadedModel

if TYPE_CHECKING:  # importing jax takes seconds, and the port should be open before
    from jpaged.device.multihost.handshake import Follower, Leader

_LOG = logging.getLogger(__name__)


class Leading:
    """Process 0's role around a server; created on the server's event loop. It is the owner of the leader."""

    def __init__(self, config: EngineConfig, multihost: MultiHost, server: Server) -> None:
        self._config = config
        self._multihost = multihost
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._leader: Leader | None = None

    def build(self, progress: Progress) -> LoadedModel:
        """Load the model together with the other processes; on the loading thread."""
        from jpaged import build as build_module
        from jpaged.device.multihost.handshake import lead

        self._leader = lead(self._config, self._multihost, lambda line: progress(line, 1, 1), self)
        try:
            return build_module.build(self._config, progress, self._leader)
        except JpagedError as error:
            self._leader.broadcast(error)
            raise

    def fail(self, error: JpagedError) -> None:
        """End the server, because all processes have to end."""
        self._loop.call_soon_threadsafe(self._server.fail, error)

    def drain(self) -> None:
        """Drain the server, because another process was asked to end."""
        self._loop.call_soon_threadsafe(self._server.drain)

    async def run(self, report: StartupReport) -> int:
        """Run the server to its end, then end the other processes (cleanly only if it ended cleanly) and this one."""
        from jpaged.device.multihost.handshake import leave

        try:
            code = await self._server.run()
        except JpagedError as error:
            report.line(f"process 0 failed: {error}")
            code = 1
        failure = self._server.state.failure
        if self._leader is not None and failure is not None:
            self._leader.broadcast(failure)  # also failures that it has not seen, such as a hanging step
        if self._leader is not None and code == 0 and not await asyncio.to_thread(self._leader.end):
            report.line("some processes did not exit in time")
            code = 1
        report.line("stopped")
        leave(code)
        return code


def follow(config: EngineConfig, multihost: MultiHost) -> int:
    """Follow process 0 to its end. A termination signal is forwarded to it as a drain request, which ends all."""
    report = StartupReport(sys.stderr)
    ends: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    following: list[Follower] = []
    probes = _open_probes(config, following)

    def pass_on(number: int, frame: object) -> None:
        del number, frame
        if following:
            # A separate thread: the interrupted one may be sending.
            threading.Thread(target=following[0].wish_to_stop, daemon=True).start()
        else:
            ends.put((0, "stopped before process 0 was available"))

    def work() -> None:
        from jpaged import build as build_module
        from jpaged.device.multihost import handshake

        try:
            follower = handshake.follow(config, multihost, report.line, lambda code, why: ends.put((code, why)))
            following.append(follower)
            build_module.follow(config, report.progress, follower)
            ends.put((0, "stopped"))
        except Exception as error:  # top level of a follower: process 0 must be notified of any failure
            if not isinstance(error, JpagedError) and shows_traces():
                _LOG.exception("process %d failed", multihost.process_id)
            code = JpagedError.exit_code
            if following:
                following[0].report(error)
                code = following[0].exit_code
            ends.put(
                (code, f"process {multihost.process_id} of {multihost.num_processes} failed: {describe_error(error)}")
            )

    if probes is not None:
        report.line(f"{PROBES}{config.server.host}:{probes.port}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    threading.Thread(target=work, name="jpaged-follow", daemon=True).start()
    code, why = ends.get()
    from jpaged.device.multihost.handshake import leave

    report.line(why)
    leave(code)
    return code


def _open_probes(config: EngineConfig, following: list[Follower]) -> ProbeServer | None:
    """Serve the health of a follower from the start: live, and ready once it follows."""

    def health() -> Health:
        is_ready = bool(following) and following[0].is_ready(config.timeouts.stall_timeout)
        return Health(is_live=True, is_ready=is_ready)

    if config.server.probe_port is None:
        return None
    try:
        return ProbeServer(health, config.server.host, config.server.probe_port)
    except InvalidArgument as error:
        raise InvalidArgument(to_flag(error.field), error.problem) from error
