"""The server that `bench serve` measures: an existing one, or one started for it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from jpaged.bench.backends import ENDPOINTS, GrpcBackend, OpenAIBackend, first_model
from jpaged.bench.cli.offline import get_vocabulary
from jpaged.bench.cli.probe import get_limits, probed
from jpaged.bench.datasets import DatasetVocabulary, NumberedVocabulary, ServerVocabulary
from jpaged.bench.limits import HardwareLimits, ServedModel, of_accelerator
from jpaged.bench.load_generator import BenchmarkBackend
from jpaged.checkpoints.hub import find_folder, find_local
from jpaged.cli.options import Credentials, credentials_from
from jpaged.cli.server_process import ServerProcess, startup_texts, unwinding_at_sigterm
from jpaged.client import Client, ServerInfo
from jpaged.client.channel import proxy_for, require_target
from jpaged.errors import InvalidArgument, JpagedError, Unavailable
from jpaged.hardware import find_hardware

_START_FLAGS = ("--wait-for-all-programs",)
"""Programs that compile during the load would distort the measurement."""
_READY_TIMEOUT_S = 60.0
_END_PATIENCE_S = 30.0
"""Wait for a server whose calls failed: it may be ending, and prints the reason at its end."""
_PLAIN_IDS = 1000
"""Every vocabulary has this many tokens; ids below 3 are special in most."""
_COUNTED = ("num_steps", "num_preemptions", "num_recomputed_tokens", "num_prefix_query_tokens", "num_prefix_hit_tokens")
_LOCAL_HOSTS = ("localhost", "127.", "::1", "[::1]", "unix:", "0.0.0.0")


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """A server that is ready.

    Attributes:
        backend: creates a connection, one per run.
        facts: properties that it reports.
        shape: shape of the model; None if its files are not available.
        counts: returns its counters; empty if it does not report any.
        limits: hardware limits; None if its devices are unknown (`no_limits` has the reason).
    """

    model: str
    dtype: str | None
    backend: Callable[[], BenchmarkBackend]
    vocabulary: DatasetVocabulary
    facts: dict[str, Any]
    shape: ServedModel | None
    counts: Callable[[], dict[str, int]]
    limits: HardwareLimits | None
    no_limits: str


_BASE_URL = "http://127.0.0.1:8000"
_NO_TLS = {"tls": False, "tls_ca": None, "tls_cert": None, "tls_key": None}


@contextlib.contextmanager
def connect(arguments: argparse.Namespace, console: Console) -> Iterator[ReadyServer]:
    """Yield the server that the command line names, or one that ends with this context.

    Raises:
        InvalidArgument: flags conflict.
        JpagedError: there is no server, or it did not start.
    """
    if arguments.backend != "jpaged":
        _refuse(arguments, "--backend jpaged", target=None, server_flags=[], **_NO_TLS)
        yield _openai(arguments, console)
        return
    _refuse(arguments, "an OpenAI backend", base_url=None, endpoint=None, header=[], extra_body={})
    if arguments.target is not None:
        _refuse(arguments, "a server started by this benchmark", server_flags=[])
        require_target("--target", arguments.target)
        shown = credentials_from(arguments)
        with Client(
            arguments.target, model=arguments.model, api_key=shown.api_key, tls=shown.tls, proxy=shown.proxy
        ) as client:
            client.wait_until_ready(_READY_TIMEOUT_S)
            yield _ours(arguments, client, arguments.target, console, shown)
        return
    with unwinding_at_sigterm(), _started(arguments, console) as (client, target):
        yield _ours(arguments, client, target, console, Credentials())


def _refuse(arguments: argparse.Namespace, needed: str, **unused: Any) -> None:
    for name, default in unused.items():
        if getattr(arguments, name) != default:
            flag = "--" if name == "server_flags" else f"--{name.replace('_', '-')}"
            raise InvalidArgument(flag, f"works only with {needed}")


@contextlib.contextmanager
def _started(arguments: argparse.Namespace, console: Console) -> Iterator[tuple[Client, str]]:
    """Yield a client of a new server process that is ready, and its target."""
    model = arguments.model or "demo"
    server = ServerProcess.start(model, [*_START_FLAGS, *arguments.server_flags])
    is_ready, patience_s = False, 0.0
    try:
        target = server.target()
        with Client(target) as client:
            with console.status("starting the server") as status:
                for text in startup_texts(client, server):
                    status.update(text)
            is_ready = True
            console.print(f"serving {model} after {server.elapsed_s:.1f} s", highlight=False)
            try:
                yield client, target
            finally:
                patience_s = 0.0 if _serves(client) else _END_PATIENCE_S
    except JpagedError as error:
        if is_ready:
            raise
        server.stop(_END_PATIENCE_S)
        raise Unavailable("\n".join([f"{model}: {error}; its last output:", *server.last_lines])) from error
    finally:
        code = server.stop(patience_s)
        if is_ready and code != 0:
            console.print(
                "\n".join([f"the server exited with code {code}; its last output:", *server.last_lines]),
                highlight=False,
            )


def _serves(client: Client) -> bool:
    try:
        return client.server_info().state == "serving"
    except JpagedError:
        return False


def _ours(
    arguments: argparse.Namespace, client: Client, target: str, console: Console, shown: Credentials
) -> ReadyServer:
    info, model = client.server_info(), client.model_info()
    folder = arguments.tokenizer or info.options.get("model")
    options = (info.options.get("kv-cache-dtype"), info.options.get("quantization", "auto"))
    shape, reason = _shape(folder, arguments.dtype or model.dtype, *options)
    limits, no_limits = _limits_of_server(arguments, info, target, arguments.dtype or model.dtype, console)
    salt = uuid.uuid4().hex  # prevents hits on prefixes that an earlier run left in the cache
    return ReadyServer(
        model=model.name,
        dtype=model.dtype,
        backend=lambda: GrpcBackend(
            target,
            ignore_eos=arguments.ignore_eos,
            temperature=arguments.temperature,
            cache_salt=salt,
            api_key=shown.api_key,
            tls=shown.tls,
            proxy=shown.proxy,
        ),
        vocabulary=ServerVocabulary(client),
        facts={
            "version": info.server_version,
            "platform": info.platform,
            "device_kind": info.device_kind,
            "num_devices": info.num_devices,
            "attention": info.attention,
            "jax": info.jax_version,
            "options": info.options,
        },
        shape=shape,
        counts=lambda: _counts(client),
        limits=None if shape is None else limits,
        no_limits=no_limits or reason,
    )


def _counts(client: Client) -> dict[str, int]:
    """Return the server's counters; empty if it has died, which its requests report."""
    try:
        load = client.load()
    except JpagedError:
        return {}
    return {name: getattr(load, name) for name in _COUNTED}


