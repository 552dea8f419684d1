"""EAGLE-3 heads against an oracle in NumPy, and rounds with them against single steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.weights import load_params, read_head
from jpaged.device.compilation.lowering import sized_step
from jpaged.device.mesh import serving_mesh
from jpaged.device.speculative.drafter import HeadDrafter
from jpaged.engine.executor import BlockMoves, Detail, Move
from jpaged.errors import InternalError, InvalidArgument, Unsupported
from jpaged.models.hf_config import from_hf, head_from_hf
from jpaged.models.model import Model
from tests.device import tiny_model
from tests.device.driver import Driver, Row, Sequence
from tests.device.speculative.eagle_rig import HEAD, LLAMA, SIZES, Proposing, Served, likely_head, serve
from tests.device.speculative.test_rounds import NO_IDS, NUM_TOKENS, PROMPTS, one_by_one, speculate
from tests.models.eagle_heads import random_head, write
from tests.models.tiny import tiny_case

SPECULATION = f'{{"method": "eagle3", "model": "head", "num_speculative_tokens": {NUM_TOKENS}}}'
OPTIONS = tiny_model.OPTIONS.replace(
    max_num_batched_tokens=32, speculative_config=SPECULATION, num_scheduler_steps=1, swap_space=0.0
)
NUM_WANTED = 30


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A head that proposes 60 of 97 tokens, with an embedding of its own."""
    served = serve(tmp_path_factory.mktemp("random"), random_head(SIZES, 60), OPTIONS)
    yield served
    served.executor.shutdown()


