"""Trains the demo captioner from a seed: `python -m benchmarks.captioner.train`.

The encoder is trained from nothing together with the language model, on dialogs of which each has its own picture:

    picture ─processor─> patches ─encode─> states of patches ─> rows ─┐
    dialog ─tokenizer─> tokens ───────────────────────────────────────┴─> jpaged's own model ──> answers

The loss is the cross entropy of the answers. A second one is that of the shape whose center is in each patch, from the
states of patches: it teaches the encoder to find shapes, and its weights are left out of the checkpoint. Without it the
first 12,000 pictures teach colors, and neither shapes nor counts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.captioner.pictures import SHAPES, dialog
from benchmarks.captioner.tokenizer import (
    BOS,
    BREAK,
    END,
    EOS,
    IMAGE,
    MAX_LEN,
    PAD,
    encode_dialog,
    save_tokenizer,
    train_tokenizer,
)
from benchmarks.demo_model.attention import attend
from benchmarks.demo_model.muon import scale_by_muon
from benchmarks.demo_model.saving import leaf_tensors
from benchmarks.demo_model.train import read_options
from jpaged import json_text
from jpaged.checkpoints.hub import CONFIG_FILE
from jpaged.checkpoints.names import model_leaves
from jpaged.checkpoints.tensor_files import SINGLE_FILE
from jpaged.demo import CAPTIONER_FOLDER
from jpaged.device.vision import patch_positions
from jpaged.models import rope
from jpaged.models.config import ModelConfig, VisionConfig
from jpaged.models.hf_config import from_hf
from jpaged.models.layers import Params, activate
from jpaged.models.model import Model, insert
from jpaged.models.tokens import InputEmbeds, TokenBatch
from jpaged.models.vision import tower
from jpaged.models.vision.config import vision_leaves
from jpaged.models.vision.processors import PatchProcessor, read_processor

MAX_PATCHES = 64
ROW_LEN = 80
"""Maximum number of tokens of a dialog."""
PREPROCESSOR: Mapping[str, object] = {
    "image_processor_type": "PixtralImageProcessor",
    "processor_class": "PixtralProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": {"height": 8, "width": 8},
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 64},
}
PROCESSOR: Mapping[str, object] = {
    "processor_class": "PixtralProcessor",
    "patch_size": 8,
    "spatial_merge_size": 2,
    "image_token": IMAGE,
    "image_break_token": BREAK,
    "image_end_token": END,
}


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """What a run depends on.

    Attributes:
        seed: of the dialogs and the first parameters.
        num_rows: dialogs of a step.
        phases: numbers of steps, in order. In each, rates rise for `num_warmup_steps`, then fall to 0 by a cosine.
        rate, kernel_rate: highest learning rates of the first phase; those of later ones are smaller by `later`.
        center_weight: weight of the loss of shapes' centers.
    """

    seed: int = 2026
    num_rows: int = 32
    phases: tuple[int, ...] = (1100, 1900)
    rate: float = 4e-3
    kernel_rate: float = 1e-2
    later: float = 0.7
    num_warmup_steps: int = 60
    weight_decay: float = 0.02
    center_weight: float = 0.5

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return sum(self.phases)

    def schedule(self, highest: float) -> optax.Schedule:
        """Return the learning rate of each step."""
        parts = [
            optax.warmup_cosine_decay_schedule(
                0.0, highest * (self.later if index else 1), self.num_warmup_steps, steps
            )
            for index, steps in enumerate(self.phases)
        ]
        return optax.join_schedules(parts, [*itertools.accumulate(self.phases[:-1])])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Batch:
    """Dialogs with their pictures.

    Attributes:
        patches_bpe: `[B, P, numbers of a patch]`.
        is_patch_bp: False for padding.
        positions_bp2: row and column of each patch.
        token_ids_bt: int32 `[B, T]`.
        rows_bt: the row of the encoder that replaces the token; -1 for none.
        is_answer_bt: the token is part of an answer, which the model learns to write.
        shapes_bp: int32, the shape whose center is in the patch, from 1; 0 for none.
    """

    patches_bpe: Any
    is_patch_bp: Any
    positions_bp2: Any
    token_ids_bt: Any
    rows_bt: Any
    is_answer_bt: Any
    shapes_bp: Any


def make_hf_config(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the config.json of the captioner."""
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "dtype": "bfloat16",
        "image_token_index": tokenizer.token_to_id(IMAGE),
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "text_config": {
            "model_type": "mistral",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": MAX_LEN,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_window": None,
            "bos_token_id": tokenizer.token_to_id(BOS),
            "eos_token_id": tokenizer.token_to_id(EOS),
            "pad_token_id": tokenizer.token_to_id(PAD),
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "head_dim": 16,
            "num_channels": 3,
            "patch_size": 8,
            "image_size": 64,
            "hidden_act": "silu",
            # Frequencies for 8 rows and columns: with the usual 10000, neighboring columns hardly differ.
            "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        },
    }


