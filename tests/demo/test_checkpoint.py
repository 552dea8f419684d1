"""The packaged checkpoint: small, free of its machine, of the shapes its config states in every dtype and mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.demo_model.train import package
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.demo import FOLDER
from jpaged.errors import InvalidArgument
from jpaged.models.model import Model

FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def load(dtype="bfloat16", layer_mode="loop", folder=FOLDER):
    return load_params(Model(read_config(folder), jnp.dtype(dtype)), folder, layer_mode)


@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_loads_with_the_shapes_of_its_config(dtype, layer_mode):
    params = load(dtype, layer_mode)
    want = Model(read_config(FOLDER), jnp.dtype(dtype)).abstract_params(layer_mode)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), want)


def test_both_layer_modes_hold_the_same_numbers():
    loop, scan = load(layer_mode="loop"), load(layer_mode="scan")
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop["layers"])
    jax.tree.map(np.testing.assert_array_equal, {"0": stacked}, scan["layers"])


def test_it_has_two_to_eight_million_parameters_and_few_bytes():
    assert 2e6 < sum(leaf.size for leaf in jax.tree.leaves(load())) < 8e6
    assert sorted(path.name for path in FOLDER.iterdir()) == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 12e6


def test_it_says_nothing_of_the_machine_that_trained_it():
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    for path in FOLDER.glob("*.json"):
        assert str(FOLDER.parent.parent) not in path.read_text()


def test_what_training_packages_is_read_back_and_replaced(tmp_path):
    config, params = read_config(FOLDER), load("float32")
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for _ in range(2):
        package(tmp_path, config, params, tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name


def test_training_does_not_package_over_something_else(tmp_path):
    (tmp_path / "letters.txt").touch()
    with pytest.raises(InvalidArgument, match="contains something other than a checkpoint"):
        package(tmp_path, read_config(FOLDER), load(), Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]