@pytest.fixture(scope="module")
def likely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A head that proposes all tokens."""
    served = serve(tmp_path_factory.mktemp("likely"), likely_head(), OPTIONS)
    yield served
    served.executor.shutdown()


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same where layers are stacked, with the model's embedding, and other switches turned."""
    tensors = likely_head()
    del tensors["embed_tokens.weight"]
    by_output = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    config = {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": None, "eagle_config": by_output}
    how: dict[str, Any] = {"mode": "scan", "layer_name": "layers.0.", "watched": (1, 2, 4)}
    served = serve(tmp_path_factory.mktemp("scanned"), tensors, OPTIONS, config, **how)
    yield served
    served.executor.shutdown()


@pytest.fixture(params=["random", "likely", pytest.param("scanned", marks=pytest.mark.long)])
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


def begin(driver: Driver, prompts: tuple[list[int], ...] = PROMPTS) -> list[Sequence]:
    """Rows that are greedy, whose first token is on the device and behind their own."""
    sequences = [driver.sequence(list(prompt)) for prompt in prompts]
    outputs = driver.run([Row(sequence, len(sequence.tokens)) for sequence in sequences])
    for row, sequence in enumerate(sequences):
        sequence.tokens.append(outputs.token(row))
    return sequences


def run_rounds(served: Proposing, driver: Driver, sequences: list[Sequence], num_rounds: int) -> int:
    """Rounds, whose every proposal is the oracle's; how many were accepted."""
    jax.effects_barrier()
    served.proposals.clear()
    before = [len(sequence.tokens) for sequence in sequences]
    tokens, speculated = speculate(driver, sequences, num_rounds=num_rounds)
    jax.effects_barrier()
    for sequence, more in zip(sequences, tokens, strict=True):
        sequence.tokens.extend(more)
    assert len(served.proposals) == num_rounds
    for done_r, proposals_rk in served.proposals:
        for row, sequence in enumerate(sequences):
            known = sequence.tokens[: before[row] + int(done_r[row])]
            assert proposals_rk[row].tolist() == served.wanted(known, NUM_TOKENS)
    return int(speculated.num_accepted_nr.sum())


def run_plain(driver: Driver, sequences: list[Sequence]) -> None:
    """A step of each row."""
    rows = [Row(sequence, 1) for sequence in sequences]
    outputs = driver.run(rows)
    for row, sequence in enumerate(sequences):
        sequence.tokens.append(outputs.token(row))


@pytest.mark.thinned(3)
def test_proposals_are_the_oracles(served: Served) -> None:
    """In several rounds of a dispatch, in several dispatches, and behind steps of the model alone."""
    driver = Driver(served.executor)
    sequences = begin(driver)
    num_accepted = run_rounds(served, driver, sequences, 5)
    num_accepted += run_rounds(served, driver, sequences, 1)
    for _ in range(2):
        run_plain(driver, sequences)
    num_accepted += run_rounds(served, driver, sequences, 2)
    assert num_accepted > 10 or served.head.norm_before_residual or "d2t" in served.head.tensors


@pytest.mark.parametrize("fault", ["another layer", "states as they are", "tokens that are not shifted", "no ids"])
def test_the_oracle_notices_a_fault(random: Served, fault: str) -> None:
    head = random.head
    unmapped = {name: tensor for name, tensor in head.tensors.items() if name != "d2t"}
    faults = {
        "another layer": dataclasses.replace(random, watched=(0, 1, 4)),
        "states as they are": dataclasses.replace(random, head=dataclasses.replace(head, skips_norm=True)),
        "tokens that are not shifted": dataclasses.replace(random, head=dataclasses.replace(head, shifts=False)),
        "no ids": dataclasses.replace(random, head=dataclasses.replace(head, tensors=unmapped)),
    }
    driver = Driver(random.executor)
    with pytest.raises(AssertionError, match=r"assert \[\d+, \d+, \d+\] == \[\d+, \d+, \d+\]"):
        run_rounds(faults[fault], driver, begin(driver), 3)


@pytest.mark.long
def test_a_prompt_may_come_in_parts_and_beside_others(served: Served) -> None:
    """Parts that end within blocks and with them, of rows that begin and of others that go on."""
    driver = Driver(served.executor)
    block_size = driver.geometry.block_size
    prompts = tuple([int(token) for token in driver.rng.integers(1, 90, size)] for size in (21, 13, 30, 2))
    sequences = [driver.sequence(list(prompt)) for prompt in prompts]
    outputs: dict[int, int] = {}
    for parts in ((block_size, 3, 1, 0), (2, 5, 2 * block_size - 1, 0), (1, 5, 5, 1), (10, 0, 9, 1)):
        rows = [Row(sequence, count) for sequence, count in zip(sequences, parts, strict=True) if count]
        step = driver.run(rows)
        outputs |= {sequences.index(row.sequence): step.token(place) for place, row in enumerate(rows)}
    for row, sequence in enumerate(sequences):
        assert sequence.num_computed == len(sequence.tokens)
        sequence.tokens.append(outputs[row])
    run_plain(driver, sequences)
    run_rounds(served, driver, sequences, 3)


def test_tokens_that_are_not_on_the_host_yet_are_shown(likely: Served) -> None:
    """Steps whose inputs are the tokens that the step before sampled."""
    driver = Driver(likely.executor)
    sequences = begin(driver)
    more = one_by_one(driver, sequences, 4)
    for sequence, tokens in zip(sequences, more, strict=True):
        sequence.tokens.extend(tokens)
    assert run_rounds(likely, driver, sequences, 2) > 0


def test_a_prefix_that_another_row_has_run_is_used(likely: Served) -> None:
    """The state of the last place of its last block among it."""
    driver = Driver(likely.executor)
    block_size = driver.geometry.block_size
    prompt = [int(token) for token in driver.rng.integers(1, 90, 2 * block_size)]
    (first,) = begin(driver, ([*prompt, 4, 7],))
    run_rounds(likely, driver, [first], 3)
    second = driver.sequence([*prompt, 4, 9, 2])
    second.blocks[:2], second.num_computed = first.blocks[:2], 2 * block_size
    second.tokens.append(driver.run([Row(second, 3)]).token(0))
    run_rounds(likely, driver, [second], 3)
    for position in range(2, 5):  # what the first row has decoded is a prefix, too
        end = position * block_size
        if end < len(first.tokens) - 1:
            third = driver.sequence([*first.tokens[:end], first.tokens[end]])
            third.blocks[:position], third.num_computed = first.blocks[:position], end
            third.tokens.append(driver.run([Row(third, 1)]).token(0))
            run_rounds(likely, driver, [third], 1)


def test_a_copy_is_one_of_keys_and_states(likely: Served) -> None:
    driver = Driver(likely.executor)
    sequences = begin(driver)
    copies = [driver.sequence([1]).blocks for _ in range(2)]
    moves = BlockMoves(Move.COPY, [*sequences[0].blocks, *sequences[3].blocks], [*copies[0], *copies[1]])
    likely.executor.move_blocks(moves)
    sequences[0].blocks, sequences[3].blocks = copies
    run_rounds(likely, driver, sequences, 2)


def test_nan_in_the_pool_of_a_head_changes_no_token(likely: Served) -> None:
    driver = Driver(likely.executor)
    sequences = begin(driver)
    want = one_by_one(driver, sequences, 12)
    driver = Driver(likely.executor)
    sequences = begin(driver)
    assert isinstance(likely.executor._drafter, HeadDrafter)
    pool = likely.executor._drafter._pool
    pool.put(jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), pool.take()))
    tokens, _ = speculate(driver, sequences, num_rounds=3)
    pool.put(jax.tree.map(jnp.zeros_like, pool.take()))
    assert tokens == [one[: len(found)] for one, found in zip(want, tokens, strict=True)]