def make_batch(
    tokenizer: Tokenizer, processor: PatchProcessor, config: VisionConfig, seed: int, step: int, num_rows: int
) -> Batch:
    """Return the batch of a step, a function of the seed and the step."""
    patches_bpe = np.zeros((num_rows, MAX_PATCHES, config.patch_dim), np.float32)
    is_patch_bp = np.zeros((num_rows, MAX_PATCHES), np.bool_)
    positions_bp2 = np.zeros((num_rows, MAX_PATCHES, 2), np.int32)
    token_ids_bt = np.zeros((num_rows, ROW_LEN), np.int32)
    rows_bt = np.full((num_rows, ROW_LEN), -1, np.int32)
    is_answer_bt = np.zeros((num_rows, ROW_LEN), np.bool_)
    shapes_bp = np.zeros((num_rows, MAX_PATCHES), np.int32)
    for row in range(num_rows):
        given = dialog(seed, step * num_rows + row)
        image = None if given.picture is None else processor.prepare(given.picture.pixels_hwc)
        token_ids, is_answer = encode_dialog(tokenizer, given, () if image is None else image.token_ids)
        token_ids_bt[row, : len(token_ids)] = token_ids
        is_answer_bt[row, : len(token_ids)] = is_answer
        if image is not None and given.picture is not None:
            num_patches = len(image.patches_pe)
            patches_bpe[row, :num_patches] = image.patches_pe
            is_patch_bp[row, :num_patches] = True
            positions_bp2[row, :num_patches] = patch_positions(image.grid, config.merge_size)
            centers_n2 = np.floor(given.picture.centers_n2 * image.grid).astype(np.int32)
            is_center_p = (positions_bp2[row, :num_patches, None] == centers_n2).all(axis=-1).any(axis=-1)
            shapes_bp[row, :num_patches] = np.where(is_center_p, 1 + SHAPES.index(given.picture.shape), 0)
            places = np.flatnonzero(token_ids_bt[row] == config.image_token_id)
            rows_bt[row, places] = np.arange(len(places))
    return Batch(patches_bpe, is_patch_bp, positions_bp2, token_ids_bt, rows_bt, is_answer_bt, shapes_bp)


