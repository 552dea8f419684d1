"""Scales of keys and values stored in 8 bits: one per layer, head, and key or value.

    pool holds round(k / scale)        scale = margin * largest |k| of the head on a probe / largest stored number

The probe is a fixed row of tokens sampled uniformly from the vocabulary, with full attention: the range of a head's
keys depends far more on its weights than on the text. Larger numbers saturate. Integers hold rotated keys and values
(`rotate_heads`), whose range depends less on the text. The relative error of floats does not depend on the scale, so
theirs leaves more room. A checkpoint may have scales for floats, one for the keys and one for the values of a layer.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jpaged.device.mesh import STAGE_AXIS, num_stages, on_stages, scales_spec
from jpaged.device.step import Step
from jpaged.kernels.kv_layout import MAX_NUMBER, output_dim
from jpaged.kernels.paged_attention import rotate_heads
from jpaged.models.layer_kinds import HeadSizes
from jpaged.models.layers import Attend, Params
from jpaged.models.stack import LayerPlace
from jpaged.models.tokens import TokenBatch

MARGINS = {"int8": 1.0, "float8_e4m3fn": 4.0}
PROBE_LEN = 512

_FP8 = "float8_e4m3fn"


def kv_dtype(name: str, model_dtype: np.dtype) -> np.dtype:
    """Return the element type that the option `kv_cache_dtype` names."""
    return model_dtype if name == "auto" else jnp.dtype(_FP8 if name == "fp8" else name)


def name_of_kv_dtype(dtype: np.dtype) -> str:
    """Return the option value of an element type; the inverse of `kv_dtype`."""
    return "fp8" if dtype.name == _FP8 else dtype.name


def measure_scales(step: Step, params: Params) -> jax.Array:
    """Run the probe and return float32 scales `[G * L, K, 2]` of keys and values, on the devices of their heads.

    If the layers are split into stages, the scales are stage by stage, and on the devices of their stage.
    """
    probe_len = min(PROBE_LEN, step.model.config.max_model_len)
    token_ids = np.random.default_rng(0).integers(0, step.vocab_size, probe_len, dtype=np.int32)
    sharding = NamedSharding(step.mesh, scales_spec(step.layout))
    largest = _largest if num_stages(step.mesh) == 1 else _largest_of_stages
    largest_lk2 = jax.jit(functools.partial(largest, step), out_shardings=sharding)(params, token_ids)
    name = step.layout.dtype.name
    return jnp.maximum(largest_lk2, 1e-6) * (MARGINS[name] / MAX_NUMBER[name])


def add_scales(step: Step, params: Params, scales_l2: np.ndarray | None) -> Params:
    """Return the parameters with scales: measured ones, or those of `place_scales`."""
    placed = measure_scales(step, params) if scales_l2 is None else place_scales(step, scales_l2, params)
    return {**params, "kv_scales": placed}


def merge_scales(old_l2: np.ndarray | None, new_l2: np.ndarray | None) -> np.ndarray | None:
    """Return a checkpoint's scales of keys and values after an update that has those of some layers, or None."""
    if old_l2 is None or new_l2 is None:
        return old_l2 if new_l2 is None else new_l2
    return np.where(np.isnan(new_l2), old_l2, new_l2)


def place_scales(step: Step, scales_l2: np.ndarray, params: Params) -> jax.Array:
    """Return scales as `measure_scales`, from those of keys and values in each layer, which all heads share.

    Layers without them, whose scales are NaN, have measured ones.
    """
    layout, places = step.layout, step.kv_groups.places
    num_layers = layout.num_layers // layout.num_stages
    found = np.ones((layout.num_stages, len(step.kv_groups.windows), num_layers, layout.num_kv_heads, 2), np.float32)
    for layer, kind in enumerate(step.model.config.layer_kinds):
        if kind.states or kind.kv_source is not None:
            continue
        stage, place = divmod(layer, len(places))
        group, index = places[place]
        found[stage, group : group + kind.num_places, index] = scales_l2[layer]
    if layout.value_dim is not None:
        found[..., 1] = found[..., 0]  # a latent has one scale for all its uses
    given = jax.device_put(found.reshape(-1, *found.shape[-2:]), NamedSharding(step.mesh, scales_spec(layout)))
    return jnp.where(jnp.isnan(given), measure_scales(step, params), given) if np.isnan(found).any() else given


