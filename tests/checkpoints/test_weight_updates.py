"""New weights are checked before they are used, and JAX arrays are packed on their devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.tensor_files import ArrayTensors
from jpaged.checkpoints.weights import WeightReader
from jpaged.device.mesh import MeshPlacement, serving_mesh
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.models.tiny import tensors, tiny_case, tiny_cases, write_checkpoint


def read_of(
    folder: Path, num_parts: int = 1, layer_mode: LayerMode = "loop", dtype: str = "float32", *, on_device: bool = True
) -> WeightReader:
    model = Model(read_config(folder), np.dtype(jnp.dtype(dtype)))
    where = MeshPlacement.of(model, serving_mesh(num_parts), layer_mode)
    return WeightReader(
        model,
        folder,
        layer_mode,
        num_parts=num_parts,
        shardings=where.shardings,
        pack_stored=None,
        check_folder=lambda folder: None,
        packs_on_device=on_device,
    )


def check_devices(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[str]:
    """JAX arrays give the leaves of the files; returns the tensors that were copied to the host."""
    arrays = {name: jax.device_put(tensor) for name, tensor in tensors(tiny_case(name)).items()}
    reader, copied, read = read_of(folder, **options), set[str](), ArrayTensors.read

    def record(self: ArrayTensors, name: str, *rest: Any) -> np.ndarray:
        copied.add(name)
        return read(self, name, *rest)

    monkeypatch.setattr(ArrayTensors, "read", record)
    wanted = dict(read_of(folder, **options).open(folder).leaves())
    for _ in range(2):
        update = reader.open(arrays)
        assert update.is_complete
        for path, leaf in update.leaves():
            assert leaf.sharding == wanted[path].sharding
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted[path]))
            assert all(leaf is not array for array in arrays.values())
    for array in arrays.values():  # as a trainer that donates its parameters
        array.delete()
    for path, leaf in update.leaves() if False else ():
        raise AssertionError(path, leaf)
    return copied


@pytest.mark.parametrize(("num_parts", "layer_mode", "dtype"), [(1, "loop", "bfloat16"), (2, "scan", "float32")])
def test_jax_arrays_are_packed_and_split_without_a_copy_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_parts: int, layer_mode: LayerMode, dtype: str
) -> None:
    folder = write_checkpoint(tiny_case("llama_gqa_bias"), tmp_path)
    options: dict[str, Any] = {"num_parts": num_parts, "layer_mode": layer_mode, "dtype": dtype}
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        copied = check_devices(folder, "llama_gqa_bias", monkeypatch, **options)
    assert not copied


@pytest.mark.long
@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
def test_every_model_is_packed_on_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    folder = write_checkpoint(case, tmp_path)
    print(case.name, sorted(check_devices(folder, case.name, monkeypatch)))
