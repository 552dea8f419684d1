"""One engine of `benchmarks.rl.groups`: it runs groups of samples, as lines of its input name them.

It is run by the engine's own Python, which need not have this repository's packages.

    input     {"prompt": [3, 4, 5], "n": 16, "max_tokens": 32}
    output    {"seconds": wall time, "cpu_seconds": processor time, "num_tokens": sampled tokens}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

LIMITS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 16, "skip_tokenizer_init": True}

Run = Callable[[list[int], int, int], int]


def open_jpaged(folder: str, dtype: str) -> Run:
    """Loads an `LLM` of jpaged; the result runs a group and returns the number of sampled tokens."""
    from jpaged import LLM, SamplingParams, TokensPrompt

    llm = LLM(folder, dtype=dtype, wait_for_all_programs=True, **LIMITS)

    def run(prompt: list[int], n: int, max_tokens: int) -> int:
        params = SamplingParams(n=n, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=prompt)], params)
        return sum(len(one.token_ids) for one in output.outputs)

    return run


def open_vllm(folder: str, dtype: str) -> Run:
    """Loads vLLM's `LLM` in this process: without messages between processes it is faster on a core."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model=folder, dtype=dtype, block_size=32, **LIMITS)

    def run(prompt: list[int], n: int, max_tokens: int) -> int:
        params = SamplingParams(n=n, temperature=1.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return sum(len(one.token_ids) for one in output.outputs)

    return run


def main() -> None:
    engine, folder, dtype = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # logs
    run = {"jpaged": open_jpaged, "vllm": open_vllm}[engine](folder, dtype)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        begin, cpu = time.perf_counter(), time.process_time()
        num_tokens = run(given["prompt"], given["n"], given["max_tokens"])
        result = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps({**result, "num_tokens": num_tokens}), file=out, flush=True)


if __name__ == "__main__":
    main()
