"""A step of Llama-3-8B lowers for TPUs, its attention kernel included, with the plain wheels and without libtpu.

Mosaic and XLA have not compiled it then: `test_tpu_models.py` has libtpu do it.
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
from jax.sharding import AbstractMesh, AxisType

from jpaged.capacity.known_models import KNOWN_MODELS
from jpaged.config import EngineConfig
from jpaged.device.aot.tpu import GENERATIONS
from jpaged.device.mesh import MESH_AXES, build_mesh
from jpaged.device.programs.lowering import abstract_serving
from jpaged.device.step.decode import packed_decode
from jpaged.device.step.forward import forward_packing
from jpaged.device.step.runner import DecodePacking
from jpaged.models.model import Model

NUM_TOKENS = 16
OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": NUM_TOKENS,
    "num_blocks": 64,
    "block_size": 32,
    "max_model_len": 512,
    "attention_backend": "xla",
}


@pytest.mark.parametrize("program", ["forward", "decode"])
@pytest.mark.parametrize("name", GENERATIONS)
def test_a_step_lowers_with_its_attention_kernel(name: str, program: str) -> None:
    model = Model(KNOWN_MODELS["llama-3-8b"].config, jnp.dtype("bfloat16"))
    step, geometry, _ = abstract_serving(model, EngineConfig.load(OPTIONS), build_mesh(jax.devices()[:1]))
    layout = dataclasses.replace(step.layout, form="tpu")
    step = dataclasses.replace(step, layout=layout, backend="pallas-tpu", layer_mode="scan")
    packing = forward_packing(NUM_TOKENS, geometry)
    several = DecodePacking(forward_packing(8, geometry), 8)
    arguments = (
        step.model.abstract_params("scan"),
        jax.ShapeDtypeStruct(layout.shape, layout.storage_dtype),
        jax.ShapeDtypeStruct((step.num_places,), np.int32),
        jax.ShapeDtypeStruct((packing.size if program == "forward" else several.size,), np.int32),
    )
    forward = functools.partial(step.packed_forward, packing=packing)
    decode = functools.partial(packed_decode, step, packing=several)
    jitted = jax.jit(forward if program == "forward" else decode, donate_argnums=1)
    device = AbstractDevice(GENERATIONS[name].device_kind, 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 1), MESH_AXES, (AxisType.Auto,) * 2, abstract_device=device)):
        # The sampler says how its logits lie; a file that lasts must not, and this is none.
        checks = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
        text = export.export(jitted, platforms=["tpu"], disabled_checks=checks)(*arguments).mlir_module()
    assert "@tpu_custom_call" in text
    assert "stablehlo.while" in text
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text
