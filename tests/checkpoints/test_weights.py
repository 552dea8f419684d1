"""Checkpoints are read whole or not at all: every tensor has its place, its shape and its name in an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import DTypeLike
from safetensors.numpy import load_file, save_file

from benchmarks.demo_model.saving import save_params
from jpaged.checkpoints import weights
from jpaged.checkpoints.finite import check_finite, finite_flags, finite_on_host
from jpaged.checkpoints.hub import find_folder, read_config
from jpaged.checkpoints.weights import Read, load_params
from jpaged.device.mesh import MeshPlacement, build_mesh
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.models.tiny import TinyCase, tensors, tiny_case, tiny_cases, write_checkpoint

Tensors = dict[str, np.ndarray]


def model_of(case: TinyCase, dtype: DTypeLike = jnp.float32) -> Model:
    return Model(from_hf(case.config), np.dtype(dtype))


def rewrite(case: TinyCase, folder: Path, change: Callable[[Tensors], object]) -> Path:
    write_checkpoint(case, folder)
    stored = tensors(case)
    change(stored)
    save_file(stored, folder / "model.safetensors")
    return folder


def write_shards(case: TinyCase, folder: Path) -> Path:
    """Three files and an index, tensors dealt out in turn."""
    write_checkpoint(case, folder)
    (folder / "model.safetensors").unlink()
    stored = tensors(case)
    names = [f"model-0000{part + 1}-of-00003.safetensors" for part in range(3)]
    weight_map = {name: names[index % 3] for index, name in enumerate(sorted(stored))}
    for file_name in names:
        save_file({name: stored[name] for name in stored if weight_map[name] == file_name}, folder / file_name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def assert_same_trees(left: object, right: object) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
@pytest.mark.thinned(5)
def test_the_tree_is_the_one_that_the_model_describes(case: TinyCase, layer_mode, tmp_path: Path) -> None:
    model = model_of(case)
    params = load_params(model, write_checkpoint(case, tmp_path), layer_mode)
    abstract = model.abstract_params(layer_mode)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract
    )


@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
@pytest.mark.parametrize("name", ["llama_gqa_bias", "qwen3_tied", "qwen2", "opt_post_norm"])
def test_saving_gives_back_every_tensor_of_the_checkpoint(name: str, layer_mode, tmp_path: Path) -> None:
    case = tiny_case(name)
    model = model_of(case)
    params = load_params(model, write_checkpoint(case, tmp_path / "once"), layer_mode)
    save_params(params, model.config, tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert_same_trees(saved, tensors(case))


def test_shards_with_an_index_are_the_same_checkpoint(tmp_path: Path) -> None:
    case = tiny_case("qwen3")
    whole = load_params(model_of(case), write_checkpoint(case, tmp_path / "whole"), "loop")
    assert_same_trees(load_params(model_of(case), write_shards(case, tmp_path / "shards"), "loop"), whole)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_tensors_are_cast_to_the_type_of_the_model(stored, wanted, tmp_path: Path) -> None:
    case = tiny_case("llama_mha")

    def cast(stored_tensors: Tensors) -> None:
        for name, tensor in stored_tensors.items():
            stored_tensors[name] = tensor.astype(stored)

    params = load_params(model_of(case, wanted), rewrite(case, tmp_path, cast), "loop")
    expected = tensors(case)["model.layers.1.mlp.down_proj.weight"].astype(stored).T.astype(wanted)
    kernel = params["layers"][1]["mlp"]["down"]["kernel"]
    assert kernel.dtype == wanted
    assert np.array_equal(kernel, expected)


def test_placement_and_progress_see_every_leaf_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny_case("llama_mha")
    placed: list[tuple[int, ...]] = []
    reports: list[tuple[int, int, str]] = []

    def put(shape: tuple[int, ...], read: Read, sharding: object) -> jax.Array:
        placed.append(shape)
        return jnp.asarray(read((slice(None),) * len(shape)))

    monkeypatch.setattr(weights, "put", put)
    params = load_params(
        model_of(case),
        write_checkpoint(case, tmp_path),
        "loop",
        progress=lambda done, total, name: reports.append((done, total, name)),
    )
    total = len(jax.tree.leaves(params))
    assert sorted(placed) == sorted(leaf.shape for leaf in jax.tree.leaves(params))
    assert [done for done, _, _ in reports] == list(range(1, total + 1))
    assert (total, "layers.2.attention.qkv.kernel") in {(count, name) for _, count, name in reports}
    assert len({name for _, _, name in reports}) == total


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda stored: stored.pop(name)


def put_in(name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Callable[[Tensors], object]:
    return lambda stored: stored.update({name: np.zeros(shape, np.dtype(dtype))})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop("model.norm.weight"), "tensor model.norm.weight [64] is missing"),
        (drop("lm_head.weight"), "tensor lm_head.weight [131, 64] is missing"),
        (drop("model.layers.2.self_attn.k_proj.weight"), "model.layers.2.self_attn.k_proj.weight [64, 64] is missing"),
        (put_in("model.layers.1.mlp.up_proj.weight", (64, 88)), "has shape [64, 88]; config.json requires [88, 64]"),
        (put_in("model.embed_tokens.weight", (130, 64)), "tensor model.embed_tokens.weight has shape [130, 64]"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named_with_its_file(
    change: Callable[[Tensors], object], named: str, tmp_path: Path
) -> None:
    case = tiny_case("llama_mha")
    with pytest.raises(InvalidArgument) as refusal:
        load_params(model_of(case), rewrite(case, tmp_path, change), "loop")
    assert named in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "vision.weight"]
)
def test_a_tensor_without_a_place_is_named_with_its_file_and_not_read(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers passes it over."""
    case = tiny_case("llama_mha")
    plain = load_params(model_of(case), write_checkpoint(case, tmp_path / "plain"), "loop")
    folder = rewrite(case, tmp_path / "more", put_in(name, (88, 64)))
    assert_same_trees(load_params(model_of(case), folder, "loop"), plain)
    (record,) = caplog.records
    assert record.getMessage() == (
        "checkpoint: 1 tensors are not part of LlamaForCausalLM with this config: "
        f"{name} ({folder / 'model.safetensors'}); they are ignored"
    )


