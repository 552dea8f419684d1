"""The models of the comparison: the same bytes at every call, read by the libraries that peers read them with."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from benchmarks.peers.checkpoints import SHAPES, make
from jpaged import LLM, SamplingParams
from tests.peers.shapes import TINY


def test_a_model_is_the_same_at_every_call(tmp_path):
    for folder in ("one", "two"):
        make(TINY, tmp_path / folder)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_weights_have_the_deviations_of_their_kinds(tmp_path):
    make(TINY, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: value.shape for name, value in weights.items()} == {name: dims for name, dims, _ in TINY.tensors()}
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert weights["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.05, rel=0.3)
    assert abs(weights["model.norm.weight"].mean() - 1) < 0.1
    assert all(value.dtype == np.float32 for value in weights.values())


@pytest.mark.parametrize("name", SHAPES)
def test_the_tokenizer_has_a_token_for_every_id(tmp_path, name):
    make(replace(TINY, name=name), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SHAPES[name].vocab_size
    assert tokenizer.decode([SHAPES[name].vocab_size - 1])
    text = "Straße of 3 boats"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(("name", "read", "output"), [("S", 12_587_904, 3_145_728), ("M", 386_542_464, 28_672_000)])
def test_a_step_reads_all_but_an_embedding_of_its_own(name, read, output):
    assert SHAPES[name].num_parameters_read == read
    assert SHAPES[name].num_output_parameters == output


@pytest.mark.long
def test_jpaged_serves_it(tmp_path):
    shape = replace(TINY, num_layers=2, width=128, num_heads=2)
    make(shape, tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(str(tmp_path), max_model_len=64, num_blocks=16, max_num_seqs=2, max_num_batched_tokens=16) as llm:
        (output,) = llm.generate([[5, 9, 300]], greedy)
    assert len(output.outputs[0].token_ids) == 5
