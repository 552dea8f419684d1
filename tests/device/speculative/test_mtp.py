"""MTP layers of models against an oracle without a cache, and rounds with them against single steps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.weights import load_params, read_mtp
from jpaged.device.compilation.lowering import sized_step
from jpaged.device.executor import JaxExecutor
from jpaged.device.mesh import serving_mesh
from jpaged.device.speculative.drafter import pool_bytes_per_block
from jpaged.engine.executor import BlockMoves, Move
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.kernels.matmul.quantized import QuantizedMatrix
from jpaged.models.eagle import mtp_config
from jpaged.models.hf_config import from_hf
from jpaged.models.model import Model
from tests.checkpoints.quantized.layouts import BLOCK, float8, write_tensors
from tests.checkpoints.quantized.test_layouts import assert_same_weights, is_quantized, weights_of
from tests.device import tiny_model
from tests.device.driver import Driver, Row, Sequence
from tests.device.speculative.mtp_rig import FAULTS, Served, serve
from tests.device.speculative.test_heads import begin, run_plain, run_rounds
from tests.device.speculative.test_rounds import HOW, NUM_TOKENS, PROMPTS, one_by_one, speculate
from tests.models.eagle_heads import write
from tests.models.mtp_layers import mtp_cases

CASES = mtp_cases()
SPECULATION = f'{{"method": "mtp", "num_speculative_tokens": {NUM_TOKENS}}}'
OPTIONS = tiny_model.OPTIONS.replace(
    max_num_batched_tokens=32, speculative_config=SPECULATION, num_scheduler_steps=1, swap_space=0.0
)


def sure(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A model that goes by its last token alone, and a layer that computes the same from it.

    Neither adds anything to what goes into its layers. The layer takes the embedding, and its norms are the model's.
    """
    found = {
        name: np.zeros_like(array) if name.endswith(("o_proj.weight", "down_proj.weight")) else array
        for name, array in tensors.items()
    }
    prefix, width = CASES["mimo"].prefix, CASES["mimo"].width
    token_norm, _, projection, norm = (f"{prefix}{name}.weight" for name in CASES["mimo"].names)
    found[token_norm], found[norm] = np.ones(width), found["model.norm.weight"]
    found[projection] = np.concatenate([np.zeros((width, width)), np.eye(width)], axis=1)
    return found


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = serve(tmp_path_factory.mktemp("mimo"), CASES["mimo"], OPTIONS)
    yield served
    served.executor.shutdown()


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A layer that is always right."""
    served = serve(tmp_path_factory.mktemp("certain"), CASES["mimo"], OPTIONS, edit=sure)
    yield served
    served.executor.shutdown()


def check_rounds(served: Served) -> None:
    """In several rounds of a dispatch, in several dispatches, and after steps of the model alone."""
    driver = Driver(served.executor)
    sequences = begin(driver)
    run_rounds(served, driver, sequences, 3)
    run_plain(driver, sequences)
    run_rounds(served, driver, sequences, 2)
    assert served.executor.num_compiles_after_warm_up == 0


def test_proposals_are_the_oracles(mimo: Served) -> None:
    check_rounds(mimo)


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.long
def test_proposals_of_each_family_are_the_oracles(name: str, tmp_path: Path) -> None:
    served = serve(tmp_path, CASES[name], OPTIONS, mode="scan" if name in ("mimo", "glm4_moe") else "loop")
    check_rounds(served)
    served.executor.shutdown()


@pytest.mark.parametrize("name", ["mimo", "deepseek_v3"])
@pytest.mark.long
def test_proposals_on_two_devices_are_the_oracles(name: str, tmp_path: Path) -> None:
    served = serve(tmp_path, CASES[name], OPTIONS.replace(tensor_parallel_size=2), num_devices=2)
    check_rounds(served)
    served.executor.shutdown()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_notices_a_fault(mimo: Served, fault: str) -> None:
    faulty = dataclasses.replace(mimo, mtp=dataclasses.replace(mimo.mtp, fault=fault))
    if fault == "states before the final norm":
        faulty = dataclasses.replace(mimo, target=dataclasses.replace(mimo.target, is_normed=False))
    driver = Driver(mimo.executor)
    with pytest.raises(AssertionError, match=r"assert \[\d+, \d+, \d+\] == \[\d+, \d+, \d+\]"):
        run_rounds(faulty, driver, begin(driver), 2)


def test_a_prompt_may_come_in_parts_and_its_blocks_be_copied(mimo: Served) -> None:
    driver = Driver(mimo.executor)
    size = driver.geometry.block_size
    prompts = tuple([int(token) for token in driver.rng.integers(1, 90, count)] for count in (2 * size + 5, 13))
    sequences = [driver.sequence(prompt) for prompt in prompts]
    for parts in ((size, 3), (3, 10), (size + 2, 0)):
        rows = [Row(sequence, count) for sequence, count in zip(sequences, parts, strict=True) if count]
        step = driver.run(rows)
        for place, row in enumerate(rows):
            if row.sequence.num_computed == row.sequence.prompt_len:
                row.sequence.tokens.append(step.token(place))
    copies = [driver.sequence([1]).blocks for _ in sequences]
    for sequence, blocks in zip(sequences, copies, strict=True):
        mimo.executor.move_blocks(BlockMoves(Move.COPY, sequence.blocks, blocks))
        sequence.blocks = blocks
    run_plain(driver, sequences)
    run_rounds(mimo, driver, sequences, 2)


def started(executor: JaxExecutor, *rows: int) -> tuple[Driver, list[Sequence]]:
    """Some rows after their prompts, greedy ones and sampled ones, whose next token is on the device."""
    driver = Driver(executor)
    sequences = [driver.sequence(list(PROMPTS[row]), **HOW[row]) for row in rows]
    driver.run([Row(sequence, len(sequence.tokens)) for sequence in sequences])
    return driver, sequences


@pytest.mark.long
def test_a_layer_that_is_always_right_has_every_proposal_accepted(certain: Served) -> None:
    """Sampled rows included: a proposal is sampled with the noise of its position."""
    rows = range(len(PROMPTS))
    want = one_by_one(*started(certain.executor, *rows), 3 * (NUM_TOKENS + 1))
    tokens, speculated = speculate(*started(certain.executor, *rows), num_rounds=3)
    assert tokens == want
    for counts_nr in (speculated.num_accepted_nr, speculated.num_proposed_nr):
        assert counts_nr[:3, : len(rows)].tolist() == [[NUM_TOKENS] * len(rows)] * 3


def test_tokens_are_those_of_single_steps(mimo: Served) -> None:
    """Rows run alone and with others, greedy and sampled, whatever the layer proposes."""
    rows = range(len(PROMPTS))
    want = one_by_one(*started(mimo.executor, *rows), 12)
    together, _ = speculate(*started(mimo.executor, *rows), num_rounds=3)
    for row in rows:
        (alone,), _ = speculate(*started(mimo.executor, row), num_rounds=3)
        assert together[row] == want[row][: len(together[row])]
        assert alone == together[row]


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_layer_is_counted_and_shares_the_models_matrices(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = write(tmp_path, case.case.config, {**case.model_tensors(), **case.tensors()})
    model = Model(from_hf(case.case.config), np.dtype(np.float32))
    mtp = Model(read_mtp(folder, model.config), model.dtype)
    loaded = load_params(mtp, folder, "loop")
    assert sorted(loaded) == ["eh_proj", "layers", "norm", "state_norm", "token_norm"]
    assert [leaf.shape for leaf in jax.tree.leaves(loaded)] == [
        leaf.shape for leaf in jax.tree.leaves(mtp.abstract_params("loop"))
    ]
    step, geometry = sized_step(model, OPTIONS, "loop", 8, serving_mesh(1), mtp)
    assert step.draft is not None
    assert step.draft.watched == (case.num_layers,)
    of_model, of_layer = step.layout.bytes_per_block, step.draft.step.layout.bytes_per_block
    assert step.layout.num_layers == (1 if name.startswith("qwen3") else case.num_layers)  # those with attention
    assert of_model == step.layout.num_layers * of_layer
    assert pool_bytes_per_block(step) == of_model + of_layer + 4 * case.width
    assert geometry.num_speculative_tokens == NUM_TOKENS


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_model_is_loaded_without_its_mtp_layer(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As long as the option does not name it."""
    case = CASES[name]
    both = write(tmp_path / "both", case.case.config, {**case.model_tensors(), **case.tensors()})
    alone = write(tmp_path / "alone", case.case.config, case.model_tensors())
    model = Model(from_hf(case.case.config), np.dtype(np.float32))
    found, want = (load_params(model, folder, "loop") for folder in (both, alone))
    assert jax.tree.all(
        jax.tree.map(lambda one, other: np.array_equal(np.asarray(one), np.asarray(other)), found, want)
    )
    assert not caplog.records


