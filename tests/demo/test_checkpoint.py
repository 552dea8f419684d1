"""The packaged checkpoint: small, free of its machine, of the shapes its config states in every dtype and mode."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.demo_model.export import export
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params
from jpaged.demo import checkpoint
from jpaged.demo.checkpoint import FOLDER, load_demo
from jpaged.errors import InvalidArgument
from jpaged.models.model import model_for

FILES = [path for path in FOLDER.rglob("*") if path.is_file()]


@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_loads_with_the_shapes_of_its_config(dtype, layer_mode):
    config, params = load_demo(jnp.dtype(dtype), layer_mode)
    want = model_for(config, jnp.dtype(dtype)).abstract_params(layer_mode)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), want)


def test_both_layer_modes_hold_the_same_numbers():
    _, loop = load_demo(jnp.dtype(jnp.bfloat16), "loop")
    _, scan = load_demo(jnp.dtype(jnp.bfloat16), "scan")
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop["layers"])
    jax.tree.map(np.testing.assert_array_equal, stacked, scan["layers"])


def test_put_places_every_leaf_and_is_told_its_path():
    paths = []

    def put(path, shape, read):
        paths.append(path)
        return jnp.asarray(read((slice(None),) * len(shape)))

    config, params = load_demo(jnp.dtype(jnp.float32), "loop", put)
    assert len(paths) == len(set(paths)) == len(jax.tree.leaves(params))
    assert ("layers", config.num_layers - 1, "mlp", "down", "kernel") in paths
    assert ("embed", "embedding") in paths


def test_it_has_two_to_eight_million_parameters_and_few_bytes():
    _, params = load_demo(jnp.dtype(jnp.bfloat16), "loop")
    assert 2e6 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 8e6
    assert sum(path.stat().st_size for path in FILES) < 20e6
    assert len(FILES) < 20


def test_it_says_nothing_of_the_machine_that_trained_it():
    names = {path.name for path in FILES}
    assert names.isdisjoint({"commit_success.txt", "_sharding"})
    metadata = json.loads((FOLDER / "params" / "_CHECKPOINT_METADATA").read_text())
    assert metadata["init_timestamp_nsecs"] == metadata["commit_timestamp_nsecs"] == 0
    for path in FILES:
        if path.suffix == ".json" or path.name.startswith("_"):
            assert str(FOLDER.parent.parent) not in path.read_text()


def test_what_is_saved_is_read_back(tmp_path):
    config, params = load_demo(jnp.dtype(jnp.bfloat16), "loop")
    checkpoint.save(tmp_path, config, params)
    again, read = load_demo(jnp.dtype(jnp.bfloat16), "loop", folder=tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, read)


def test_parameters_that_are_not_finite_are_refused_by_name(tmp_path):
    config, params = load_demo(jnp.dtype(jnp.bfloat16), "loop")
    spoiled = {**params, "norm": jax.tree.map(lambda scale: scale.at[3].set(jnp.nan), params["norm"])}
    checkpoint.save(tmp_path, config, spoiled)
    with pytest.raises(InvalidArgument, match=r"params: norm\.scale has numbers that are not finite"):
        load_demo(jnp.dtype(jnp.bfloat16), "loop", folder=tmp_path)


def test_an_export_is_the_same_model_in_hugging_face_layout(tmp_path):
    export(tmp_path, "bfloat16")
    config, params = load_demo(jnp.dtype(jnp.bfloat16), "loop")
    assert read_config(tmp_path) == config
    read = load_params(model_for(config, jnp.dtype(jnp.bfloat16)), tmp_path, "loop")
    jax.tree.map(np.testing.assert_array_equal, params, read)
    assert (tmp_path / "tokenizer.json").read_bytes() == (FOLDER / "tokenizer.json").read_bytes()


def test_a_folder_without_parameters_is_refused(tmp_path):
    shutil.copy(FOLDER / "config.json", tmp_path)
    with pytest.raises(InvalidArgument, match="holds no Orbax parameters"):
        load_demo(jnp.dtype(jnp.float32), "loop", folder=tmp_path)


def test_parameters_of_another_shape_are_refused(tmp_path):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["intermediate_size"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=r"are not those that config\.json states"):
        load_demo(jnp.dtype(jnp.float32), "loop", folder=tmp_path)
