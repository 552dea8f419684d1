"""Everything that needs an accelerator, in one command: the kernels' tests, their benchmarks, and a whole model.

conformance  the kernels against the oracle        kernels    attention at a few sizes, scattered and in order
executor     moves and sampling on the device      bandwidth  its share of the bandwidth, 1 to 256 rows of 1k to 32k
decode       a whole model's steps                 prefill    chunks of 2048 tokens behind contexts of 2k to 32k

    python -m benchmarks.accelerator

Each part runs in a process of its own, since only one at a time can hold the device; a part that fails does not keep
the others from running. Results go to results/, named after the device. The exit code is that of the worst part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS

_ROOT = Path(__file__).resolve().parents[1]
_ASK = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind.lower().replace(' ', '-'), sep='|')"


def parts(platform: str, device: str, model: str) -> dict[str, list[str]]:
    """Name -> words after `python -m`."""
    kernels = RESULTS / f"kernels_{device}"
    bench = ["jpaged", "bench", "kernels", "--shape", "llama-3-8b"]
    files = ["--json", f"{kernels}.json", "--plot", f"{kernels}.png"]
    sizes = ["--block-size", "16", "32", "64", "128"] if platform == "tpu" else []
    cells = {
        "bandwidth": ["--kind", "decode", "--num-seqs", "1", "2", "4", "8", "16", "32", "64", "128", "256"],
        "prefill": ["--kind", "prefill"],
    }
    contexts = ["--context", "1024", "2048", "8192", "32768", "--block-size", "32", "--max-gib", "32"]
    return {
        "conformance": ["pytest", "-q", "tests/accelerator/attention.py"],
        "executor": ["pytest", "-q", "tests/device/test_transfers.py", "tests/device/step/test_sampling.py"],
        "kernels": [*bench, *files, *sizes],
        **{
            name: [*bench, *words, *contexts, "--json", f"{RESULTS / name}_{device}.json"]
            for name, words in cells.items()
        },
        "decode": ["benchmarks.decode", "--model", model, "--name", f"decode_{device}"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator",
        description="Everything that needs an accelerator: the kernels' tests, their benchmark, and a whole model.",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="llama-3-8b", help="of the decode part (default: llama-3-8b)")
    parser.add_argument("--only", nargs="+", metavar="PART", help="some of the parts")
    arguments = parser.parse_args()
    asked = subprocess.run([sys.executable, "-c", _ASK], check=True, capture_output=True, text=True)
    platform, _, device = asked.stdout.strip().partition("|")
    if platform == "cpu":
        parser.error("there is no accelerator here: jax found a CPU only")
    chosen = parts(platform, device, arguments.model)
    for name in arguments.only or ():
        if name not in chosen:
            parser.error(f"--only: {name!r} is not one of {', '.join(chosen)}")
    environment = {**os.environ, "JAX_PLATFORMS": asked_platform(platform)}
    table = Table(title=f"on {device}", title_justify="left")
    for title in ("part", "exit code", "seconds"):
        table.add_column(title)
    worst = 0
    for name in arguments.only or chosen:
        begin = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *chosen[name]], cwd=_ROOT, env=environment, check=False).returncode
        table.add_row(name, str(code), f"{time.monotonic() - begin:.0f}")
        worst = max(worst, abs(code))
    Console().print(table)
    return worst


def asked_platform(platform: str) -> str:
    """How JAX_PLATFORMS spells the platform of a device."""
    return "cuda" if platform == "gpu" else platform


if __name__ == "__main__":
    sys.exit(main())