@pytest.mark.parametrize("name", ["mimo", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_a_quantized_layer_is_read_next_to_a_projection_that_is_not(name: str, tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: 8-bit floats with a scale for each block."""
    case, write_float8 = CASES[name], float8("block", scale=".weight_scale_inv")
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for tensor, array in {**case.model_tensors(), **case.tensors()}.items():
        stored[tensor] = plain[tensor] = array
        if tensor.endswith(("_proj.weight", "_proj_with_mqa.weight")) and f".{case.names[2]}." not in tensor:
            parts, plain[tensor] = write_float8(array, np.random.default_rng(0))
            del stored[tensor]
            stored |= {tensor.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    want_folder = write(tmp_path / "plain", case.case.config, plain)
    folder = tmp_path / "quantized"
    folder.mkdir()
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({**case.case.config, "quantization_config": scheme}))
    write_tensors(stored, folder)
    read = Model(read_mtp(folder, read_config(folder)), np.dtype(np.float32))
    other = Model(read_mtp(want_folder, read_config(want_folder)), read.dtype)
    got, want = load_params(read, folder, "loop"), load_params(other, want_folder, "loop")
    assert any(isinstance(leaf, QuantizedMatrix) for leaf in jax.tree.leaves(got, is_leaf=is_quantized))
    assert not is_quantized(got["eh_proj"]["kernel"])
    assert_same_weights(weights_of(got), want)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_checkpoint_without_the_layer_is_refused_by_name(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder, config = write(tmp_path, case.case.config, case.model_tensors()), from_hf(case.case.config)
    projection = f"{case.outer_prefix}{case.names[2]}.weight"
    with pytest.raises(InvalidArgument, match=f"has no MTP layer: tensor {projection} is missing"):
        read_mtp(folder, config)
    stored = {**case.model_tensors(), **case.tensors()}
    del stored[f"{case.outer_prefix}{case.names[0]}.weight"]
    folder = write(tmp_path / "part", case.case.config, stored)
    with pytest.raises(InvalidArgument, match=f"tensor {case.outer_prefix}{case.names[0]}.weight .* is missing"):
        load_params(Model(read_mtp(folder, config), np.dtype(np.float32)), folder, "loop")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Lfm2ForCausalLM"])
def test_a_model_of_a_family_without_mtp_layers_is_refused_by_name(name: str) -> None:
    config = dataclasses.replace(tiny_model.CONFIG, architecture=name)
    with pytest.raises(Unsupported, match=f"{name} has no MTP layer that is supported; models with one: Deepseek"):
        mtp_config(config)


def test_all_experts_of_a_layer_may_be_in_one_tensor(tmp_path: Path) -> None:
    """As in Qwen3.6; Qwen3.5 has a tensor for each."""
    case = CASES["qwen3_5_moe_text"]
    model, tensors = from_hf(case.case.config), {**case.model_tensors(), **case.tensors()}
    experts = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{case.prefix}mlp.experts.")}
    gates, ups, downs = (
        np.stack([tensor for name, tensor in experts.items() if f".{part}_proj." in name])
        for part in ("gate", "up", "down")
    )
    fused = {name: tensor for name, tensor in tensors.items() if name not in experts}
    fused[f"{case.prefix}mlp.experts.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
    fused[f"{case.prefix}mlp.experts.down_proj"] = downs
    found = []
    for name, stored in (("each", tensors), ("fused", fused)):
        folder = write(tmp_path / name, case.case.config, stored)
        found.append(load_params(Model(read_mtp(folder, model), np.dtype(np.float32)), folder, "loop"))
    (paths, leaves), (others, other_leaves) = (zip(*jax.tree.leaves_with_path(params), strict=True) for params in found)
    assert paths == others
    for one, other in zip(leaves, other_leaves, strict=True):
        np.testing.assert_array_equal(one, other)
