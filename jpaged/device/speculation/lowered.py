"""How the programs of a draft model are lowered."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jpaged.device.mesh import POOL_SPEC, first_device, replicated
from jpaged.device.programs.compile import ProgramSpec, compiler_options
from jpaged.device.speculation.keys import packed_keys
from jpaged.device.speculation.packing import SpeculatePacking
from jpaged.device.speculation.rounds import packed_speculate
from jpaged.device.step.forward import Step, forward_packing
from jpaged.device.transfers import lower_move
from jpaged.engine.executor import Geometry
from jpaged.errors import InternalError
from jpaged.models.layers import Params
from jpaged.models.quantisation.tree import dense_formats


def lower_speculation(
    spec: ProgramSpec, step: Step, geometry: Geometry, params: tuple[Params, Params]
) -> jax.stages.Lowered:
    """Traces and lowers one of them.

    Args:
        params: the model's and the draft's, or shapes of them.
    """
    draft = step.draft
    if draft is None:
        raise InternalError(f"{spec} without a draft model")
    if spec.kind == "draft_copy":
        return lower_move(spec, draft.step.layout, step.mesh)
    device, whole, of_pool = first_device(step.mesh), replicated(step.mesh), NamedSharding(step.mesh, POOL_SPEC)

    def shape(dims: tuple[int, ...], dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=whole)

    def pool(step: Step) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(step.layout.shape, step.layout.storage_dtype, sharding=of_pool)

    last_tokens, draft_config = shape((step.num_places,)), draft.step.model.config
    if spec.kind == "draft":
        forward = forward_packing(spec.size, geometry)
        options = compiler_options(device, dense_formats(draft_config, "layers"))
        keys = functools.partial(packed_keys, draft, packing=forward)
        jitted = jax.jit(keys, donate_argnums=1, out_shardings=of_pool, compiler_options=options)
        return jitted.lower(params[1], pool(draft.step), shape((forward.size,)))
    rounds = SpeculatePacking.of(spec.size, geometry)
    formats = (*dense_formats(step.model.config), *dense_formats(draft_config))
    speculate = functools.partial(packed_speculate, step, packing=rounds)
    results = (of_pool, of_pool), whole, whole
    options = compiler_options(device, formats)
    jitted = jax.jit(speculate, donate_argnums=2, out_shardings=results, compiler_options=options)
    return jitted.lower(*params, (pool(step), pool(draft.step)), last_tokens, shape((rounds.size,)))
