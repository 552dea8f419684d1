"""Groups of 16 samples in jpaged and in vLLM's CPU build, on one core each, in turns.

python -m benchmarks.rl.groups --vllm build/peers/venvs/vllm/bin/python

`python -m benchmarks.peers` installs vLLM there. The model has the shape of SmolLM2-135M and random weights. The two
engines are loaded at the same time and run one after the other: A B A B. Other programs change the wall time of a turn,
so the processor time is recorded, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from benchmarks.record import save

GROUP_SIZE = 16
WORKER = Path(__file__).parent / "group_worker.py"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(folder: Path) -> None:
    """Writes a model of SmolLM2-135M's shape with random weights."""
    rng, width, inner, kv_width = np.random.default_rng(0), 576, 1536, 192
    sizes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_width, width),
        "self_attn.v_proj": (kv_width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    norm = np.ones(width, ml_dtypes.bfloat16)
    tensors = {"model.embed_tokens.weight": matrix(49152, width), "model.norm.weight": norm}
    for layer in range(30):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in sizes.items()}
        tensors |= {f"{prefix}{name}.weight": norm for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SHAPE))


class Engine:
    """A worker process, pinned to one core."""

    def __init__(self, name: str, python: str, folder: Path, dtype: str, core: int) -> None:
        command = ["taskset", "-c", str(core), python, str(WORKER), name, str(folder), dtype]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read("ready")

    def run(self, prompt: list[int], num_tokens: int) -> dict[str, float]:
        """Runs a group; returns its times."""
        assert self._process.stdin is not None
        given = {"prompt": prompt, "n": GROUP_SIZE, "max_tokens": num_tokens}
        print(json.dumps(given), file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._read("{"))
        if found["num_tokens"] != GROUP_SIZE * num_tokens:
            raise RuntimeError(f"a group has {found['num_tokens']} tokens")
        return found

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self, begin: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(begin):
            raise RuntimeError(f"the worker answered {line!r}")
        return line


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl.groups", description="groups of samples, and vLLM's")
    parser.add_argument("--vllm", required=True, help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--dtype", default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[32, 256], help="tokens (default: 32 256)")
    parser.add_argument("--num-tokens", type=int, default=32, help="tokens of a sample (default: 32)")
    parser.add_argument("--turns", type=int, default=5, help="measured groups of each length (default: 5)")
    parser.add_argument("--core", type=int, default=0, help="core of both engines (default: 0)")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        pythons = {"jpaged": sys.executable, "vllm": given.vllm}
        engines = {name: Engine(name, at, Path(folder), given.dtype, given.core) for name, at in pythons.items()}
        for prompt_len in given.prompt_len:
            times: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
            for turn in range(given.turns + 1):
                prompt = np.random.default_rng(turn * 1000 + prompt_len).integers(3, 40_000, prompt_len).tolist()
                for name, engine in engines.items():
                    found = engine.run(prompt, given.num_tokens)
                    if turn:  # the first one is the warm-up
                        times[name].append(found)
            row: dict[str, Any] = {"prompt_len": prompt_len, "num_tokens": given.num_tokens}
            for name, found_times in times.items():
                for field in ("seconds", "cpu_seconds"):
                    row[f"{name}_{field}"] = statistics.median(one[field] for one in found_times)
                row[f"{name}_samples_per_s"] = GROUP_SIZE / row[f"{name}_seconds"]
            row["ratio"] = row["vllm_seconds"] / row["jpaged_seconds"]
            row["cpu_ratio"] = row["vllm_cpu_seconds"] / row["jpaged_cpu_seconds"]
            rows.append(row)
        for engine in engines.values():
            engine.close()
    table = Table("prompt", "jpaged, samples/s", "vLLM, samples/s", "ratio", "ratio of processor time")
    for row in rows:
        rates = (f"{row[f'{name}_samples_per_s']:.2f}" for name in ("jpaged", "vllm"))
        table.add_row(str(row["prompt_len"]), *rates, f"{row['ratio']:.2f}", f"{row['cpu_ratio']:.2f}")
    console = Console()
    console.print(table)
    command = "python -m benchmarks.rl.groups --vllm PYTHON"
    path = save("groups", command, {"dtype": given.dtype, "group_size": GROUP_SIZE, "groups": rows})
    console.print(f"[dim]{path}[/]")


if __name__ == "__main__":
    main()
