"""Lowers a step of each model family for an A100 in a jax without Pallas Triton: a process of its own, to import it so.

    python -c WITHOUT_TRITON

Prints one line of JSON for each model: how often its program calls each kernel of CUDA C++, and any other kernel.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

# How an abstract mesh says which device it is of has no public name yet.
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType

from jpaged.config import EngineConfig
from jpaged.device import sharded_matmul
from jpaged.device.compilation.lowering import abstract_serving
from jpaged.device.mesh import MESH_AXES, build_mesh
from jpaged.device.step import forward_packing
from jpaged.kernels import cuda_library
from jpaged.kernels.cuda_library import has_triton
from jpaged.kernels.matrix_format import MatrixFormat
from jpaged.kernels.paged_attention import Queries
from jpaged.kernels.paged_attention.api import choose
from jpaged.models.config import ModelConfig, Quantization
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from tests.models.tiny import tiny_cases

WITHOUT_TRITON = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None  # an import of it fails, as without it
from tests.aot.lower_without_triton import main
main()
"""
KIND, CAPABILITY = "NVIDIA A100-SXM4-80GB", "8.0"
NUM_TOKENS = 16
OPTIONS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": NUM_TOKENS,
    "num_blocks": 64,
    "block_size": 32,
    "max_model_len": 64,
    "attention_backend": "xla",
}
FORMATS = {None: None, "int4": MatrixFormat("int4", 32, has_zeros=True), "fp8": MatrixFormat("fp8", 32)}
_CALL = re.compile(r"custom_call @([\w.$]+)\(")


def families() -> dict[str, ModelConfig]:
    """A model of each architecture, with matrices of whole lines of the kernels."""
    found: dict[str, ModelConfig] = {}
    for case in tiny_cases():
        (architecture,) = cast("list[str]", case.config["architectures"])
        if architecture not in found:
            wide = {name: 64 for name in ("moe_intermediate_size", "intermediate_size") if name in case.config}
            found[architecture] = from_hf({**case.config, **wide})
    return found


def lower(config: ModelConfig, form: MatrixFormat | None) -> collections.Counter[str]:
    """Count the calls of a step, by the functions' names."""
    if form is not None:
        config = dataclasses.replace(config, quantization=Quantization("int4", (("", form),)))
    model = Model(config, jnp.dtype("bfloat16"))
    step, geometry, _ = abstract_serving(model, EngineConfig.load(OPTIONS), build_mesh(jax.devices()[:1]))
    device: Any = SimpleNamespace(platform="gpu", device_kind=KIND, compute_capability=CAPABILITY)
    num_heads = config.num_heads
    queries = Queries(num_heads, model.dtype, geometry.max_num_seqs, 2, NUM_TOKENS)
    chosen = choose("auto", device, step.layout, queries)
    step = dataclasses.replace(step, layout=chosen.layout, backend=chosen.backend, layer_mode="loop", sampler=None)
    packing = forward_packing(NUM_TOKENS, geometry)
    jitted = jax.jit(functools.partial(step.packed_forward, packing=packing), donate_argnums=1)
    abstract = AbstractDevice(KIND, 108, "gpu")
    mesh = AbstractMesh((1, 1, 1), MESH_AXES, (AxisType.Auto,) * len(MESH_AXES), abstract_device=abstract)
    on_device = mock.patch.object(sharded_matmul, "first_device", return_value=device)
    with jax.sharding.use_abstract_mesh(mesh), on_device:
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in (*cuda_library.SOURCES, "LayoutConstraint")]
        text = export.export(jitted, platforms=["cuda"], disabled_checks=checks)(
            step.model.abstract_params("loop"),
            jax.ShapeDtypeStruct(step.layout.shape, step.layout.storage_dtype),
            jax.ShapeDtypeStruct((step.max_sample_rows,), np.int32),
            jax.ShapeDtypeStruct((packing.size,), np.int32),
        ).mlir_module()
    return collections.Counter(_CALL.findall(text))


def main() -> None:
    """Print the calls of each family.

    Raises:
        SystemExit: Pallas Triton can be imported.
    """
    if has_triton():
        raise SystemExit("jax.experimental.pallas.triton can be imported")
    with mock.patch.object(cuda_library, "missing_reason", return_value=None):  # as if it was built
        for architecture, config in families().items():
            for name, form in FORMATS.items():
                entry = {"model": architecture, "format": name, "is_mixture": config.mixture is not None}
                print(json.dumps({**entry, "calls": lower(config, form)}), flush=True)
