"""Vision encoders: patches of several images -> input embeddings of the language model, as pure functions.

Patches of all images are packed in one axis P, with an image number each; attention is inside an image, or a window of
it. Padding has the number -1.

Names of arrays: P patches, W the encoder's width, H heads, D head dimension, E the language model's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.models import rope
from jpaged.models.config import VisionConfig
from jpaged.models.layers import Params, accumulate, activate, dot
from jpaged.models.model import insert
from jpaged.models.vision.config import vision_leaves

MAX_SCORES = 1 << 26
"""Maximum number of attention scores at a time: 256 MiB in float32."""
MIN_QUERIES = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PackedPatches:
    """Patches of several images.

    Attributes:
        values_pe: `[P, numbers of a patch]`; P is a multiple of 64.
        images_p: int32, the image of each patch; -1 for padding.
        windows_p: int32, the window of each patch, unlike that of any other image; -1 for padding.
        positions_p2: int32, row and column of each patch in its image.
    """

    values_pe: Any
    images_p: Any
    windows_p: Any
    positions_p2: Any


def abstract_params(config: VisionConfig, dtype: np.dtype) -> Params:
    """Return shapes and types of an encoder's parameter tree; leaves of layers are stacked."""
    leaves, params = vision_leaves(config), Params()
    for leaf in leaves.outer:
        insert(params, leaf.path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype or dtype))
    for leaf in leaves.layers[0]:
        shape = (config.num_layers, *leaf.shape)
        insert(params, ("layers", *leaf.path), jax.ShapeDtypeStruct(shape, leaf.dtype or dtype))
    return params


def encode(params: Params, patches: PackedPatches, config: VisionConfig) -> jax.Array:
    """Return the input embeddings `[P / m^2, E]` of the output rows, in float32."""
    dtype = params["patch"]["kernel"].dtype
    x_pw = _linear(patches.values_pe.astype(dtype), params["patch"])
    if "positions" in params:
        edge = config.image_size // config.patch_size
        x_pw = x_pw + params["positions"][patches.positions_p2 @ np.array([edge, 1], np.int32)]
    if "pre_norm" in params:
        x_pw = _norm(x_pw, params["pre_norm"], config.norm_eps)
    angles = _cos_sin(patches.positions_p2, config) if config.rope_theta else None

    def run(x_pw: jax.Array, layer: tuple[Params, jax.Array]) -> tuple[jax.Array, None]:
        own, is_full = layer
        groups_p = jnp.where(is_full, patches.images_p, patches.windows_p) if config.window_size else patches.images_p
        return _layer(x_pw, own, groups_p, angles, config), None

    is_full_l = jnp.asarray(np.isin(np.arange(config.num_layers), config.full_layers))
    x_pw, _ = lax.scan(run, x_pw, (params["layers"], is_full_l))
    return _project(x_pw, params, config).astype(jnp.float32)


def _layer(
    x_pw: jax.Array,
    params: Params,
    groups_p: jax.Array,
    angles: tuple[jax.Array, jax.Array] | None,
    config: VisionConfig,
) -> jax.Array:
    normed_pw = _norm(x_pw, params["attention_norm"], config.norm_eps)
    qkv = _linear(normed_pw, params["qkv"]).reshape(len(x_pw), 3, config.num_heads, -1)
    q_phd, k_phd, v_phd = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    if angles is not None:
        q_phd, k_phd = rope.apply(q_phd, *angles), rope.apply(k_phd, *angles)
    x_pw = x_pw + _linear(_attend(q_phd, k_phd, v_phd, groups_p).reshape(x_pw.shape), params["out"])
    normed_pw = _norm(x_pw, params["mlp_norm"], config.norm_eps)
    if "gate" in params:
        between = activate(_linear(normed_pw, params["gate"]), config.activation) * _linear(normed_pw, params["up"])
    else:
        between = activate(_linear(normed_pw, params["up"]), config.activation)
    return x_pw + _linear(between, params["down"])


def _attend(q_phd: jax.Array, k_phd: jax.Array, v_phd: jax.Array, groups_p: jax.Array) -> jax.Array:
    """Return attention inside the groups of patches, for some queries at a time."""
    num_patches, num_heads, head_dim = q_phd.shape
    num_queries = num_patches
    while num_queries % 2 == 0 and num_queries > MIN_QUERIES and num_queries * num_patches * num_heads > MAX_SCORES:
        num_queries //= 2

    def attend(queries: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_bhd, groups_b = queries
        scores_hbp = accumulate(q_bhd, k_phd, ((2,), (2,)), ((1,), (1,))) * head_dim**-0.5
        scores_hbp = jnp.where(groups_b[:, None] == groups_p, scores_hbp, -jnp.inf)
        weights_hbp = jax.nn.softmax(scores_hbp, axis=-1).astype(v_phd.dtype)
        return accumulate(weights_hbp, v_phd, ((2,), (0,)), ((0,), (1,))).swapaxes(0, 1).astype(v_phd.dtype)

    if num_queries == num_patches:
        return attend((q_phd, groups_p))
    parts = q_phd.reshape(-1, num_queries, num_heads, head_dim), groups_p.reshape(-1, num_queries)
    return lax.map(attend, parts).reshape(q_phd.shape)


def _project(x_pw: jax.Array, params: Params, config: VisionConfig) -> jax.Array:
    """Return the output rows from the last layer's states."""
    if "pooled_norm" in params:
        x_pw = _norm(x_pw, params["post_norm"], config.norm_eps)
        x = x_pw.astype(jnp.float32).reshape(-1, config.num_merged, x_pw.shape[1]).mean(axis=1).astype(x_pw.dtype)
        return _linear(_norm(x, params["pooled_norm"], config.projector_eps), params["linear_1"])
    if "merge_norm" in params:
        x_pw = _norm(x_pw, params["merge_norm"], config.projector_eps)
    x = x_pw.reshape(len(x_pw) // config.num_merged, -1)
    if "merger" in params:
        x = _linear(x, params["merger"])
    x = activate(_linear(x, params["linear_1"]), config.projector_activation)
    return _linear(x, params["linear_2"])


def _linear(x: jax.Array, params: Params) -> jax.Array:
    y = dot(x, params["kernel"], 0)
    return (y + params["bias"].astype(jnp.float32) if "bias" in params else y).astype(x.dtype)


def _norm(x: jax.Array, params: Params, eps: float) -> jax.Array:
    """Normalize the last axis: by mean and variance if there is a bias, otherwise by the root mean square."""
    x32 = x.astype(jnp.float32)
    if "bias" in params:
        x32 = x32 - x32.mean(axis=-1, keepdims=True)
    x32 = x32 * lax.rsqrt(jnp.square(x32).mean(axis=-1, keepdims=True) + eps) * params["scale"].astype(jnp.float32)
    return (x32 + params["bias"].astype(jnp.float32) if "bias" in params else x32).astype(x.dtype)


def _cos_sin(positions_p2: jax.Array, config: VisionConfig) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines `[P, D/2]`: the first half of the pairs turns by the row, the second by the column."""
    head_dim = config.hidden_size // config.num_heads
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.power(config.rope_theta, exponents.astype(np.float64))).astype(np.float32)
    of_rows = frequencies[0::2]
    of_columns = frequencies[1::2] if config.kind == "pixtral" else of_rows
    positions = positions_p2.astype(jnp.float32)
    angles_pd = jnp.concatenate([positions[:, :1] * of_rows, positions[:, 1:] * of_columns], axis=1)
    return jnp.cos(angles_pd), jnp.sin(angles_pd)
