"""The packaged checkpoint of the demo model: where it lies, how it is written and read.

checkpoint/config.json             Hugging Face layout
checkpoint/tokenizer*.json         for transformers' AutoTokenizer
checkpoint/params/                 Orbax, bfloat16, one tree a layer
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jpaged import json_text
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import Put, put_on_default_device
from jpaged.errors import InvalidArgument
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Params
from jpaged.models.model import Model, model_for
from jpaged.models.sharding import padded_axis
from jpaged.models.stack import LayerMode

FOLDER = Path(__file__).parent / "checkpoint"  # also the folder of the tokenizer

_PARAMS = "params"
# Written by Orbax and not needed to read: the path of the training machine, and which of its devices held an array.
_OF_ONE_MACHINE = ("commit_success.txt", "_sharding")


def load_demo(
    dtype: np.dtype,
    layer_mode: LayerMode,
    put: Put = put_on_default_device,
    folder: Path = FOLDER,
    num_parts: int = 1,
) -> tuple[ModelConfig, Params]:
    """Read the packaged model.

    Args:
        dtype: float32 or bfloat16; leaves are cast to it.
        layer_mode: one tree a layer, or one with stacked leaves.
        put: makes the device array of a leaf, as in `jpaged.checkpoints.weights.load_params`.
        folder: another checkpoint of the same layout.
        num_parts: the tree is that of the model padded for so many, as in `load_params`.

    Raises:
        InvalidArgument: the folder does not hold the parameters that its config.json promises, or some are not finite.
    """
    config = read_config(folder)
    model = model_for(config, np.dtype(dtype))
    arrays = _restore(folder / _PARAMS, model)
    if layer_mode == "scan":
        arrays["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *arrays["layers"])

    def place(path: tuple[jax.tree_util.KeyEntry, ...], array: np.ndarray) -> jax.Array:
        keys = tuple(
            key.idx if isinstance(key, jax.tree_util.SequenceKey) else str(getattr(key, "key", "")) for key in path
        )
        is_stacked = layer_mode == "scan" and keys[0] == "layers"
        split = padded_axis(keys, array.shape[is_stacked:], num_parts)
        whole = array.astype(model.dtype)
        if not np.isfinite(whole).all():
            raise InvalidArgument(str(folder / _PARAMS), f"{'.'.join(map(str, keys))} has numbers that are not finite")
        if split is not None:
            whole = split.padded(whole, 0, split.wide_size)
        return put(keys, whole.shape, lambda index: whole[index])

    return config, jax.tree_util.tree_map_with_path(place, arrays)


def save(folder: Path, config: ModelConfig, params: Params) -> None:
    """Write config.json and the parameters in bfloat16, replacing what was there.

    Args:
        folder: created where it is missing.
        config: the model's shape.
        params: a tree in loop mode.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json_text.dumps(config.to_hf(), indent=2) + "\n", encoding="utf-8")
    target = (folder / _PARAMS).resolve()
    with ocp.PyTreeCheckpointer() as saver:
        saver.save(target, jax.tree.map(lambda a: np.asarray(a.astype(jnp.bfloat16)), params), force=True)
    for name in _OF_ONE_MACHINE:
        (target / name).unlink(missing_ok=True)
    _forget_times(target / "_CHECKPOINT_METADATA")


def _restore(folder: Path, model: Model) -> Params:
    if not (folder / "_METADATA").is_file():
        raise InvalidArgument("checkpoint", f"{folder} holds no Orbax parameters; train them again")
    abstract = model.abstract_params("loop")
    with ocp.PyTreeCheckpointer() as reader:
        arrays = reader.restore(
            folder.resolve(),
            item=abstract,
            restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract),
        )
    wrong = jax.tree.map(lambda want, have: want.shape != have.shape, abstract, arrays)
    if any(jax.tree.leaves(wrong)):
        raise InvalidArgument("checkpoint", f"the shapes in {folder} are not those that config.json states")
    return arrays


def _forget_times(path: Path) -> None:
    metadata = json.loads(path.read_text(encoding="utf-8"))
    metadata |= {"init_timestamp_nsecs": 0, "commit_timestamp_nsecs": 0}
    path.write_text(json_text.dumps(metadata) + "\n", encoding="utf-8")
