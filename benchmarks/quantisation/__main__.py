"""Perplexity and logit error of each format: `python -m benchmarks.quantisation`."""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np

from benchmarks.quantisation.measure import held_text, measure
from benchmarks.record import save
from jpaged.checkpoints.quantized.quantizer import ASKED


def main() -> None:
    """Prints a line a format, and keeps them in results/quantisation.json."""
    parser = argparse.ArgumentParser(description="Perplexity and logit error of each format.")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of what is not quantized")
    parser.add_argument("--num-batches", type=int, default=2, help="of 6 rows of 384 tokens")
    arguments = parser.parse_args()
    batches = held_text(arguments.num_batches)
    print(f"{'format':8} {'perplexity':>11} {'dequantized':>12} {'logit error':>12} {'transformers':>13} {'error':>9}")
    found = {}
    for asked in ("auto", *ASKED):
        quality = measure(asked, np.dtype(arguments.dtype), batches)
        found[asked] = dataclasses.asdict(quality)
        ours = f"{quality.perplexity:11.4f} {quality.dequantized_perplexity:12.4f} {quality.logit_error:12.2e}"
        theirs = "needs torch: make torch"
        if quality.their_perplexity is not None:
            theirs = f"{quality.their_perplexity:13.4f} {quality.their_logit_error:9.2e}"
        print(f"{asked:8} {ours} {theirs}", flush=True)
    save("quantisation", f"python -m benchmarks.quantisation --dtype {arguments.dtype}", {"formats": found})


if __name__ == "__main__":
    main()
