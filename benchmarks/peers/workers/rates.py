"""How fast PyTorch reads memory and multiplies matrices on one core: what no engine on it can be much quicker than.

Prints one line of JSON: `read_bytes_s`, and by type `flops`. Weights are many times the caches' size, as a model's are.
Processor time, so that others on the machine count little.
"""

from __future__ import annotations

import json
import time

import torch
from torch.nn.functional import linear

NUM_INPUTS, NUM_OUTPUTS, NUM_ROWS = 896, 4864, 512
NUM_COPIES = 16
NUM_ROUNDS = 7


def best_s(copies: list[torch.Tensor], rows: torch.Tensor) -> float:
    """Returns the least seconds of a product with one copy of the weights."""
    seconds = []
    for _ in range(NUM_ROUNDS):
        begin = time.process_time()
        for weights in copies:
            linear(rows, weights)
        seconds.append((time.process_time() - begin) / len(copies))
    return min(seconds)


def measure() -> dict[str, object]:
    torch.set_num_threads(1)
    flops, reads = {}, []
    for dtype in (torch.float32, torch.bfloat16):
        copies = [torch.randn(NUM_OUTPUTS, NUM_INPUTS).to(dtype) for _ in range(NUM_COPIES)]
        product_s = best_s(copies, torch.randn(NUM_ROWS, NUM_INPUTS).to(dtype))
        flops[str(dtype).removeprefix("torch.")] = 2 * NUM_ROWS * NUM_INPUTS * NUM_OUTPUTS / product_s
        reads.append(copies[0].nbytes / best_s(copies, torch.randn(1, NUM_INPUTS).to(dtype)))
    large = torch.ones(1 << 27)
    for _ in range(NUM_ROUNDS):
        begin = time.process_time()
        large.sum()
        reads.append(large.nbytes / (time.process_time() - begin))
    return {"read_bytes_s": max(reads), "flops": flops}


if __name__ == "__main__":
    print(json.dumps(measure()))