def encode(params: Params, batch: Batch, config: VisionConfig) -> tuple[jax.Array, jax.Array]:
    """Return the encoder's rows `[B, P / m^2, E]` and the last states of patches `[B, P, W]`.

    It is `tower.encode` for pictures of which each has its own attention.
    """
    num_rows, num_patches, _ = batch.patches_bpe.shape
    angles = tower._cos_sin(jnp.asarray(batch.positions_bp2.reshape(-1, 2)), config)
    mask_bhqk = batch.is_patch_bp[:, None, None, :]

    def norm(x: jax.Array, own: Params, eps: float) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + eps) * own["scale"]

    x = norm(batch.patches_bpe.reshape(-1, config.patch_dim) @ params["patch"]["kernel"], params["pre_norm"], 1e-5)
    for own in params["layers"]:
        qkv = norm(x, own["attention_norm"], config.norm_eps) @ own["qkv"]["kernel"].reshape(len(x[0]), -1)
        q, k, v = qkv.reshape(len(x), 3, config.num_heads, -1).swapaxes(0, 1)
        q, k = (rope.apply(part, *angles) for part in (q, k))
        q, k, v = (part.reshape(num_rows, num_patches, config.num_heads, -1) for part in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask_bhqk, scores, -1e30), axis=-1)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ own["out"]["kernel"]
        normed = norm(x, own["mlp_norm"], config.norm_eps)
        between = activate(normed @ own["gate"]["kernel"], config.activation) * (normed @ own["up"]["kernel"])
        x = x + between @ own["down"]["kernel"]
    states_pw = norm(x, params["merge_norm"], config.projector_eps)
    x = states_pw.reshape(len(x) // config.num_merged, -1)
    x = activate(x @ params["merger"]["kernel"] @ params["linear_1"]["kernel"], config.projector_activation)
    rows = (x @ params["linear_2"]["kernel"]).reshape(num_rows, num_patches // config.num_merged, -1)
    return rows, states_pw.reshape(num_rows, num_patches, -1)


def get_logits(model: Model, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the logits of tokens `[B, T, V]`, and those of the shapes with centers in patches `[B, P, 5]`."""
    assert model.config.vision is not None
    num_rows, row_len = batch.token_ids_bt.shape
    encoded, states_bpw = encode(params["vision"], batch, model.config.vision)
    given = jnp.take_along_axis(encoded, jnp.maximum(batch.rows_bt, 0)[:, :, None], axis=1)
    embeds = InputEmbeds(jnp.asarray((batch.rows_bt >= 0).reshape(-1)), given.reshape(-1, given.shape[-1]))
    positions_t = jnp.tile(jnp.arange(row_len, dtype=jnp.int32), num_rows)
    token_ids_t, lens_t = jnp.asarray(batch.token_ids_bt.reshape(-1)), jnp.full_like(positions_t, row_len)
    tokens = TokenBatch(token_ids_t, positions_t, lens_t, embeds=embeds)
    mask_bst = jnp.broadcast_to(jnp.triu(jnp.ones((row_len, row_len), bool)), (num_rows, row_len, row_len))
    hidden, _ = model.run(params["text"], tokens, functools.partial(attend, mask_bst), (), "loop")
    return model.logits(params["text"], hidden).reshape(num_rows, row_len, -1), states_bpw @ params["centers"]


def init_params(config: ModelConfig, seed: int) -> Params:
    """Return random float32 parameters of both parts, layers in lists."""
    assert config.vision is not None
    leaves, keys = vision_leaves(config.vision), jax.random.split(jax.random.key(seed), 512)
    used = iter(keys)

    def make(found: Params, leaf_list: list, /) -> Params:
        for leaf in leaf_list:
            is_scale = leaf.path[-1] == "scale"
            values = jax.random.normal(next(used), leaf.shape) * leaf.shape[0] ** -0.5
            insert(found, leaf.path, jnp.ones(leaf.shape) if is_scale else values)
        return found

    vision = make(Params(), leaves.outer)
    vision["layers"] = [make(Params(), layer) for layer in leaves.layers]
    text = Model(config, jnp.dtype(jnp.float32)).init_params(next(used), "loop")
    return {"vision": vision, "text": text, "centers": jnp.zeros((config.vision.hidden_size, 1 + len(SHAPES)))}


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """Return Muon for the kernels of layers, AdamW for the others."""

    def finish(scale: optax.GradientTransformation, highest: float) -> optax.GradientTransformation:
        rate = settings.schedule(highest)
        decay = optax.add_decayed_weights(settings.weight_decay, mask=lambda p: jax.tree.map(lambda a: a.ndim > 1, p))
        return optax.chain(scale, decay, optax.scale_by_learning_rate(rate))

    def kinds(params: optax.Params) -> optax.Params:
        def kind(path: jax.tree_util.KeyPath, leaf: jax.Array) -> str:
            return "kernel" if jax.tree_util.DictKey("layers") in path and leaf.ndim > 1 else "other"

        return jax.tree_util.tree_map_with_path(kind, params)

    scales = {
        "kernel": finish(scale_by_muon(), settings.kernel_rate),
        "other": finish(optax.scale_by_adam(b1=0.9, b2=0.98), settings.rate),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(scales, kinds))


def make_step(config: ModelConfig, settings: TrainSettings) -> Callable:
    """Return the jitted step, which also returns both losses and the share of dialogs without a wrong answer."""
    model, optimizer = Model(config, jnp.dtype(jnp.float32)), make_optimizer(settings)

    def mean_loss(params: Params, batch: Batch) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        logits_btv, logits_bps = get_logits(model, params, batch)
        logits_btv = logits_btv[:, :-1]
        targets_bt, weights_bt = batch.token_ids_bt[:, 1:], batch.is_answer_bt[:, 1:]
        losses_bt = optax.softmax_cross_entropy_with_integer_labels(logits_btv, targets_bt)
        is_right = ((logits_btv.argmax(axis=-1) == targets_bt) | ~weights_bt).all(axis=1).mean()
        loss = (losses_bt * weights_bt).sum() / weights_bt.sum()
        weights_bp = jnp.where(batch.shapes_bp > 0, 5.0, 1.0) * batch.is_patch_bp
        losses_bp = optax.softmax_cross_entropy_with_integer_labels(logits_bps, batch.shapes_bp)
        center_loss = (losses_bp * weights_bp).sum() / weights_bp.sum()
        return loss + settings.center_weight * center_loss, (loss, center_loss, is_right)

    def step(params: Params, state: optax.OptState, batch: Batch) -> tuple:
        (_, measured), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, *measured

    return jax.jit(step, donate_argnums=(0, 1))


def train(
    config: ModelConfig, settings: TrainSettings, tokenizer: Tokenizer, num_steps: int, every: int = 20
) -> Params:
    """Train, and return float32 parameters.

    Args:
        num_steps: how many of the run's steps to take.
        every: steps between two lines of progress.
    """
    assert config.vision is not None
    processor = make_processor(config, tokenizer)
    params = init_params(config, settings.seed)
    state, step_fn = make_optimizer(settings).init(params), make_step(config, settings)
    make = functools.partial(make_batch, tokenizer, processor, config.vision, settings.seed)
    start, losses = time.perf_counter(), []
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(make, 0, settings.num_rows)
        for step in range(num_steps):
            batch, following = following.result(), pool.submit(make, step + 1, settings.num_rows)
            params, state, *measured = step_fn(params, state, batch)
            losses.append(jax.device_get(measured))
            if (step + 1) % every == 0 or step + 1 == num_steps:
                (loss, center_loss, is_right), spent_s = np.mean(losses, axis=0), time.perf_counter() - start
                left_s = spent_s / (step + 1) * (num_steps - step - 1)
                line = (
                    f"step {step + 1}/{num_steps}  loss {loss:.4f}  centers {center_loss:.4f}  all right {is_right:.1%}"
                )
                print(f"{line}  {left_s / 60:.1f} min left", flush=True)
                losses = []
    return params


def make_processor(config: ModelConfig, tokenizer: Tokenizer) -> PatchProcessor:
    """Return the image processor of the captioner."""
    assert config.vision is not None
    return read_processor(config.vision, (PREPROCESSOR, PROCESSOR), tokenizer.get_vocab())


def package(folder: Path, params: Params, tokenizer: Tokenizer) -> None:
    """Write a checkpoint folder in Hugging Face layout, weights in bfloat16."""
    hf = make_hf_config(tokenizer)
    config = from_hf(hf)
    assert config.vision is not None
    text, vision = model_leaves(config, ("language_model.model.norm.weight",)), vision_leaves(config.vision)
    tensors: dict[str, np.ndarray] = {}
    for part, leaves in ((params["text"], text), (params["vision"], vision)):
        for tree, each in ((part, leaves.outer), *zip(part["layers"], leaves.layers, strict=True)):
            for leaf in each:
                array = functools.reduce(operator.getitem, leaf.path, tree)
                tensors |= leaf_tensors(leaf, array.astype(ml_dtypes.bfloat16))
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (
        (CONFIG_FILE, hf),
        ("preprocessor_config.json", PREPROCESSOR),
        ("processor_config.json", PROCESSOR),
    ):
        (folder / name).write_text(json_text.dumps(values, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / SINGLE_FILE).chmod(0o644)
    save_tokenizer(tokenizer, folder)


def main() -> None:
    """Train and package the captioner."""
    settings = TrainSettings()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.captioner.train", description="Train and package the demo captioner."
    )
    args = read_options(parser, settings.seed, settings.num_steps, CAPTIONER_FOLDER)
    tokenizer = train_tokenizer()
    config = from_hf(make_hf_config(tokenizer))
    params = train(config, replace(settings, seed=args.seed), tokenizer, args.steps, args.every)
    package(args.out, params, tokenizer)
    print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
