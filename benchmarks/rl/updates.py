"""Times of updates of the weights of model M, 386 million parameters in bfloat16, on the CPU.

python -m benchmarks.rl.updates

Each turn updates all weights from NumPy arrays, JAX arrays and a folder. Other programs change the wall time, so the
processor time is recorded, too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from benchmarks.peers.checkpoints import SHAPES, make
from benchmarks.record import save
from jpaged.llm import LLM

NUM_WARM_UPS = 2
"""Updates of each kind before the first measured one, which touch memory for the first time."""


def measure(folder: Path, backend: str, num_turns: int) -> list[dict[str, Any]]:
    """Median times of each kind of source."""
    arrays = load_file(folder / "model.safetensors")
    sources: dict[str, Any] = {
        "NumPy arrays": arrays,
        "JAX arrays": {name: jnp.asarray(array) for name, array in arrays.items()},
        "a folder": str(folder),
    }
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "num_blocks": 64}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    with LLM(str(folder), dtype="bfloat16", linear_backend=backend, **sizes) as llm:
        for turn in range(NUM_WARM_UPS + num_turns):
            for name, source in sources.items():
                begin, cpu = time.perf_counter(), time.process_time()
                llm.update_weights(source)
                if turn >= NUM_WARM_UPS:
                    times[name].append((time.perf_counter() - begin, time.process_time() - cpu))
    rows = []
    for name, found in times.items():
        seconds, cpu_seconds = (statistics.median(column) for column in zip(*found, strict=True))
        rows.append({"backend": backend, "source": name, "seconds": seconds, "cpu_seconds": cpu_seconds})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl.updates", description="times of weight updates")
    parser.add_argument("--turns", type=int, default=5, help="measured updates of each kind (default: 5)")
    parser.add_argument("--model", type=Path, help="folder of model M (default: one is made)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.model or Path(made)
        if given.model is None:
            make(SHAPES["M"], folder)
        rows = [row for backend in ("cpu", "xla") for row in measure(folder, backend, given.turns)]
    table = Table("linear_backend", "from", "wall time, s", "processor time, s")
    for row in rows:
        table.add_row(row["backend"], row["source"], f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}")
    console = Console()
    console.print(table)
    path = save("updates", "python -m benchmarks.rl.updates", {"model": "M", "updates": rows})
    console.print(f"[dim]{path}[/]")


if __name__ == "__main__":
    main()
