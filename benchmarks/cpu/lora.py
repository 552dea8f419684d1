"""Tokens a second of 32 rows that decode on one core: 8 adapters (LoRA) of 4 rows each, and the same rows without.

The model has random weights, and the adapters, of every matrix of its layers, too. Three ways take turns, A B C A B C:
a server without adapters, one with slots for them whose rows have none, and that one with 8 x 4 rows. A turn decodes a
few and more tokens; the difference is what decoding takes, and the median of the turns counts, in processor's time: on
one core nothing else passes.

    taskset -c 0 python -m benchmarks.cpu.lora [--model tinyllama-1.1b] [--layers 4] [--dtype bfloat16] [--rank 16]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from benchmarks.cpu.streams import MODELS, write_random
from benchmarks.record import save
from jpaged import json_text
from jpaged.llm import LLM, TokensPrompt
from jpaged.models.hf_config import from_hf
from jpaged.models.lora import adapted_places
from jpaged.types import SamplingParams

SHORT, LONG = 2, 10
NUM_ADAPTERS, ROWS_EACH = 8, 4
NUM_ROWS = NUM_ADAPTERS * ROWS_EACH
TARGET = 0.8
PROMPTS = [TokensPrompt(prompt_token_ids=[3 + row]) for row in range(NUM_ROWS)]


def write_adapter(fields: dict[str, object], rank: int, seed: int, folder: Path) -> str:
    """Writes an adapter of every matrix as PEFT would; `NAME=PATH`."""
    rng, folder = np.random.default_rng(seed), folder / f"adapter-{seed}"
    drawn = rng.normal(scale=0.02, size=1 << 20).astype(ml_dtypes.bfloat16)
    tensors = {}
    for place in adapted_places(from_hf(fields), "loop"):
        for leaf in place.leaves:
            for name, (num_out, width) in leaf.tensors:
                module = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = np.resize(drawn, (rank, width))
                tensors[f"{module}.lora_B.weight"] = np.resize(drawn, (num_out, rank))
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json_text.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return f"a{seed}={folder}"


def seconds(llm: LLM, adapters: Sequence[str | None] | None, max_tokens: int) -> float:
    """Processor's time of a batch."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    begin = time.process_time()
    llm.generate(PROMPTS, greedy, adapter=adapters)
    return time.process_time() - begin


def measure(fields: dict[str, object], dtype: str, rank: int, num_turns: int) -> dict[str, list[float]]:
    """Seconds of a step of each way, turn after turn."""
    sizes = {"max_model_len": 64, "num_blocks": 4 * NUM_ROWS, "block_size": 16, "max_num_seqs": NUM_ROWS}
    options = {**sizes, "max_num_batched_tokens": NUM_ROWS, "dtype": dtype, "swap_space": 0.0}
    options |= {"enable_prefix_caching": False, "wait_for_all_programs": True}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random(fields, folder)
        adapters = [write_adapter(fields, rank, seed, folder) for seed in range(NUM_ADAPTERS)]
        slots = {"lora": tuple(adapters), "max_loras": NUM_ADAPTERS, "max_lora_rank": rank}
        of_rows = [f"a{row % NUM_ADAPTERS}" for row in range(NUM_ROWS)]
        with LLM(name, **options) as plain, LLM(name, **options, **slots) as adapted:
            ways = {"without slots": (plain, None), "no adapter": (adapted, None), "8 adapters": (adapted, of_rows)}
            for llm, which in ways.values():
                seconds(llm, which, LONG)
            turns = [
                {way: (seconds(*how, LONG) - seconds(*how, SHORT)) / (LONG - SHORT) for way, how in ways.items()}
                for _ in range(num_turns)
            ]
    return {way: [turn[way] for turn in turns] for way in ways}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu.lora", description="Adapters beside no adapters.")
    parser.add_argument("--model", choices=MODELS, default="tinyllama-1.1b")
    parser.add_argument("--layers", type=int, default=4, help="of the model, the first ones")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    fields = {**MODELS[options.model], "num_hidden_layers": options.layers}
    turns = measure(fields, options.dtype, options.rank, options.turns)
    step_s = {way: median(of_way) for way, of_way in turns.items()}
    ratios = {way: step_s["no adapter"] / spent for way, spent in step_s.items()}
    table = Table("rows", "ms a step", "tokens/s", "x no adapter", title=options.model, title_justify="left")
    for way, spent in step_s.items():
        table.add_row(way, f"{1e3 * spent:.1f}", f"{NUM_ROWS / spent:.1f}", f"{ratios[way]:.2f}")
    Console().print(table)
    command = f"python -m benchmarks.cpu.lora {' '.join(sys.argv[1:])}".rstrip()
    facts = {"num_cpus": len(os.sched_getaffinity(0)), "model": options.model, "unit": "processor's time"}
    facts |= {
        "layers": options.layers,
        "dtype": options.dtype,
        "rank": options.rank,
        "num_rows": NUM_ROWS,
        "target_ratio": TARGET,
    }
    found = {"step_s": step_s, "x_no_adapter": ratios, "turns_s": turns}
    Console().print(f"saved to {save('cpu_lora', command, {**facts, **found})}")


if __name__ == "__main__":
    main()
