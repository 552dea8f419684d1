"""A model in parts: what each part holds, what is read for it, and what cannot be split."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.checkpoints.tensor_files import TensorFiles
from jpaged.checkpoints.weights import load_params, random_params
from jpaged.errors import InvalidArgument
from jpaged.models.param_specs import GroupedHeads
from jpaged.models.sharding import logical_axes, pad_for_sharding, repeat_groups
from tests.device.sharded import model_of, place
from tests.models.tiny import tiny_case, tiny_cases, write_checkpoint

SPLITS = [
    ("llama_gqa_bias", 2, "loop"),
    ("llama3_tied", 4, "loop"),
    ("mistral_mqa", 8, "scan"),
    ("qwen3_tied", 8, "loop"),
    ("opt", 4, "scan"),
    ("opt_post_norm", 2, "loop"),
]


@pytest.mark.parametrize(("name", "num_parts", "layer_mode"), SPLITS)
def test_every_device_gets_its_part_of_the_published_weights(name, num_parts: int, layer_mode, tmp_path: Path) -> None:
    model, folder = model_of(name), write_checkpoint(tiny_case(name), tmp_path)
    where = place(model, num_parts, layer_mode)
    params = load_params(model, folder, layer_mode, num_parts=num_parts, shardings=where.shardings)
    whole = load_params(model, folder, layer_mode)
    num_split = 0
    for (path, leaf), (_, published) in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree_util.tree_leaves_with_path(whole), strict=True
    ):
        wide = np.asarray(published)
        if "qkv" in jax.tree_util.keystr(path):
            repeats = where.model.config.num_kv_heads // model.config.num_kv_heads
            wide = repeat_groups(wide, GroupedHeads.of(model.config), repeats)
        if wide.shape[0] == model.config.vocab_size:
            wide = np.pad(wide, ((0, where.model.config.vocab_size - len(wide)), (0, 0)))
        np.testing.assert_array_equal(leaf, wide)
        parts = {shard.data.nbytes for shard in leaf.addressable_shards}
        assert parts in ({leaf.nbytes}, {leaf.nbytes // num_parts})
        num_split += parts != {leaf.nbytes}
    assert num_split == sum("model" in sharding.spec for sharding in jax.tree.leaves(where.shardings))


def test_a_device_reads_its_part_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts read every number of a split tensor once; key/value heads are not more than parts here."""
    model, folder = model_of("llama_mha"), write_checkpoint(tiny_case("llama_mha"), tmp_path)
    sizes: dict[str, list[int]] = {}
    read = TensorFiles.read

    def listen(files: TensorFiles, name: str, shape: tuple[int, ...], index: tuple[slice, ...] = ()) -> np.ndarray:
        tensor = read(files, name, shape, index)
        sizes.setdefault(name, []).append(tensor.size)
        return tensor

    monkeypatch.setattr(TensorFiles, "read", listen)
    load_params(model, folder, "loop", num_parts=2, shardings=place(model, 2).shardings)
    inner, width = model.config.intermediate_size, model.config.hidden_size
    assert sizes["model.layers.1.mlp.down_proj.weight"] == [width * inner // 2] * 2
    assert sizes["model.layers.1.self_attn.o_proj.weight"] == [width * width // 2] * 2
    assert sizes["model.layers.1.self_attn.k_proj.weight"] == [width * width // 2] * 2
    assert sizes["lm_head.weight"] == [66 * width, 65 * width]
    assert sizes["model.norm.weight"] == [width]


def test_groups_are_repeated_with_their_share_of_the_queries() -> None:
    """Two heads with four queries each become four with two: q0 q1 | q2 q3 of the first, then of the second."""
    qkv, heads = np.arange(2 * 6), GroupedHeads(2, 4, 1)
    assert repeat_groups(qkv, heads, 2).tolist() == [0, 1, 4, 5, 2, 3, 4, 5, 6, 7, 10, 11, 8, 9, 10, 11]
    assert repeat_groups(qkv, heads, 1) is qkv


@pytest.mark.thinned(7)
@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
def test_every_leaf_has_a_name_for_every_axis(case, layer_mode) -> None:
    params = model_of(case.name).abstract_params(layer_mode)
    axes = logical_axes(model_of(case.name).config, layer_mode)
    jax.tree.map(lambda leaf, names: None if leaf.ndim == len(names) else pytest.fail(str(names)), params, axes)


def test_random_weights_are_made_in_their_parts() -> None:
    where = place(model_of("llama3_tied"), 4)
    params = random_params(where.model, "loop", seed=1, shardings=where.shardings)
    assert params["layers"][0]["mlp"]["down"]["kernel"].addressable_shards[0].data.shape == (22, 128)
    assert params["embed"]["embedding"].shape == (132, 128)
    kernels = [np.asarray(layer["mlp"]["down"]["kernel"]) for layer in params["layers"]]
    parts = [part for kernel in kernels for part in np.split(kernel, 4)]
    assert all(0.018 < part.std() < 0.022 for part in parts)
    assert len({part.tobytes() for part in parts}) == len(parts)
    assert np.all(np.asarray(params["norm"]["scale"]) == 1)


@pytest.mark.parametrize(
    ("name", "num_parts", "message"),
    [
        ("qwen2", 2, r"2 does not divide 7 query heads, 1 key/value heads .* width of 88; 1 work"),
        ("llama_gqa_bias", 4, r"4 does not divide 6 query heads, 2 .*; 1, 2 work"),
        ("qwen3_tied", 16, r"16 does not divide 16 query heads, 8 .*; 1, 2, 4, 8 work"),
        ("opt", 3, r"3 does not divide 4 query heads, 4 .*; 1, 2, 4 work"),
    ],
)
def test_numbers_that_divide_nothing_are_refused_with_those_that_work(name: str, num_parts: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"tensor_parallel_size: {message}"):
        pad_for_sharding(model_of(name).config, num_parts)


def test_one_part_is_the_model_itself() -> None:
    for case in tiny_cases():
        config = model_of(case.name).config
        assert pad_for_sharding(config, 1) == config
    config = model_of("llama3_tied").config
    assert pad_for_sharding(config, 8) == dataclasses.replace(config, num_kv_heads=8, vocab_size=136)
