"""The subcommand `serve`: options -> a server, until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shlex
import sys
import threading
from typing import TYPE_CHECKING, Any

from jpaged import json_text
from jpaged.cli.options import add_config_flags, config_from, to_flag
from jpaged.cli.startup import PROBES, Progress, StartupReport
from jpaged.config import EngineConfig
from jpaged.distributed_env import MultiHost
from jpaged.errors import EngineHung, InvalidArgument
from jpaged.telemetry.logs import set_up_logs

# importing the server takes two thirds of the command line's import time, and other commands do not need it
if TYPE_CHECKING:
    from jpaged.service.loaded_model import LoadedModel

DESCRIPTION = """\
Serve a model over gRPC until SIGTERM or Ctrl-C; a second signal cuts the drain short.

The port opens immediately: until the model is loaded, calls fail with UNAVAILABLE and the health service reports
NOT_SERVING.

With several processes (--coordinator, --num-processes, --process-id, or a launcher's environment variables), process 0
opens the port and the others follow it.

Flags of `vllm serve` are accepted, replaced or rejected by name: docs/from_vllm.md.
"""
GIVE_UP_S = 15.0
"""Maximum time of shutdown if a step hangs."""
LISTENING = "listening on "
"""Prefix of the line with the address, for programs that start a server on port 0."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and every option."""
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve; return 0 after a drain, 1 if the model could not be loaded or the engine failed, 3 if a step hung.

    With several processes, 4 means that another one failed: docs/health.md has the table.
    """
    gc.disable()  # until the server is ready: nearly all objects of a start stay
    try:
        return _run(arguments)
    finally:
        gc.enable()


def _run(arguments: argparse.Namespace) -> int:
    from jpaged.cli.multihost import follow  # and the server, before asyncio takes Ctrl-C

    config = config_from(arguments)
    set_up_logs(config.telemetry.log_format, has_requests=config.telemetry.enable_log_requests)
    multihost = config.multihost()
    if multihost is None:
        return asyncio.run(_serve(config, None))
    try:
        config = config.for_multihost(multihost)
        config.cluster_secret()  # report an invalid secret before anything is loaded
    except InvalidArgument as error:
        # the field is an environment variable or an option
        name = error.field if error.field.isupper() else to_flag(error.field)
        raise InvalidArgument(name, error.problem) from error
    if multihost.is_leader:
        return asyncio.run(_serve(config, multihost))
    gc.enable()
    return follow(config, multihost)


def _example_call(url: str, loaded: LoadedModel) -> str:
    """Return a shell command that calls the OpenAI API."""
    access = loaded.config.access
    path, key, prompt = "completions", "prompt", "Once upon a time"
    text: Any = prompt
    if loaded.model.has_chat_template:
        path, key, text = "chat/completions", "messages", [{"role": "user", "content": "Hello"}]
    words = ["curl", f"{url}/{path}"]
    if access.tls_cert is not None:
        words += ["--cacert", access.tls_cert]
    if access.has_keys:
        words += ["-H", "Authorization: Bearer KEY"]
    body = {"model": loaded.model.name, key: text, "max_tokens": 16}
    return shlex.join([*words, "-H", "Content-Type: application/json", "-d", json_text.dumps(body)])


async def _serve(config: EngineConfig, multihost: MultiHost | None) -> int:
    from jpaged.cli.multihost import Leading
    from jpaged.peers import Prefills
    from jpaged.server.lifecycle import Server, show_stacks

    report = StartupReport(sys.stderr)
    host = config.server.host

    def load(progress: Progress) -> LoadedModel:
        from jpaged import build as build_module  # imports jax: seconds, in which the port is already open

        return build_module.build(config, progress) if leading is None else leading.build(progress)

    def on_serving(port: int, loaded: LoadedModel) -> None:
        for name, value, source in loaded.config.explain():
            if source != "default":
                report.line(f"  {name} = {value}")
        if defaults := loaded.model.default_sampling:
            texts = ", ".join(f"{name} {value}" for name, value in defaults.items())
            report.line(f"  requests without these parameters get the model's: {texts} (--generation-config)")
        backend = loaded.backend
        num_replicas = loaded.config.parallel.data_parallel_size
        copies = f" in {num_replicas} replicas" if num_replicas > 1 else ""
        report.line(f"  {backend.num_devices} x {backend.device_kind}{copies}, attention {backend.attention}")
        report.line(f"gRPC on {host}:{port}")
        if server.control_port is not None:
            report.line(f"control on {config.access.control_host}:{server.control_port}")
        if server.http_port is not None:
            url = f"{'http' if config.access.tls_cert is None else 'https'}://{host}:{server.http_port}/v1"
            report.line(f"OpenAI's API on {url}")
            report.line(f"try: {_example_call(url, loaded)}")
        if server.metrics_port is not None:
            report.line(f"metrics on http://{host}:{server.metrics_port}/metrics")
        report.line(f"ready on {host}:{port}")
        gc.freeze()  # loaded objects stay: a full collection would delay a step by 0.2 s
        gc.enable()

    def give_up() -> None:
        """Print the stacks of hanging threads, and force the exit if they prevent it."""
        show_stacks()
        end = threading.Timer(GIVE_UP_S, os._exit, (EngineHung.exit_code,))
        end.daemon = True
        end.start()

    try:
        prefills = Prefills(config.roles) if config.roles.role == "decode" else None
        server = Server(
            config, load, on_progress=report.progress, on_serving=on_serving, on_hang=give_up, prefills=prefills
        )
        leading = None if multihost is None else Leading(config, multihost, server)
        server.stop_on_signals()  # first: gRPC would print a traceback for Ctrl-C while it opens a port
        port = await server.start()
    except InvalidArgument as error:
        raise InvalidArgument(to_flag(error.field), error.problem) from error
    if server.probe_port is not None:
        report.line(f"{PROBES}{host}:{server.probe_port}")
    report.line(f"{LISTENING}{host}:{port}, loading {config.model.model}")
    if leading is not None:
        return await leading.run(report)
    code = await server.run()
    report.line("stopped")
    if server.leaves_threads:
        # They are inside a compiler or a hanging step and cannot be interrupted; a normal exit would wait for them.
        os._exit(code)
    return code
