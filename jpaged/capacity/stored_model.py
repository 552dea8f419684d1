"""Cost of a step of a model on disk, from its config: folders and GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jpaged.capacity.cost import Shape
from jpaged.capacity.step_times import expert_shape
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.names import num_params, weight_bytes

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}


def stored_shape(
    path: Path, dtype: str | None = None, kv_dtype: str | None = None, quantization: str = "auto"
) -> Shape:
    """Return what a step of a checkpoint reads and computes, from its config.

    Args:
        path: as `find_folder` returns it.
        dtype: type of weights that are not quantized, in the server; None for that of the files.
        kv_dtype: type of the KV cache; None for that of the weights.
        quantization: method by which weights are rounded at loading.

    Raises:
        InvalidArgument, Unsupported: as `read_config`.
    """
    config = read_config(path)
    if quantization != "auto":
        from jpaged.checkpoints.quantised.rounding import quantised_here  # imports jax

        config = quantised_here(config, quantization)
    item_bytes = ITEM_BYTES.get(dtype or "") or ITEM_BYTES[config.checkpoint_dtype or "float32"]
    head_params = config.vocab_size * config.hidden_size
    looked_up = 0 if config.tie_word_embeddings else head_params
    return Shape(
        num_params=num_params(config) - looked_up,
        num_layers=config.num_layers,
        query_width=config.query_width,
        weight_bytes=weight_bytes(config, item_bytes) - looked_up * item_bytes,
        kv_bytes_per_token=config.num_layers * config.kv_width * ITEM_BYTES.get(kv_dtype or "", item_bytes),
        head_params=head_params,
        **expert_shape(config),
    )