@pytest.mark.parametrize("name", ["llama_mha", "qwen3_tied", "gpt_neox", "falcon_mqa", "gemma3", "qwen3_moe"])
def test_tensors_of_the_class_without_a_head_have_no_prefix(name: str, tmp_path: Path) -> None:
    case = tiny_case(name)
    prefix = {"gpt_neox": "gpt_neox.", "falcon_mqa": "transformer."}.get(name, "model.")

    def strip(stored: Tensors) -> None:
        for old in list(stored):
            stored[old.removeprefix(prefix)] = stored.pop(old)

    whole = load_params(model_of(case), write_checkpoint(case, tmp_path / "whole"), "loop")
    assert_same_trees(load_params(model_of(case), rewrite(case, tmp_path / "bare", strip), "loop"), whole)


def test_a_tied_checkpoint_may_hold_its_output_matrix_alone(tmp_path: Path) -> None:
    case = tiny_case("qwen3_tied")

    def rename(stored: Tensors) -> None:
        stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")

    whole = load_params(model_of(case), write_checkpoint(case, tmp_path / "whole"), "loop")
    assert_same_trees(load_params(model_of(case), rewrite(case, tmp_path / "head", rename), "loop"), whole)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_the_cause_is_named_where_a_file_is_no_file(name: str, tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    pointer, dangling = (write_checkpoint(case, tmp_path / kind) for kind in ("pointer", "dangling"))
    (pointer / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 269060552\n")
    (dangling / name).unlink()
    (dangling / name).symlink_to("../../blobs/0123")
    for folder, cause in (
        (pointer, "is a Git LFS pointer"),
        (dangling, r"is a link to \.\./\.\./blobs/0123, which is"),
    ):
        with pytest.raises(InvalidArgument, match=cause) as refusal:
            load_params(Model(read_config(find_folder(str(folder))), np.dtype(np.float32)), folder, "loop")
        assert str(folder / name) in str(refusal.value)


def test_the_layout_of_mistral_is_named(tmp_path: Path) -> None:
    for name in ("consolidated.safetensors", "params.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(Unsupported, match=r"consolidated\.safetensors with params\.json is Mistral's own layout"):
        find_folder(str(tmp_path))


def strip_model(stored: Tensors) -> None:
    """As checkpoints of OPT that were saved without their head are named."""
    for name in list(stored):
        stored[name.removeprefix("model.")] = stored.pop(name)


def test_opt_checkpoints_are_read_under_both_names(tmp_path: Path) -> None:
    case = tiny_case("opt")
    whole = load_params(model_of(case), write_checkpoint(case, tmp_path / "whole"), "loop")
    assert_same_trees(load_params(model_of(case), rewrite(case, tmp_path / "bare", strip_model), "loop"), whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop("model.decoder.embed_positions.weight"), "model.decoder.embed_positions.weight [258, 64] is missing"),
        (drop("model.decoder.layers.1.fc1.bias"), "tensor model.decoder.layers.1.fc1.bias [88] is missing"),
        (put_in("model.decoder.embed_positions.weight", (256, 64)), "[256, 64]; config.json requires [258, 64]"),
        (put_in("lm_head.weight", (131, 64)), "lm_head.weight differs from model.decoder.embed_tokens.weight"),
    ],
)
def test_what_is_wrong_in_an_opt_checkpoint_is_named(
    change: Callable[[Tensors], object], named: str, tmp_path: Path
) -> None:
    case = tiny_case("opt")
    with pytest.raises(InvalidArgument) as refusal:
        load_params(model_of(case), rewrite(case, tmp_path, change), "loop")
    assert named in str(refusal.value)


def spoil(name: str, place: tuple[int, ...], value: float) -> Callable[[Tensors], object]:
    """One number of a tensor is another."""

    def change(stored: Tensors) -> None:
        stored[name] = np.array(stored[name])
        stored[name][place] = value

    return change


@pytest.mark.parametrize(("layer_mode", "num_parts"), [("loop", 1), ("scan", 4)])
@pytest.mark.parametrize(
    ("name", "place", "value", "dtype", "said"),
    [
        ("model.embed_tokens.weight", (130, 3), np.nan, "float32", "nan at [130, 3]"),
        ("lm_head.weight", (0, 63), -np.inf, "bfloat16", "-inf at [0, 63]"),
        ("model.norm.weight", (5,), np.inf, "float32", "inf at [5]"),
        ("model.layers.2.self_attn.v_proj.weight", (63, 1), np.nan, "bfloat16", "nan at [63, 1]"),
        ("model.layers.1.mlp.down_proj.weight", (2, 87), 3.4e38, "bfloat16", "3.3999999521443642e+38 at [2, 87]"),
        (
            *("model.layers.1.mlp.up_proj.weight", (3, 1), -65520.0, "float16"),
            "-65520.0 at [3, 1]; float16 ends at 65504: choose --dtype bfloat16",
        ),
        ("model.layers.1.mlp.up_proj.weight", (3, 1), np.nan, "float16", "nan at [3, 1]"),
    ],
)
def test_a_tensor_that_is_not_finite_is_refused_by_name(
    name: str,
    place: tuple[int, ...],
    value: float,
    dtype: str,
    said: str,
    layer_mode: LayerMode,
    num_parts: int,
    tmp_path: Path,
) -> None:
    """Also what the model's type has no room for."""
    case = tiny_case("llama_mha")
    model, folder = model_of(case, dtype), rewrite(case, tmp_path, spoil(name, place, value))
    placement = MeshPlacement.of(model, build_mesh(jax.devices()[:num_parts]), layer_mode)
    with pytest.raises(InvalidArgument) as refusal:
        load_params(model, folder, layer_mode, num_parts=num_parts, shardings=placement.shardings)
    assert str(refusal.value).startswith(f"{folder / 'model.safetensors'}: tensor {name} has 1 of ")
    assert str(refusal.value).endswith(f"that are not finite as {dtype}: the first is {said}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hosts_find_every_kind_of_number_that_is_not_finite(dtype: str) -> None:
    values = np.linspace(-60_000, 60_000, 1000).astype(dtype)
    assert finite_on_host(jnp.asarray(values))
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        values[500] = bad
        assert not finite_on_host(jnp.asarray(values))
        assert not finite_on_host(jnp.asarray(np.full(3, bad, dtype)))
    assert finite_on_host(jnp.full(3, jnp.finfo(dtype).min, dtype))
    assert finite_on_host(jnp.full(3, jnp.finfo(dtype).max, dtype))
    assert finite_on_host(jnp.zeros((0, 3), dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", [0, 299_999, None])
def test_hosts_and_devices_find_the_same_numbers_that_are_not_finite(place: int | None, dtype: str) -> None:
    values = np.ones(300_000, np.float32)
    if place is not None:
        values[place] = np.nan
    split = NamedSharding(Mesh(np.asarray(jax.devices()[:4]), "x"), PartitionSpec("x"))
    for leaf in (jnp.asarray(values, dtype), jax.device_put(jnp.asarray(values, dtype), split)):
        assert finite_on_host(leaf) == check_finite(leaf)() == (place is None)
        assert bool(finite_flags(leaf).all()) == (place is None)


def test_a_tensor_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    folder = rewrite(case, tmp_path, put_in("model.layers.1.mlp.up_proj.weight", (88, 64), np.int8))
    with pytest.raises(Unsupported, match=r"model\.layers\.1\.mlp\.up_proj\.weight is int8"):
        load_params(model_of(case), folder, "loop")


def test_rotary_frequencies_of_old_checkpoints_are_left_alone(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    folder = rewrite(case, tmp_path, put_in("model.layers.0.self_attn.rotary_emb.inv_freq", (8,)))
    whole = load_params(model_of(case), write_checkpoint(case, tmp_path / "whole"), "loop")
    assert_same_trees(load_params(model_of(case), folder, "loop"), whole)


def test_a_tied_checkpoint_may_repeat_its_embedding_but_not_change_it(tmp_path: Path) -> None:
    case = tiny_case("qwen3_tied")

    def repeat(stored: Tensors) -> None:
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].copy()

    assert "lm_head" not in load_params(model_of(case), rewrite(case, tmp_path / "same", repeat), "loop")
    shape = tensors(case)["model.embed_tokens.weight"].shape
    with pytest.raises(InvalidArgument, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_params(model_of(case), rewrite(case, tmp_path / "other", put_in("lm_head.weight", shape)), "loop")


def test_files_that_are_not_a_checkpoint_are_refused(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    model = model_of(case)
    with pytest.raises(InvalidArgument, match=r"has neither model\.safetensors nor"):
        load_params(model, tmp_path, "loop")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Unsupported, match="only safetensors weights are supported"):
        load_params(model, tmp_path, "loop")
    write_checkpoint(case, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidArgument, match="is not a complete safetensors file"):
        load_params(model, tmp_path, "loop")


def test_an_index_may_omit_a_tensor_or_name_another_shard(tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    whole = load_params(model_of(case), write_checkpoint(case, tmp_path / "whole"), "loop")
    path = write_shards(case, tmp_path / "shards") / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"].pop("lm_head.weight")
    index["weight_map"]["model.norm.weight"] = next(iter(set(index["weight_map"].values())))
    path.write_text("\ufeff" + json.dumps(index), encoding="utf-8")
    assert_same_trees(load_params(model_of(case), tmp_path / "shards", "loop"), whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda index: index.pop("weight_map"), "must be a JSON object with a weight_map"),
        (lambda index: index["weight_map"].update({"a": "b.safetensors"}), "names 'b.safetensors', which is not in"),
        (lambda index: index["weight_map"].update({"a": "../x/model.safetensors"}), "names '../x/model.safetensors'"),
        (lambda index: index["weight_map"].update({"extra": "model-00001-of-00003.safetensors"}), "puts tensor extra"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(change, named: str, tmp_path: Path) -> None:
    case = tiny_case("llama_mha")
    path = write_shards(case, tmp_path) / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    change(index)
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InvalidArgument) as refusal:
        load_params(model_of(case), tmp_path, "loop")
    assert named in str(refusal.value)
