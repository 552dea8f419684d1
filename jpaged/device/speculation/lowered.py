"""Lowering of the programs of a draft model or a head."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jpaged.device.mesh import POOL_SPEC, first_device, replicated
from jpaged.device.programs.compile import ProgramSpec, compiler_options
from jpaged.device.speculation.by_head import HeadPool
from jpaged.device.speculation.draft import abstract_states
from jpaged.device.speculation.following import packed_follow
from jpaged.device.speculation.keys import packed_keys
from jpaged.device.speculation.packing import SpeculatePacking
from jpaged.device.speculation.rounds import packed_speculate
from jpaged.device.step.forward import Draft, Step, forward_packing
from jpaged.device.transfers import lower_move
from jpaged.engine.executor import Geometry
from jpaged.errors import InternalError
from jpaged.models.layers import Params
from jpaged.models.quantisation.tree import dense_formats


def lower_speculation(
    spec: ProgramSpec, step: Step, geometry: Geometry, params: tuple[Params, Params]
) -> jax.stages.Lowered:
    """Trace and lower a program.

    Args:
        params: the model's and the draft's, or shapes of them.
    """
    draft = step.draft
    if draft is None:
        raise InternalError(f"{spec} requires a draft model")
    if spec.kind == "draft_copy" and not draft.is_head:
        return lower_move(spec, draft.step.layout, step.mesh)
    device, whole, of_pool = first_device(step.mesh), replicated(step.mesh), NamedSharding(step.mesh, POOL_SPEC)

    def shape(dims: tuple[int, ...], dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=whole)

    def pool_of(step: Step) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(step.layout.shape, step.layout.storage_dtype, sharding=of_pool)

    last_tokens, config = shape((step.num_places,)), draft.step.model.config
    pool: Any = pool_of(draft.step)
    if draft.is_head:
        pool = pool, abstract_states(draft)
    placed = jax.tree.map(lambda struct: struct.sharding, pool)
    if spec.kind == "draft_copy":
        copy = jax.jit(functools.partial(copy_blocks, draft), donate_argnums=0, out_shardings=placed)
        return copy.lower(pool, shape((2, spec.size)))
    if spec.kind == "draft":
        packing = forward_packing(spec.size, geometry)
        options, words = compiler_options(device, dense_formats(config, "layers")), shape((packing.size,))
        run = functools.partial(packed_follow if draft.is_head else packed_keys, draft, packing=packing)
        jitted = jax.jit(run, donate_argnums=1, out_shardings=placed, compiler_options=options)
        if not draft.is_head:
            return jitted.lower(params[1], pool, words)
        features = shape((spec.size, len(draft.watched) * step.model.config.hidden_size), step.model.dtype)
        return jitted.lower(params[1], pool, last_tokens, words, features)
    rounds = SpeculatePacking.of(spec.size, geometry)
    options = compiler_options(device, (*dense_formats(step.model.config), *dense_formats(config)))
    speculate = functools.partial(packed_speculate, step, packing=rounds)
    results = (of_pool, placed), whole, whole
    jitted = jax.jit(speculate, donate_argnums=2, out_shardings=results, compiler_options=options)
    return jitted.lower(*params, (pool_of(step), pool), last_tokens, shape((rounds.size,)))


def copy_blocks(draft: Draft, pool: HeadPool, ids_2c: jax.Array) -> HeadPool:
    """Copy blocks of a head's pool, and the states that belong to them."""
    (keys, states_ne), (sources, destinations), layout = pool, ids_2c, draft.step.layout
    copied_ne = states_ne.at[destinations].set(states_ne[sources])
    return layout.write_blocks(keys, destinations, layout.read_blocks(keys, sources)), copied_ne