def _largest(step: Step, params: Params, token_ids_t: jax.Array) -> jax.Array:
    """Return the largest magnitudes `[G * L, K, 2]` of keys and values while the model reads the tokens."""
    attend, tokens, none_lk2 = _probe(step, token_ids_t)
    return step.model.run(params, tokens, attend, none_lk2, step.layer_mode, step.kv_groups.places)[1]


def _largest_of_stages(step: Step, params: Params, token_ids_t: jax.Array) -> jax.Array:
    """Return the largest magnitudes stage by stage: the stages run one after another, each on its own devices."""
    num, model = num_stages(step.mesh), step.model

    def run(params: Params, token_ids_t: jax.Array) -> jax.Array:
        stage = jax.lax.axis_index(STAGE_AXIS)
        attend, tokens, none_lk2 = _probe(step, token_ids_t)

        def turn(index: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            received, largest_lk2 = state
            x, found_lk2, _ = model.run_stage(
                params, tokens, attend, none_lk2, step.kv_groups.places, (stage == 0, received)
            )
            sent = jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE_AXIS, [(i, i + 1) for i in range(num - 1)]), x)
            return sent, jnp.where(stage == index, found_lk2, largest_lk2)

        begun = jax.eval_shape(model.begin, params, tokens)
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), begun), none_lk2
        largest_lk2: jax.Array = jax.lax.fori_loop(0, num, turn, state)[1]
        return largest_lk2

    whole, of_stage = PartitionSpec(), PartitionSpec(STAGE_AXIS)
    of_params = {name: of_stage if name == "layers" else whole for name in params}
    largest_lk2: jax.Array = on_stages(run, step.mesh, (of_params, whole), of_stage)(params, token_ids_t)
    return largest_lk2


def _probe(step: Step, token_ids_t: jax.Array) -> tuple[Attend, TokenBatch, jax.Array]:
    """Return attention that finds the largest magnitudes of a stage's layers, its tokens, and its first carry."""
    num_tokens, layout = token_ids_t.shape[0], step.layout
    num_layers = layout.num_layers // layout.num_stages
    is_seen_qk = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))

    def attend(
        q_thd: jax.Array,
        k_tkd: jax.Array,
        v_tkd: jax.Array | None,
        carry: Any,
        place: LayerPlace,
        sinks_h: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        v_tkd = k_tkd[..., : output_dim(layout)] if v_tkd is None else v_tkd
        heads = place.kind.heads or HeadSizes(layout.num_kv_heads, layout.head_dim)
        q_tkgd = q_thd.reshape(num_tokens, heads.num_kv_heads, -1, heads.head_dim)
        s_kgqt = jnp.einsum("qkgd,tkd->kgqt", q_tkgd, k_tkd, preferred_element_type=jnp.float32) * place.attention.scale
        p_kgqt = jax.nn.softmax(jnp.where(is_seen_qk, s_kgqt, -jnp.inf)).astype(v_tkd.dtype)
        o_thd = jnp.einsum("kgqt,tkd->qkgd", p_kgqt, v_tkd).reshape(*q_thd.shape[:2], -1)
        # A latent is stored once, with one scale for all its uses.
        stored = [k_tkd, v_tkd if layout.value_dim is None else k_tkd]
        if layout.is_rotated:
            pads = ((0, 0), (0, 0), (0, layout.head_dim - heads.head_dim))
            stored = [rotate_heads(jnp.pad(x, pads), jnp.float32, backend="xla") for x in stored]
        found_k2 = jnp.stack([jnp.abs(x.astype(jnp.float32)).max(axis=(0, 2)) for x in stored], axis=-1)
        if place.kind.heads is None:
            return o_thd, carry.at[place.group * num_layers + place.index].set(found_k2)
        found_kn2 = found_k2.reshape(layout.num_kv_heads, heads.num_places, 2)
        for number in range(heads.num_places):
            carry = carry.at[(place.group + number) * num_layers + place.index].set(found_kn2[:, number])
        return o_thd, carry

    positions_t = jnp.arange(num_tokens, dtype=jnp.int32)
    none_lk2 = jnp.zeros((len(step.kv_groups.windows) * num_layers, layout.num_kv_heads, 2))
    return attend, TokenBatch(token_ids_t, positions_t, jnp.full_like(positions_t, num_tokens)), none_lk2