def test_rows_that_end_leave_the_others_as_they_are(likely: Served) -> None:
    driver = Driver(likely.executor)
    sequences = begin(driver)
    want = [[*sequence.tokens] for sequence in sequences]
    for tokens, more in zip(want, one_by_one(driver, sequences, 20), strict=True):
        tokens.extend(more)
    driver = Driver(likely.executor)
    sequences = begin(driver)
    left, ending_ids_rx = [16, 3, 16, 1], NO_IDS.copy()
    ending_ids_rx[2, 5] = want[2][len(PROMPTS[2]) + 3]
    found, _ = speculate(driver, sequences, left=left, ending_ids_rx=ending_ids_rx, num_rounds=16)
    for row, (sequence, more) in enumerate(zip(sequences, found, strict=True)):
        assert sequence.tokens + more == want[row][: len(sequence.tokens) + len(more)]
        assert len(more) == (left[row] if row != 2 else len(more)) and len(more) <= left[row]
        sequence.tokens.extend(more)
    run_rounds(likely, driver, sequences[:1], 2)


def test_nothing_was_compiled_after_warm_up(served: Served) -> None:
    assert served.executor.num_compiles_after_warm_up == 0


def test_tokens_are_shown_with_their_states_alone(likely: Served) -> None:
    driver = Driver(likely.executor)
    rows = [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(begin(driver))]
    inputs, sampling, left = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS), np.ones(8, np.int32)
    with pytest.raises(InternalError, match="the head received 8 tokens without their hidden states"):
        likely.executor.speculate(inputs, sampling, NO_IDS, left, num_rounds=1, unseen=[inputs])


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"vocab_size": 96, "draft_vocab_size": 60}, "vocabulary has 96 tokens and the model's has 97"),
        ({"target_hidden_size": 64}, "hidden states of size 64, but the model's have size 32"),
        ({"hidden_size": 64}, "has no embed_tokens, and the model's have size 32, not 64"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, "input of layers 0, 2, 5, but the model has 4"),
    ],
)
def test_a_head_that_does_not_go_with_the_model_is_refused_by_name(config: dict[str, Any], problem: str) -> None:
    stored = head_from_hf({**HEAD, **config}).stored_as(["d2t"])
    model = Model(from_hf(LLAMA), np.dtype(np.float32))
    with pytest.raises(InvalidArgument, match=problem) as raised:
        sized_step(model, OPTIONS, "loop", 8, serving_mesh(1), Model(stored, model.dtype))
    assert raised.value.field == "speculative_config.model"


def test_a_draft_model_with_recurrent_state_is_refused_by_name() -> None:
    model, lfm2 = Model(from_hf(LLAMA), np.dtype(np.float32)), tiny_case("lfm2").config
    draft = Model(from_hf({**lfm2, "vocab_size": LLAMA["vocab_size"]}), np.dtype(np.float32))
    options = OPTIONS.replace(
        speculative_config='{"method": "draft_model", "model": "lfm2", "num_speculative_tokens": 2}'
    )
    with pytest.raises(InvalidArgument, match="Lfm2ForCausalLM has recurrent state, which draft models") as raised:
        sized_step(model, options, "loop", 8, serving_mesh(1), draft)
    assert raised.value.field == "speculative_config.model"


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("fc.weight", None, r"tensor fc.weight \[32, 96\] is missing"),
        ("midlayer.hidden_norm.weight", None, r"tensor midlayer.hidden_norm.weight \[32\] is missing"),
        ("midlayer.self_attn.q_proj.weight", np.zeros((64, 32)), r"shape \[64, 32\]; config.json requires \[64, 64\]"),
        ("d2t", None, r"tensor d2t \[60\] is missing"),
        ("d2t", np.full(60, 90), "has duplicate token ids, or ids beyond the vocabulary of 97"),
        ("d2t", -np.arange(60), "has duplicate token ids"),
        ("d2t", np.zeros(60), "tensor d2t is float32; it must contain integers"),
    ],
)
def test_a_tensor_that_a_head_lacks_or_that_is_malformed_is_named(
    name: str, tensor: np.ndarray | None, problem: str, tmp_path: Path
) -> None:
    tensors = {**random_head(SIZES, 60), name: tensor}
    stored = {key: each for key, each in tensors.items() if each is not None}
    folder = write(tmp_path, {**HEAD, "draft_vocab_size": 60}, stored)
    with pytest.raises((InvalidArgument, Unsupported), match=problem):
        load_params(Model(read_head(folder), np.dtype(np.float32)), folder, "loop")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    write(tmp_path, HEAD, {}).joinpath("model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(Unsupported, match="only safetensors weights are supported; convert the checkpoint"):
        read_head(tmp_path)
