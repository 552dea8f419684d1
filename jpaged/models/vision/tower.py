"""Vision encoders: patches of several images -> input embeddings of the language model, as pure functions.

Patches of all images are packed in one axis P, with an image number each; attention is inside an image, or a window of
it. Padding has the number -1, and follows all images. The patches of a window are adjacent.

    attention           of images                       of windows
    XLA                 some queries at a time          each 64 queries see their 64 patches, those before and after
    kernel of CPUs      a row of a batch for each image or window, whose keys are their part of a pool

The kernels of CPUs run if the matrices are packed for them (`pack_params`).

Names of arrays: P patches, W the encoder's width, H heads, D head dimension, E the language model's width, S images or
windows, N blocks of 64 patches, B patches of a block.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.kernels import matmul
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.kernels.kv_layout import KVLayout
from jpaged.kernels.matmul import PackedMatrix, Packer
from jpaged.kernels.paged_attention import cpu as cpu_attention
from jpaged.kernels.paged_attention.spec import AttentionCall, AttentionSpec, RaggedRows
from jpaged.models import rope
from jpaged.models.config import VisionConfig
from jpaged.models.layers import Params, accumulate, activate, dot
from jpaged.models.model import insert
from jpaged.models.vision.config import vision_leaves

MAX_SCORES = 1 << 26
"""Maximum number of attention scores at a time: 256 MiB in float32."""
MIN_QUERIES = 64
MAX_SHARED = 1024
"""Maximum number of patches of several images in one call: attention may compute the scores of all pairs of patches."""
_PAIR = 32
"""Numbers of a head that a kernel of CPUs multiplies together in bfloat16."""
_GATES = ("silu", "gelu_tanh")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PackedPatches:
    """Patches of several images.

    Attributes:
        values_pe: `[P, numbers of a patch]`; P is a multiple of 64.
        images_p: int32, the image of each patch; -1 for padding.
        windows_p: int32, the window of each patch, unlike that of any other image; -1 for padding.
        positions_p2: int32, row and column of each patch in its image.
        places_p2: row and column among learned positions, which are interpolated; zeros if they are not.
    """

    values_pe: Any
    images_p: Any
    windows_p: Any
    positions_p2: Any
    places_p2: Any


def abstract_params(config: VisionConfig, dtype: np.dtype) -> Params:
    """Return shapes and types of an encoder's parameter tree; leaves of layers are stacked."""
    leaves, params = vision_leaves(config), Params()
    for leaf in leaves.outer:
        insert(params, leaf.path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype or dtype))
    for leaf in leaves.layers[0]:
        shape = (config.num_layers, *leaf.shape)
        insert(params, ("layers", *leaf.path), jax.ShapeDtypeStruct(shape, leaf.dtype or dtype))
    return params


def pack_params(params: Params, packer: Packer, config: VisionConfig) -> Params:
    """Return an encoder's parameters, or their shapes, with matrices that only the kernels of CPUs read.

    Layers become a list, because a scan would copy the matrices of each layer.
    """

    def pack_linears(linears: Params) -> Params:
        return {
            name: {**linear, "kernel": packer.pack(linear["kernel"], num_parts=2 if name == "gated" else 1)}
            if isinstance(linear, dict) and "kernel" in linear
            else linear
            for name, linear in linears.items()
        }

    outer = {name: leaf for name, leaf in params.items() if name != "layers"}
    layers = []
    for index in range(config.num_layers):
        layer = {name: {key: _take(leaf, index) for key, leaf in of.items()} for name, of in params["layers"].items()}
        if "gate" in layer and config.activation in _GATES:
            gate, up = layer.pop("gate"), layer.pop("up")
            layer["gated"] = {key: _stack(gate[key], up[key]) for key in gate}
        layers.append(pack_linears(layer))
    return {**pack_linears(outer), "layers": layers}


def _take(leaf: Any, index: int) -> Any:
    """Return a layer's part of a stacked leaf, or its shape."""
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf[index]


def _stack(gate: Any, up: Any) -> Any:
    """Return gates and ups, or their shapes, with both as the axis before the last."""
    if isinstance(gate, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*gate.shape[:-1], 2, gate.shape[-1]), gate.dtype)
    return jnp.stack([gate, up], axis=-2)


