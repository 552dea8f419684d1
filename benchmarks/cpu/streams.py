"""Tokens a second of one stream on one core, with weights of bfloat16 and of fewer bits, in turns.

The model has random weights, in a checkpoint that is quantized while it is loaded, once for each kind; all of them stay
in memory. A turn decodes a few and many tokens with each, A B C A B C; the difference is what decoding takes, and the
median of the turns counts, in processor's time: on one core nothing else passes. The output matrix is of bfloat16 in
all of them, so that a large vocabulary has its part in every token.

    taskset -c 0 python -m benchmarks.cpu.streams [--model tinyllama-1.1b] [--kinds int8 int4 fp8]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import save
from jpaged import json_text
from jpaged.checkpoints.tensor_files import StoredTensor, write_tensor_files
from jpaged.llm import LLM, TokensPrompt
from jpaged.models.hf_config import from_hf
from jpaged.models.model import placed_leaves
from jpaged.plan.known_models import KNOWN_MODELS
from jpaged.types import SamplingParams

SHORT, LONG = 4, 36
PROMPT = list(range(3, 19))
BF16 = "auto"
BF16_DTYPE = np.dtype(ml_dtypes.bfloat16)
TINYLLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MODELS = {"tinyllama-1.1b": TINYLLAMA, "llama-3.2-1b": dict(KNOWN_MODELS["llama-3.2-1b"].fields)}


@dataclass(frozen=True, slots=True)
class Stream:
    """One kind of weights."""

    kind: str
    token_ms: float
    tokens_per_s: float
    times_bf16: float


def write_random(fields: dict[str, object], folder: Path) -> None:
    """Writes a checkpoint of random numbers, of which a million are drawn."""
    drawn = np.random.default_rng(0).normal(scale=0.02, size=1 << 20).astype(BF16_DTYPE)

    def tensors() -> Iterator[StoredTensor]:
        for _, (leaf, *_) in placed_leaves(from_hf(fields), "loop"):
            for name, shape in leaf.tensors:
                yield StoredTensor(name, shape, BF16_DTYPE, lambda shape=shape: np.resize(drawn, shape))

    (folder / "config.json").write_text(json_text.dumps(fields))
    write_tensor_files(list(tensors()), folder, 2**30)


def seconds(llm: LLM, max_tokens: int) -> float:
    """Processor's time of a stream."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    begin = time.process_time()
    llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], greedy)
    return time.process_time() - begin


def measure(folder: str, kinds: list[str], num_turns: int) -> list[Stream]:
    sizes = {"max_model_len": 128, "num_blocks": 16, "block_size": 16, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    options = {**sizes, "dtype": "bfloat16", "swap_space": 0.0, "enable_prefix_caching": False}
    options |= {"wait_for_all_programs": True}
    with ExitStack() as stack:
        llms = {kind: stack.enter_context(LLM(folder, quantization=kind, **options)) for kind in (BF16, *kinds)}
        for llm in llms.values():
            seconds(llm, SHORT)
        turns = [
            {kind: (seconds(llm, LONG) - seconds(llm, SHORT)) / (LONG - SHORT) for kind, llm in llms.items()}
            for _ in range(num_turns)
        ]
    token_s = {kind: median(turn[kind] for turn in turns) for kind in llms}
    return [Stream(kind, 1e3 * spent, 1 / spent, token_s[BF16] / spent) for kind, spent in token_s.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu.streams", description="One stream's tokens a second on one core."
    )
    parser.add_argument("--model", choices=MODELS, default="tinyllama-1.1b")
    parser.add_argument("--kinds", nargs="+", choices=("int8", "int4", "fp8"), default=["int8", "int4", "fp8"])
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random(MODELS[options.model], Path(folder))
        streams = measure(folder, options.kinds, options.turns)
    table = Table("weights", "ms a token", "tokens/s", "x bf16", title=options.model, title_justify="left")
    for stream in streams:
        numbers = (f"{stream.token_ms:.1f}", f"{stream.tokens_per_s:.1f}", f"{stream.times_bf16:.2f}")
        table.add_row("bf16" if stream.kind == BF16 else stream.kind, *numbers)
    Console().print(table)
    command = f"python -m benchmarks.cpu.streams {' '.join(sys.argv[1:])}".rstrip()
    facts = {"num_cpus": len(os.sched_getaffinity(0)), "model": options.model, "unit": "processor's time"}
    Console().print(f"saved to {save('cpu_streams', command, {**facts, 'streams': [asdict(s) for s in streams]})}")


if __name__ == "__main__":
    main()
