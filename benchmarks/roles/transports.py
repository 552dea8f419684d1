"""Rates of the ways to transfer a prompt's blocks between a prefill and a decode server, in one run.

    grpc    device -> host memory -> messages -> host memory -> device
    jax     device -> device, over data ports (`kv_connector` jax)
    compute no transfer: the decode server's own rate for the same prompts

Prompts of two sizes, of about 2 and 64 MiB of blocks, give bytes per second and the constant part. From them follow the
milliseconds of a prefix of 2k, 8k and 32k tokens, and the length from which a transfer beats computing.

    python -m benchmarks.roles.transports [--model MODEL] [--rounds 4] [--large-mib 64]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from jpaged.client import Client
from jpaged.types import SamplingParams

_PORT = '{"kv_connector": "jax", "kv_connector_extra_config": {"address": "127.0.0.1:0", "pull_timeout": 60}}'
_PREFIXES = (2048, 8192, 32768)
_ONE = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@contextlib.contextmanager
def serving(model: str, *words: str) -> Iterator[tuple[str, str]]:
    """A server; yields its address and the URL of its metrics."""
    common = ["--port", "0", "--metrics-port", "0", "--max-num-seqs", "4", "--swap-space", "1", "--dtype", "float32"]
    command = [sys.executable, "-m", "jpaged", "serve", model, *common, *words]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        metrics = ""
        for line in process.stderr:
            if found := re.search(r"metrics on (\S+)", line):
                metrics = found[1]
            if found := re.search(r"^ready on \S*:(\d+)", line):
                yield f"127.0.0.1:{found[1]}", metrics
                return
        raise RuntimeError("the server has ended")
    finally:
        process.kill()
        process.wait()


def read_counters(url: str) -> dict[str, float]:
    """Return the counters of a server that begin with jpaged."""
    text = urllib.request.urlopen(url).read().decode()
    return {name: float(value) for name, value in re.findall(r"^jpaged:(\w+?)(?:_total)?\{[^}]*\} (\S+)$", text, re.M)}


def measure(model: str, sizes: Mapping[str, int], rounds: int, transport: str) -> dict[str, list[tuple[float, float]]]:
    """Return bytes and seconds of each transfer, or tokens and seconds of each computed prompt, by size."""
    port = ("--kv-transfer-config", _PORT) if transport == "jax" else ()
    chance, found = random.Random(0), {size: list[tuple[float, float]]() for size in sizes}
    with contextlib.ExitStack() as stack:
        words: tuple[str, ...] = ()
        if transport != "compute":
            target, _ = stack.enter_context(serving(model, "--role", "prefill", "--prefill-hold", "120", *port))
            always = ("--prefill-min-tokens", "16", "--prefill-policy", "always")
            words = ("--role", "decode", "--prefill-target", target, *always, *port)
            words = (*words, "--prefill-timeout", "600", "--transfer-timeout", "120")
        target, url = stack.enter_context(serving(model, *words))
        client = stack.enter_context(Client(target))
        for size, num_tokens in [("small", sizes["small"]), *(item for item in sizes.items() for _ in range(rounds))]:
            before, begin_s = read_counters(url), time.monotonic()
            token_ids = [chance.randrange(300, 4000) for _ in range(num_tokens)]
            client.complete(sampling=_ONE, prompt_token_ids=token_ids)
            wall_s, after = time.monotonic() - begin_s, read_counters(url)
            change = {name: after[name] - before.get(name, 0.0) for name in after}
            if transport == "compute":
                found[size].append((num_tokens, wall_s))
            elif transport == "jax" and change["pulls"]:
                found[size].append((change["bytes_pulled"], change["pull_seconds"]))
            elif transport == "grpc" and change["bytes_received"]:
                found[size].append((change["bytes_received"], change["transfer_wait_seconds"]))
    found["small"] = found["small"][1:]  # the first one connects and compiles
    return found


def summarize(found: Mapping[str, list[tuple[float, float]]]) -> tuple[float, float, dict[str, float]]:
    """Return units per second, the constant seconds, and the units per second of each size, from medians."""
    points = {size: tuple(map(statistics.median, zip(*runs, strict=True))) for size, runs in found.items()}
    (small, small_s), (large, large_s) = points["small"], points["large"]
    rate = (large - small) / max(large_s - small_s, 1e-9)
    return rate, max(0.0, small_s - small / rate), {size: count / s for size, (count, s) in points.items()}


def describe(transport: str, found: Any, bytes_per_token: float, computed: tuple[float, float, Any]) -> dict[str, Any]:
    """Return one line of the result."""
    rate, constant_s, rates = summarize(found)
    tokens_per_s = rate / bytes_per_token
    gain = 1 / computed[0] - 1 / tokens_per_s
    break_even = max(0.0, constant_s - computed[1]) / gain if gain > 0 else None
    return {
        "transport": transport,
        "bytes_per_s": round(rate),
        **{f"bytes_per_s_{size}": round(value) for size, value in rates.items()},
        "constant_ms": round(constant_s * 1e3, 2),
        **{f"ms_{size}": round((constant_s + size / tokens_per_s) * 1e3, 1) for size in _PREFIXES},
        **{f"compute_ms_{size}": round((computed[1] + size / computed[0]) * 1e3, 1) for size in _PREFIXES},
        "break_even_tokens": None if break_even is None else round(break_even),
        "requests": sum(map(len, found.values())),
    }


def main() -> None:
    """Measure all transports, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description="Measure transfers over gRPC and over data ports.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--small-tokens", type=int, default=48)
    parser.add_argument("--large-tokens", type=int, default=960)
    arguments = parser.parse_args()
    sizes = {"small": arguments.small_tokens, "large": arguments.large_tokens}
    computed = summarize(measure(arguments.model, sizes, arguments.rounds, "compute"))
    for transport in ("grpc", "jax"):
        found = measure(arguments.model, sizes, arguments.rounds, transport)
        num_bytes = statistics.median(count for count, _ in found["large"])
        bytes_per_token = num_bytes / (sizes["large"] // 16 * 16)
        print(json.dumps(describe(transport, found, bytes_per_token, computed)), flush=True)


if __name__ == "__main__":
    main()
