"""The gRPC server under `jpaged bench serve`, each in its own process; and three starts in a row.

`python -m benchmarks.first_contact.serving FILE` starts the embedded model with a pool of the default size, and writes
what it planned and generated.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.first_contact.cells import Cells, Values, WrongNumbers
from jpaged.llm import LLM, TokensPrompt
from jpaged.types import SamplingParams

_LOADS = {"full": (128, 128, 64), "tiny": (4, 16, 4)}  # requests, tokens of a prompt, tokens of an output
_FLAGS = {
    "full": ("--max-num-seqs", "64", "--max-num-batched-tokens", "256", "--max-model-len", "512"),
    "tiny": ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "64"),
}
_START: Mapping[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "wait_for_all_programs": True,
}
"""Few programs; the pool is as large as the memory allows, except on a CPU."""
_KEPT = (
    *("completed", "failed", "request_throughput", "output_throughput", "total_token_throughput"),
    *("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "duration"),
)


def check(cells: Cells, size: str) -> None:
    """Serve the embedded model under load, and start a process three times in a row.

    The second and the third start load programs that the first cached, while the driver may still hold the memory of
    the process before. Each must have the same pool and tokens.
    """
    starts = [f"{name} start" for name in ("first", "second", "third")]
    cells.plan(["demo", *starts])
    cells.run("demo", lambda: _serve(size))
    seen: list[Values] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in starts:
            path = Path(folder) / f"{name}.json"
            cells.run(name, functools.partial(_start, path, seen), is_needed=True)


def _start(path: Path, seen: list[Values]) -> Values:
    """Start the embedded model in a process, and compare it with the starts before."""
    begin_s = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.first_contact.serving", str(path)]
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the start ended with {done.returncode}; the log has its output")
    found: dict[str, Any] = json.loads(path.read_text())
    seen.append(found)
    for name in ("num_blocks", "tokens"):
        if found[name] != seen[0][name]:
            raise WrongNumbers(f"{name} {found[name]}, but {seen[0][name]} at the first start")
    return {"process_s": time.perf_counter() - begin_s, **found}


def _generate() -> Values:
    """Start the embedded model with the default memory, and generate some tokens."""
    lines: list[str] = []
    begin_s = time.perf_counter()
    with LLM("demo", progress=lambda what, done, total: lines.append(what), **_START) as llm:
        start_s = time.perf_counter() - begin_s
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=[5, 6, 7])], params, use_tqdm=False)
        num_blocks = llm.config.cache.num_blocks
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "num_blocks": num_blocks,
        "tokens": list(output.outputs[0].token_ids),
        "start_s": start_s,
        "peak_bytes_in_use": stats.get("peak_bytes_in_use"),
        "bytes_limit": stats.get("bytes_limit"),
        "memory": [line.strip() for line in lines if line.startswith("  ")],
    }


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


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_generate()))
