"""Tiny checkpoints on meshes of virtual CPU devices."""

from __future__ import annotations

import jax
import numpy as np

from jpaged.device.mesh import MeshPlacement, build_mesh
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.models.tiny import tiny_case


def model_of(name: str) -> Model:
    """A tiny checkpoint's model in float32."""
    return Model(from_hf(tiny_case(name).config), np.dtype(np.float32))


def place(model: Model, num_parts: int, layer_mode: LayerMode | None = None) -> MeshPlacement:
    """The model on the first devices."""
    return MeshPlacement.of(model, build_mesh(jax.devices()[:num_parts]), layer_mode)
