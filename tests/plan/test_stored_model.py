"""What a step of a checkpoint reads and multiplies with is read off its config, whatever the files are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jpaged.checkpoints.hub import find_folder
from jpaged.checkpoints.names import num_params
from jpaged.demo import FOLDER
from jpaged.models.hf_config import from_hf
from jpaged.plan.step_times import stored_shape
from tests.checkpoints.gguf.files import checkpoint, of_kind, write_gguf
from tests.models.tiny import tiny_case


@pytest.mark.parametrize(("dtype", "item_bytes"), [(None, 2), ("bfloat16", 2), ("float32", 4)])
def test_the_demo_model_is_read_off_its_config(dtype, item_bytes):
    shape = stored_shape(FOLDER, dtype)
    # config.json: 4 layers of 256 wide, 8 query and 4 key/value heads of 32, 640 wide in between, a tied vocabulary.
    layer = 256 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 640 + 2 * 256
    assert shape.head_params == 3072 * 256
    assert shape.num_params == 4 * layer + 256 + 3072 * 256
    assert shape.weight_bytes == item_bytes * shape.num_params
    assert shape.kv_bytes_per_token == item_bytes * 4 * 2 * 4 * 32
    assert shape.query_width == 256
    assert stored_shape(FOLDER, dtype, "int8").kv_bytes_per_token == 4 * 2 * 4 * 32
    matrices = 4 * (layer - 2 * 256)
    rounded = stored_shape(FOLDER, dtype, quantization="int8").weight_bytes
    assert rounded == pytest.approx(shape.weight_bytes - (item_bytes - 1) * matrices, rel=0.05)


def test_a_gguf_file_is_read_as_it_is_kept(tmp_path: Path):
    config, tensors = checkpoint("llama_mha", hidden_size=64, intermediate_size=96)
    write_gguf((config, tensors), tmp_path / "tiny.gguf", of_kind("Q8_0"))
    shape = stored_shape(find_folder(str(tmp_path)), "float32")
    embedding = 131 * 64
    assert shape.num_params == num_params(from_hf(config)) - embedding
    assert 1.0 < shape.weight_bytes / shape.num_params < 1.3  # 8 bits and a scale for 32 numbers


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon_mqa", "deepseek_v2"])
def test_families_that_call_their_sizes_otherwise_are_read(name: str, tmp_path: Path):
    case = tiny_case(name)
    (tmp_path / "config.json").write_text(json.dumps(dict(case.config)))
    shape, config = stored_shape(tmp_path, "float32"), from_hf(case.config)
    looked_up = 0 if config.tie_word_embeddings else shape.head_params
    assert shape.num_params == num_params(config) - looked_up
    assert shape.weight_bytes == 4 * shape.num_params
    assert (shape.expert_params > 0) == (config.mixture is not None)
