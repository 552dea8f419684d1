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
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.models.tiny import TinyCase, tensors, tiny_case, tiny_cases, write_checkpoint


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


def check_devices(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...] = ("",), **options: Any
) -> set[str]:
    """JAX arrays give the leaves of the files; returns the tensors that were copied to the host.

    Args:
        parts: of names of the tensors to give.
    """
    given = {name: tensor for name, tensor in tensors(tiny_case(name)).items() if any(part in name for part in parts)}
    arrays = {name: jax.device_put(tensor) for name, tensor in given.items()}
    reader, copied, read = read_of(folder, **options), set[str](), ArrayTensors.read

    def record(self: ArrayTensors, name: str, *rest: Any) -> np.ndarray:
        copied.add(name)
        return read(self, name, *rest)

    monkeypatch.setattr(ArrayTensors, "read", record)
    updates = [dict(reader.open(arrays).leaves()) for _ in range(2)]
    monkeypatch.setattr(ArrayTensors, "read", read)
    for array in arrays.values():  # as a trainer that donates its parameters
        array.delete()
    for path, wanted in read_of(folder, **options).open(given).leaves():
        for update in updates:
            leaf = update[path]
            assert leaf.sharding == wanted.sharding
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))
    return copied


@pytest.mark.parametrize(("num_parts", "layer_mode", "dtype"), [(1, "loop", "bfloat16"), (2, "scan", "float32")])
def test_jax_arrays_are_packed_and_split_without_a_copy_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_parts: int, layer_mode: LayerMode, dtype: str
) -> None:
    folder = write_checkpoint(tiny_case("llama_gqa_bias"), tmp_path)
    options: dict[str, Any] = {"num_parts": num_parts, "layer_mode": layer_mode, "dtype": dtype}
    assert not check_devices(folder, "llama_gqa_bias", monkeypatch, ("_proj.bias", "embed_tokens"), **options)


@pytest.mark.long
@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
def test_every_model_is_packed_on_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: TinyCase) -> None:
    assert not check_devices(write_checkpoint(case, tmp_path), case.name, monkeypatch)


def check_rows(folder: Path, case: TinyCase, dtype: str) -> list[Any]:
    """Kernels that will be packed keep the order of the files; returns these leaves, which have the same numbers."""
    given, rows = tensors(case), []
    wanted = dict(read_of(folder, dtype=dtype).open(given).leaves())
    for path, leaf in read_of(folder, dtype=dtype, on_device=False).open(given).leaves():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted[path]), err_msg=str(path))
        if isinstance(leaf, np.ndarray):
            assert leaf.strides[0] == leaf.itemsize
            rows.append(path)
    return rows


def test_kernels_for_the_processor_keep_the_order_of_the_files(tmp_path: Path) -> None:
    case = tiny_case("llama_gqa_bias")
    rows = check_rows(write_checkpoint(case, tmp_path), case, "bfloat16")
    assert {path[-2] for path in rows} == {"qkv", "out", "gate_up", "down"}


@pytest.mark.long
@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
def test_kernels_of_every_model_keep_the_order_of_the_files(tmp_path: Path, case: TinyCase) -> None:
    assert check_rows(write_checkpoint(case, tmp_path), case, "float32")


def test_kernels_for_the_processor_must_be_finite(tmp_path: Path) -> None:
    case = tiny_case("llama_gqa_bias")
    folder, given = write_checkpoint(case, tmp_path), tensors(case)
    name = "model.layers.0.mlp.down_proj.weight"
    given[name] = given[name].copy()
    given[name][1, 2] = np.nan
    reader = read_of(folder, on_device=False)
    with pytest.raises(InvalidArgument, match=f"tensor {name} has 1 of .* numbers that are not finite"):
        list(reader.open({name: given[name]}).leaves())


