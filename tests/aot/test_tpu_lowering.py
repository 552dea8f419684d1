"""The programs of a Llama-3-8B step lower for TPUs, kernels included, with the plain wheels and without libtpu.

Mosaic and XLA have not compiled them then: `test_tpu_models.py` has libtpu do it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

# How an abstract mesh says which device it is of has no public name yet.
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

from jpaged.config import EngineConfig
from jpaged.device.executor import abstract_serving
from jpaged.device.mesh import build_mesh
from jpaged.device.step import backbone_packing, draw_packing
from jpaged.device.topology import GENERATIONS
from jpaged.models.known import known_config
from jpaged.models.model import model_for

OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_blocks": 64, "block_size": 32, "max_model_len": 512}


@functools.cache
def lowered(kind: str, program: str) -> str:
    model = model_for(known_config("llama-3-8b"), jnp.dtype("bfloat16"))
    options = EngineConfig.load({**OPTIONS, "attention_backend": "xla"})
    step, geometry, params = abstract_serving(model, options, build_mesh(jax.devices()[:1]))
    layout = dataclasses.replace(step.attention.layout, form="tpu")
    attention = dataclasses.replace(step.attention, layout=layout)
    step = dataclasses.replace(step, attention=attention, backend="pallas-tpu", layer_mode="scan")
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), step.model.abstract_params(step.layer_mode)
    )
    hidden = jax.ShapeDtypeStruct((step.num_places, model.config.hidden_size), model.dtype)
    last_tokens = jax.ShapeDtypeStruct((step.num_places,), np.int32)
    pool = jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype)

    def buffer(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), np.int32)

    head = {name: tree for name, tree in params.items() if name != "layers"}
    of_backbone, of_draw = backbone_packing(16, geometry), draw_packing(8)
    backbone = jax.jit(functools.partial(step.packed_backbone, packing=of_backbone), donate_argnums=1)
    draw = jax.jit(functools.partial(step.packed_draw, packing=of_draw, want_top=False))
    mesh = AbstractMesh((1,), ("model",), abstract_device=AbstractDevice(kind, 1, "tpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        if program == "backbone":
            exported = export.export(backbone, platforms=["tpu"])(params, pool, last_tokens, buffer(of_backbone.size))
        else:
            exported = export.export(draw, platforms=["tpu"])(head, hidden, buffer(of_draw.size))
    return exported.mlir_module()


@pytest.mark.parametrize("name", GENERATIONS)
def test_the_backbone_lowers_with_its_attention_kernel(name: str) -> None:
    text = lowered(GENERATIONS[name].device_kind, "backbone")
    assert "@tpu_custom_call" in text
    assert "jax.buffer_donor" in text or "tf.aliasing_output" in text
    assert "stablehlo.while" in text


def test_the_draw_lowers_without_a_kernel() -> None:
    text = lowered("TPU v6 lite", "draw")
    assert "@tpu_custom_call" not in text
    assert "stablehlo.dot_general" in text