def _limits_of_server(
    arguments: argparse.Namespace, info: ServerInfo, target: str, dtype: str, console: Console
) -> tuple[HardwareLimits | None, str]:
    if arguments.hardware != "auto":
        return get_limits(arguments.hardware, dtype, info.num_devices)
    if info.platform == "cpu":
        if not target.startswith(_LOCAL_HOSTS):
            return None, "the server runs on another machine: give its --hardware"
        with console.status("measuring the machine's bandwidth and FLOP/s"):
            return probed(dtype), ""
    device = find_hardware(info.device_kind or "")
    if device is None:
        return None, f"{info.device_kind} is not in the hardware table"
    return of_accelerator(device.name, info.num_devices), ""


def _openai(arguments: argparse.Namespace, console: Console) -> ReadyServer:
    base_url = (arguments.base_url or _BASE_URL).rstrip("/")
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument("--base-url", f"{arguments.base_url!r} is not http://HOST:PORT")
    headers, shown = _headers(arguments.header), credentials_from(arguments)
    proxy = None if shown.proxy is None else proxy_for(base_url, shown.proxy) or None
    if (key := shown.api_key) and "authorization" not in map(str.lower, headers):
        headers = {**headers, "Authorization": f"Bearer {key}"}
    model = arguments.model or asyncio.run(first_model(base_url, headers, proxy))
    vocabulary: DatasetVocabulary = NumberedVocabulary(_PLAIN_IDS)
    if arguments.tokenizer is not None:
        vocabulary = get_vocabulary(arguments.tokenizer)
    shape, reason = _shape(arguments.tokenizer, arguments.dtype)
    limits, no_limits = None, reason
    if shape is not None and arguments.hardware == "auto" and not parts.hostname.startswith(_LOCAL_HOSTS):
        no_limits = "the server runs on another machine: give its --hardware"
    elif shape is not None:
        with console.status("measuring the machine's bandwidth and FLOP/s"):
            limits, no_limits = get_limits(arguments.hardware, arguments.dtype or "float32")
    url = base_url + (arguments.endpoint or ENDPOINTS[arguments.backend])
    return ReadyServer(
        model=model,
        dtype=arguments.dtype,
        backend=lambda: OpenAIBackend(
            url,
            arguments.backend,
            model,
            ignore_eos=arguments.ignore_eos,
            temperature=arguments.temperature,
            extra=arguments.extra_body,
            headers=headers,
            proxy=proxy,
        ),
        vocabulary=vocabulary,
        facts={"url": url},
        shape=shape,
        counts=dict,
        limits=limits,
        no_limits=no_limits,
    )


def _shape(
    model: str | None, dtype: str | None, kv_dtype: str | None = None, quantization: str = "auto"
) -> tuple[ServedModel | None, str]:
    """Return the cost model of the model, or the reason if its files are not available."""
    from jpaged.plan.step_times import stored_shape  # imports jax

    if model is None:
        return None, "the model's files are unknown: give --tokenizer"
    try:
        folder = find_local(model) or find_folder(model)
        return ServedModel(stored_shape(folder, dtype, kv_dtype, quantization)), ""
    except JpagedError as error:
        return None, f"the model's files are not available: {error}"


def _headers(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise InvalidArgument("--header", f"{key!r} is not KEY=VALUE")
    return {key: value for key, _, value in pairs}