@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
def test_a_part_of_the_tensors_updates_the_leaves_that_it_completes(tmp_path: Path, layer_mode: LayerMode) -> None:
    case = tiny_case("llama_mha")
    folder, given = write_checkpoint(case, tmp_path), tensors(case)
    reader = read_of(folder, layer_mode=layer_mode)
    one = {name: given[name] for name in given if ".down_proj." in name}
    update = reader.open(one)
    assert not update.is_complete and update.folder is None
    paths = [path for path, _ in update.leaves()]
    assert len(paths) == (1 if layer_mode == "scan" else 3)
    assert all(path[-2:] == ("down", "kernel") for path in paths)
    del one["model.layers.1.mlp.down_proj.weight"]
    if layer_mode == "scan":
        with pytest.raises(InvalidArgument, match=r"1 tensors that are stored together with .* missing: model"):
            reader.open(one)
    else:
        assert len(list(reader.open(one).leaves())) == 2
    query = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(InvalidArgument, match=rf"stored together with {query} are missing: .*k_proj.*v_proj"):
        reader.open({query: given[query]})
    (embedding,) = reader.open({"embed_tokens.weight": given["model.embed_tokens.weight"]}).leaves()
    (same,) = reader.open({"model.embed_tokens.weight": given["model.embed_tokens.weight"]}).leaves()
    assert embedding[0] == same[0]
    np.testing.assert_array_equal(np.asarray(embedding[1]), np.asarray(same[1]))


@pytest.mark.long
def test_arrays_of_several_libraries_are_accepted(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    case = tiny_case("llama3_tied")
    folder, given = write_checkpoint(case, tmp_path), tensors(case)
    wanted = dict(read_of(folder, dtype="bfloat16").open(folder).leaves())
    forms: list[Any] = [
        given.items(),
        ((name, torch.tensor(tensor).bfloat16().requires_grad_()) for name, tensor in given.items()),
        {name: torch.tensor(tensor) for name, tensor in given.items()},
        {"model": {name.removeprefix("model."): jnp.asarray(tensor) for name, tensor in given.items()}},
    ]
    for form in forms:
        update = read_of(folder, dtype="bfloat16", on_device=False).open(form)
        assert update.is_complete
        for path, leaf in update.leaves():
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted[path]))


def test_what_are_not_weights_of_the_model_is_refused(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    folder, given = write_checkpoint(case, tmp_path / "model"), tensors(case)
    reader, name = read_of(folder), "model.layers.0.mlp.down_proj.weight"
    (tmp_path / "empty").mkdir()
    deleted = jnp.zeros(3)
    deleted.delete()
    for weights, problem in (
        ({**given, "model.layers.7.mlp.down_proj.weight": given[name]}, "1 tensors are not part of LlamaForCausalLM"),
        ({name: given[name][1:]}, f"weights: tensor {name} has shape"),
        ([(name, given[name]), (name, given[name])], f"tensor {name} occurs twice"),
        ({name: [1.0]}, f"tensor {name} is a list, not an array"),
        ({name: deleted}, f"tensor {name} is a deleted or donated array"),
        ([name], "must be pairs of name and array"),
        ({}, "weights: has no tensor of the model"),
        (7, "weights: is a int, not a folder or arrays by name"),
        (tmp_path / "nowhere", "does not exist"),
        ("", "weights: is an empty path"),
        ("a" * 5000, "weights: a{80}: File name too long"),
        (tmp_path / "empty", "has neither model.safetensors nor"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            reader.open(weights)
    with pytest.raises(Unsupported, match=f"tensor {name} is int8; supported: float64, float32"):
        reader.open({name: given[name].astype(np.int8)})
    given[name][3, 4] = np.nan
    update = reader.open(given)
    with pytest.raises(InvalidArgument, match=rf"weights: tensor {name} has 1 of .* the first is nan at \[3, 4\]"):
        list(update.leaves())


def test_an_array_that_is_deleted_later_is_refused_by_name() -> None:
    array = jnp.ones(3)
    tensors = ArrayTensors({"w": array})
    array.delete()
    for read in (lambda: tensors.read("w", (3,)), lambda: tensors.on_device(["w"])):
        with pytest.raises(InvalidArgument, match="weights: tensor w is a deleted or donated array"):
            read()
