"""Writes the demo model in Hugging Face layout: `python -m benchmarks.demo_model.export FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

import jax.numpy as jnp

from jpaged.checkpoints.conversion import ConversionOptions, save_params
from jpaged.demo.checkpoint import FOLDER, load_demo


def export(folder: Path, dtype: str = "bfloat16") -> None:
    """Write config.json, model.safetensors and the tokenizer.

    Args:
        folder: created where it is missing; a checkpoint that is there is replaced.
        dtype: of the tensors, bfloat16 as stored or float32.
    """
    config, params = load_demo(jnp.dtype(dtype), "loop")
    save_params(params, config, folder, ConversionOptions("safetensors", force=True), companions=FOLDER)


def main() -> None:
    """Export the demo model for other programs, such as transformers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_model.export",
        description="Export the demo model for other programs, such as transformers.",
    )
    parser.add_argument("folder", type=Path, help="created where it is missing")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the tensors")
    args = parser.parse_args()
    export(args.folder, args.dtype)
    print(f"saved in {args.folder}")


if __name__ == "__main__":
    main()