def encode(params: Params, patches: PackedPatches, config: VisionConfig) -> jax.Array:
    """Return the output rows `[P / m^2, row_width]`, in float32: input embeddings, and what later layers add."""
    kernel = params["patch"]["kernel"]
    num_patches = jnp.sum(patches.images_p >= 0)
    x_pw = _linear(patches.values_pe.astype(kernel.dtype), params["patch"], num_patches)
    if config.num_places:
        x_pw = x_pw + _interpolate(params["positions"], patches.places_p2, config.num_places).astype(x_pw.dtype)
    elif "positions" in params:
        edge = config.image_size // config.patch_size
        x_pw = x_pw + params["positions"][patches.positions_p2 @ np.array([edge, 1], np.int32)]
    if "pre_norm" in params:
        x_pw = _norm(x_pw, params["pre_norm"], config.norm_eps)
    angles = _cos_sin(patches.positions_p2, config) if config.rope_theta else None
    attend = _get_attend(patches, config, has_kernel=isinstance(kernel, PackedMatrix))

    def run(x_pw: jax.Array, own: Params, is_full: Any) -> jax.Array:
        return _layer(x_pw, own, functools.partial(attend, is_full), angles, num_patches, config)

    is_full_l = np.isin(np.arange(config.num_layers), config.full_layers)
    if isinstance(params["layers"], list):
        deep = []
        for index, own in enumerate(params["layers"]):
            x_pw = run(x_pw, own, bool(is_full_l[index]))
            deep += [x_pw] if index in config.deep_layers else []
    else:
        is_deep_ln = np.arange(config.num_layers)[:, None] == np.array(config.deep_layers, int)

        def step(carry: tuple[jax.Array, Any], layer: tuple[Params, Any, Any]) -> tuple[tuple[jax.Array, Any], None]:
            (x_pw, deep), (own, is_full, is_deep_n) = carry, layer
            x_pw = run(x_pw, own, is_full)
            return (x_pw, [jnp.where(is_deep_n[i], x_pw, old) for i, old in enumerate(deep)]), None

        carry = x_pw, [x_pw] * len(config.deep_layers)
        (x_pw, deep), _ = lax.scan(step, carry, (params["layers"], jnp.asarray(is_full_l), jnp.asarray(is_deep_ln)))
    rows = [_project(x_pw, params, num_patches, config)]
    rows += [_project_deep(x_pw, index, params, num_patches, config) for index, x_pw in enumerate(deep)]
    return jnp.concatenate(rows, axis=1).astype(jnp.float32)


def _interpolate(positions_nw: jax.Array, places_p2: jax.Array, side: int) -> jax.Array:
    """Return the learned positions at some places, each between four of them, in float32."""
    floors_p2 = jnp.floor(places_p2).astype(jnp.int32)
    offsets_p2 = places_p2 - floors_p2
    total: Any = 0.0
    for row, column in itertools.product(range(2), repeat=2):
        near_p2 = jnp.minimum(floors_p2 + np.array([row, column], np.int32), side - 1)
        weights_p2 = jnp.where(np.array([row, column], bool), offsets_p2, 1 - offsets_p2)
        near_pw = positions_nw[near_p2[:, 0] * side + near_p2[:, 1]].astype(jnp.float32)
        total = total + near_pw * (weights_p2[:, :1] * weights_p2[:, 1:])
    interpolated: jax.Array = total
    return interpolated


def _layer(
    x_pw: jax.Array,
    params: Params,
    attend: _Attend,
    angles: tuple[jax.Array, jax.Array] | None,
    num_patches: jax.Array,
    config: VisionConfig,
) -> jax.Array:
    linear = functools.partial(_linear, num_rows=num_patches)
    before = (params["attention_norm"], config.norm_eps)
    qkv = linear(x_pw, params["qkv"], norm=before).reshape(len(x_pw), 3, config.num_heads, -1)
    q_phd, k_phd, v_phd = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    if angles is not None:
        q_phd, k_phd = rope.apply(q_phd, *angles), rope.apply(k_phd, *angles)
    x_pw = linear(attend(q_phd, k_phd, v_phd).reshape(x_pw.shape), params["out"], residual=x_pw)
    before = (params["mlp_norm"], config.norm_eps)
    if "gated" in params:
        between = linear(x_pw, params["gated"], norm=before, activation=config.activation)
    elif "gate" in params:
        gate, up = (linear(x_pw, params[name], norm=before) for name in ("gate", "up"))
        between = activate(gate, config.activation) * up
    else:
        between = activate(linear(x_pw, params["up"], norm=before), config.activation)
    return linear(between, params["down"], residual=x_pw)


_Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _get_attend(patches: PackedPatches, config: VisionConfig, *, has_kernel: bool) -> Callable[..., jax.Array]:
    """Return attention of a layer: whether it is inside images, then queries, keys and values `[P, H, D]`."""
    edge, of_rows = config.window_edge, functools.partial(_attend_rows, block=config.num_merged)
    if has_kernel:
        max_images = len(patches.images_p) // config.num_merged if len(patches.images_p) <= MAX_SHARED else 1
        rows = _get_rows(patches.images_p, max_images, len(patches.images_p), config)
        full: _Attend = functools.partial(of_rows, rows=rows)
    else:
        full = functools.partial(_attend, groups_p=patches.images_p)
    if not edge:
        return lambda is_full, *qkv: full(*qkv)
    if has_kernel:
        rows = _get_rows(patches.windows_p, len(patches.windows_p) // config.num_merged, edge**2, config)
        inside: _Attend = functools.partial(of_rows, rows=rows)
    else:
        inside = functools.partial(_attend_windows, windows_p=patches.windows_p, length=edge**2)

    def attend(is_full: Any, *qkv: jax.Array) -> jax.Array:
        if isinstance(is_full, bool):
            return full(*qkv) if is_full else inside(*qkv)
        found: jax.Array = lax.cond(is_full, full, inside, *qkv)
        return found

    return attend


def _attend(q_phd: jax.Array, k_phd: jax.Array, v_phd: jax.Array, groups_p: jax.Array) -> jax.Array:
    """Return attention inside the groups of patches, for some queries at a time."""
    num_patches, num_heads, _ = q_phd.shape
    num_queries = num_patches
    while num_queries % 2 == 0 and num_queries > MIN_QUERIES and num_queries * num_patches * num_heads > MAX_SCORES:
        num_queries //= 2

    def attend(queries: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_bhd, groups_b = queries
        return _attend_to(q_bhd[None], k_phd[None], v_phd[None], groups_b[None], groups_p[None])[0]

    if num_queries == num_patches:
        return attend((q_phd, groups_p))
    parts = q_phd.reshape(-1, num_queries, *q_phd.shape[1:]), groups_p.reshape(-1, num_queries)
    return lax.map(attend, parts).reshape(q_phd.shape)


def _attend_windows(
    q_phd: jax.Array, k_phd: jax.Array, v_phd: jax.Array, windows_p: jax.Array, length: int
) -> jax.Array:
    """Return attention inside windows of up to `length` adjacent patches.

    A window is in a block and the next one at most, if a block is as long as a window:

        blocks      | 0 0 0 0 0 0 1 1 | 1 1 1 1 2 2 2 2 | 2 2 3 3 - - - - |
    """
    num_patches, num_heads, _ = q_phd.shape
    block = MIN_QUERIES
    while block < length:
        block *= 2
    if num_patches % block or num_patches <= 3 * block:
        return _attend(q_phd, k_phd, v_phd, windows_p)

    def near(x: jax.Array, fill: int) -> jax.Array:
        blocks = x.reshape(-1, block, *x.shape[1:])
        padded = jnp.pad(blocks, ((1, 1), *((0, 0),) * (blocks.ndim - 1)), constant_values=fill)
        return jnp.concatenate([padded[:-2], blocks, padded[2:]], axis=1)

    def attend(arrays: tuple[jax.Array, ...]) -> jax.Array:
        return _attend_to(*arrays)

    own = (x.reshape(-1, block, *x.shape[1:]) for x in (q_phd, windows_p))
    q_nbhd, windows_nb = own
    arrays = (q_nbhd, near(k_phd, 0), near(v_phd, 0), windows_nb, near(windows_p, -2))
    num_calls, num_blocks = 1, len(q_nbhd)
    while num_blocks % (2 * num_calls) == 0 and num_blocks // num_calls * 3 * block**2 * num_heads > MAX_SCORES:
        num_calls *= 2
    if num_calls == 1:
        return attend(arrays).reshape(q_phd.shape)
    parts = tuple(x.reshape(num_calls, -1, *x.shape[1:]) for x in arrays)
    return lax.map(attend, parts).reshape(q_phd.shape)


def _attend_to(
    q_nbhd: jax.Array, k_nphd: jax.Array, v_nphd: jax.Array, groups_nb: jax.Array, groups_np: jax.Array
) -> jax.Array:
    """Return attention of each block of queries to its patches of the same groups."""
    scores_nhbp = accumulate(q_nbhd, k_nphd, ((3,), (3,)), ((0, 2), (0, 2))) * q_nbhd.shape[-1] ** -0.5
    is_seen_nbp = groups_nb[:, :, None] == groups_np[:, None]
    scores_nhbp = jnp.where(is_seen_nbp[:, None], scores_nhbp, -jnp.inf)
    weights_nhbp = jax.nn.softmax(scores_nhbp, axis=-1).astype(v_nphd.dtype)
    out_nhbd = accumulate(weights_nhbp, v_nphd, ((3,), (1,)), ((0, 1), (0, 2)))
    return out_nhbd.swapaxes(1, 2).astype(v_nphd.dtype)


def _get_rows(groups_p: jax.Array, max_groups: int, max_length: int, config: VisionConfig) -> RaggedRows:
    """Return groups of adjacent patches as rows, whose context is their part of a pool; blocks are output rows."""
    block = config.num_merged
    is_first_p = (groups_p >= 0) & (groups_p != jnp.concatenate([jnp.full(1, -1, groups_p.dtype), groups_p[:-1]]))
    (starts_s1,) = jnp.nonzero(is_first_p, size=max_groups + 1, fill_value=jnp.sum(groups_p >= 0))
    starts_s1 = starts_s1.astype(jnp.int32)
    lens_s = starts_s1[1:] - starts_s1[:-1]
    width = min(-(-max_length // block), len(groups_p) // block)
    tables_sm = jnp.minimum(starts_s1[:-1, None] // block + jnp.arange(width), len(groups_p) // block - 1)
    return RaggedRows(starts_s1, lens_s, tables_sm, jnp.sum(is_first_p), first_positions_s=lens_s)


def _attend_rows(q_phd: jax.Array, k_phd: jax.Array, v_phd: jax.Array, rows: RaggedRows, block: int) -> jax.Array:
    """Return attention of the kernel of CPUs, with blocks of this many patches."""
    num_patches, num_heads, head_dim = q_phd.shape
    scale, dtype = head_dim**-0.5, q_phd.dtype
    found = cpu_attention.kernel()
    has_pairs = not isinstance(found, str) and found.vectors == "avx512bf16" and dtype == jnp.bfloat16
    padding = -head_dim % _PAIR if has_pairs else 0
    q_phd, k_phd, v_phd = (jnp.pad(x, ((0, 0), (0, 0), (0, padding))) for x in (q_phd, k_phd, v_phd))
    layout = KVLayout(1, num_patches // block - 1, block, num_heads, head_dim + padding, np.dtype(dtype))
    pool = jnp.stack([k_phd, v_phd], axis=2).reshape(layout.shape)
    pool = lax.bitcast_convert_type(pool, layout.storage_dtype) if pool.dtype != layout.storage_dtype else pool
    spec = AttentionSpec(layout, AttentionKind(scale, is_causal=False))
    out_phd, _ = cpu_attention.attend(AttentionCall(q_phd, pool, 0, rows, spec))
    return out_phd[..., :head_dim]


def _project(x_pw: jax.Array, params: Params, num_patches: jax.Array, config: VisionConfig) -> jax.Array:
    """Return the output rows from the last layer's states."""
    linear = functools.partial(_linear, num_rows=num_patches // config.num_merged)
    if "pooled_norm" in params:
        x_pw = _norm(x_pw, params["post_norm"], config.norm_eps)
        x = x_pw.astype(jnp.float32).reshape(-1, config.num_merged, x_pw.shape[1]).mean(axis=1).astype(x_pw.dtype)
        return linear(_norm(x, params["pooled_norm"], config.projector_eps), params["linear_1"])
    if "merge_norm" in params:
        x_pw = _norm(x_pw, params["merge_norm"], config.projector_eps)
    x = x_pw.reshape(len(x_pw) // config.num_merged, -1)
    if "merger" in params:
        x = linear(x, params["merger"])
    x = activate(linear(x, params["linear_1"]), config.projector_activation)
    return linear(x, params["linear_2"])


def _project_deep(
    x_pw: jax.Array, index: int, params: Params, num_patches: jax.Array, config: VisionConfig
) -> jax.Array:
    """Return what a layer of the language model adds, from an earlier layer's states."""
    linear = functools.partial(_linear, num_rows=num_patches // config.num_merged)
    merged = x_pw.reshape(len(x_pw) // config.num_merged, -1)
    merged = _norm(merged, params[f"deep_{index}_norm"], config.projector_eps)
    between = activate(linear(merged, params[f"deep_{index}_1"]), config.projector_activation)
    return linear(between, params[f"deep_{index}_2"])


def _linear(
    x: jax.Array,
    params: Params,
    num_rows: jax.Array,
    *,
    norm: tuple[Params, float] | None = None,
    residual: jax.Array | None = None,
    activation: str = "silu",
) -> jax.Array:
    """Return `norm(x) kernel + bias + residual`; kernels of CPUs compute the rows in use, and gate two parts."""
    kernel, bias = params["kernel"], params.get("bias")
    if isinstance(kernel, PackedMatrix):
        run = dataclasses.replace(matmul.loaded(), gate="gelu_tanh" if activation == "gelu_tanh" else "silu")
        before = None
        if norm is not None:
            weights, eps = norm
            before = matmul.Norm("layer" if "bias" in weights else "rms", eps, weights["scale"], weights.get("bias"))
        return run.multiply(x, kernel, num_rows, norm=before, bias=bias, residual=residual)
    x = x if norm is None else _norm(x, *norm)
    y = dot(x, kernel, 0)
    y = (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
    return y if residual is None else residual + y


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
