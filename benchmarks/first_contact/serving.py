"""The gRPC server under `jpaged bench serve`, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.first_contact.cells import Cells, Values

_LOADS = {"full": (128, 128, 64), "tiny": (4, 16, 4)}  # requests, tokens of a prompt, tokens of an output
_FLAGS = {
    "full": ("--max-num-seqs", "64", "--max-num-batched-tokens", "256", "--max-model-len", "512"),
    "tiny": ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "64"),
}
_KEPT = (
    *("completed", "failed", "request_throughput", "output_throughput", "total_token_throughput"),
    *("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "duration"),
)


def check(cells: Cells, size: str) -> None:
    """Serve the embedded model under load."""
    cells.plan(["demo"])
    cells.run("demo", lambda: _serve(size))


def _serve(size: str) -> Values:
    num_prompts, input_len, output_len = _LOADS[size]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serve.json"
        lengths = ["--random-input-len", str(input_len), "--random-output-len", str(output_len)]
        command = [sys.executable, "-m", "jpaged", "bench", "serve", "--num-prompts", str(num_prompts), *lengths]
        command += ["--hardware", "none", "--output-json", str(path), "--", *_FLAGS[size]]
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"`{' '.join(command[1:])}` ended with {done.returncode}; the log has its output")
        return _values(json.loads(path.read_text()))


def _values(record: Mapping[str, object]) -> Values:
    """Return the main metrics of the run.

    Raises:
        RuntimeError: requests failed.
    """
    run = _run_of(record)
    if run.get("failed"):
        raise RuntimeError(f"{run['failed']} of {run.get('completed')} requests failed")
    return {name: run[name] for name in _KEPT if name in run}


def _run_of(record: Mapping[str, object]) -> Mapping[str, object]:
    """Return the object that has the metrics: the record, or the first of its runs."""
    runs = record.get("runs")
    if isinstance(runs, list) and runs and isinstance(runs[0], dict):
        return runs[0]
    return record
