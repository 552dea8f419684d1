"""Rounds with a draft model against single steps: the same tokens, whatever the draft says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.device.executor import JaxExecutor
from jpaged.device.model_runner import DraftPool, KVPool
from jpaged.device.speculative.step import num_pinned
from jpaged.engine.executor import (
    BANNED_WIDTH,
    BEYOND_TOKENS,
    I32,
    BlockMoves,
    Detail,
    Move,
    Speculated,
    StepInputs,
    StepOutputs,
)
from jpaged.errors import InternalError
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.testing.fake_steps import step_at
from tests.device import tiny_model
from tests.device.driver import Driver, Row, Sequence
from tests.on_demand import programs_on_demand

NUM_ROWS, NUM_TOKENS, NUM_ROUNDS = 8, 3, 5
SPECULATION = f'{{"method": "draft_model", "model": "draft", "num_speculative_tokens": {NUM_TOKENS}}}'
OPTIONS = tiny_model.OPTIONS.replace(max_num_batched_tokens=32, speculative_config=SPECULATION)
NO_IDS = np.full((NUM_ROWS, BANNED_WIDTH), BEYOND_TOKENS, np.int32)
MANY = 30
"""Tokens that a row may sample where no test bounds them."""
PROMPTS = ([3, 5, 8], [4, 5, 7, 9, 11], [5], [6, 7, 8, 9, 10, 11, 12])
HOW: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2**40 + 1},
    {},
)


def small_draft() -> tuple[Model, Params]:
    """Another model of one layer, which knows nothing of what the model says."""
    config = dataclasses.replace(tiny_model.CONFIG, num_layers=1, hidden_size=16, intermediate_size=24, num_heads=2)
    model = Model(dataclasses.replace(config, num_kv_heads=1, head_dim=8), jnp.dtype("float32"))
    return model, model.init_params(jax.random.key(3), "loop")


def spoilt_draft() -> tuple[Model, Params]:
    """The model itself, all of whose numbers are NaN."""
    nan = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), tiny_model.params())
    return tiny_model.model(), nan


def make_executor(draft: tuple[Model, Params] | None, options: EngineConfig = OPTIONS) -> JaxExecutor:
    with programs_on_demand():
        executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), options, draft=draft)
        executor.warm_up(tiny_model.quiet)
    return executor


@pytest.fixture(scope="module")
def same() -> Iterator[JaxExecutor]:
    """A draft that is the model itself."""
    executor = make_executor((tiny_model.model(), tiny_model.params()))
    yield executor
    executor.shutdown()


@pytest.fixture(scope="module")
def other() -> Iterator[JaxExecutor]:
    executor = make_executor(small_draft())
    yield executor
    executor.shutdown()


@pytest.fixture(params=["same", "other"])
def executor(request: pytest.FixtureRequest) -> JaxExecutor:
    found: JaxExecutor = request.getfixturevalue(request.param)
    return found


def begin(driver: Driver) -> list[Sequence]:
    """Rows of different lengths whose first token is on the device: greedy ones, and two that are sampled."""
    return begin_seen(driver)[0]


def begin_seen(driver: Driver) -> tuple[list[Sequence], StepInputs]:
    """As `begin`, and the step that shows the draft what they begin with."""
    sequences = [driver.sequence(list(prompt), **how) for prompt, how in zip(PROMPTS, HOW, strict=True)]
    rows = [Row(sequence, len(sequence.tokens)) for sequence in sequences]
    inputs = driver.inputs(rows)
    driver.run(rows)
    return sequences, inputs


def speculate(
    driver: Driver,
    sequences: list[Sequence],
    *,
    left: int | list[int] = MANY,
    ending_ids_rx: I32 = NO_IDS,
    num_rounds: int = NUM_ROUNDS,
    unseen: tuple[StepInputs, ...] = (),
) -> tuple[list[list[int]], Speculated]:
    """Rounds of these rows, whose inputs are the last tokens in their order; the tokens of each."""
    outputs, speculated = start(
        driver, sequences, left=left, ending_ids_rx=ending_ids_rx, num_rounds=num_rounds, unseen=unseen
    )
    counts = speculated.num_tokens_r.tolist()
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=False)):
        sequence.num_computed += count
        driver.keep_state(sequence, speculated.state_slots_r.item(row))
    assert counts[len(sequences) :] == [0] * (NUM_ROWS - len(sequences))
    assert outputs.is_finite_rn.all()
    return [
        outputs.token_ids_rn[row, :count].tolist() for row, count in enumerate(counts[: len(sequences)])
    ], speculated


def start(
    driver: Driver,
    sequences: list[Sequence],
    *,
    left: int | list[int],
    ending_ids_rx: I32,
    num_rounds: int,
    unseen: tuple[StepInputs, ...] = (),
) -> tuple[StepOutputs, Speculated]:
    rows = [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(sequences)]
    inputs, sampling = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS)
    sampling.rows_r["is_padding_r"][len(rows) :] = 1
    num_left_r = np.zeros(NUM_ROWS, np.int32)
    num_left_r[: len(rows)] = left
    handle = driver.executor.speculate(inputs, sampling, ending_ids_rx, num_left_r, num_rounds, unseen)
    outputs = driver.executor.collect(handle)
    assert outputs.speculated is not None
    return outputs, outputs.speculated


def one_by_one(driver: Driver, sequences: list[Sequence], num_steps: int = MANY) -> list[list[int]]:
    """The tokens of as many single steps, each of which is a forward and a sample."""
    executor, rows = driver.executor, [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(sequences)]
    first = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS)
    columns = []
    for place in range(num_steps):
        inputs, sampling = step_at(place, *first, driver.geometry.block_size)
        columns.append(executor.collect(executor.sample(executor.forward(inputs), sampling)).token_ids_rn[:, 0])
    for sequence in sequences:
        sequence.num_computed += num_steps
    found: list[list[int]] = np.stack(columns, axis=1)[: len(sequences)].tolist()
    return found


@pytest.fixture(scope="module")
def want(other: JaxExecutor) -> list[list[int]]:
    """What each row samples, one step after another."""
    driver = Driver(other)
    return one_by_one(driver, begin(driver))


@pytest.mark.long
@pytest.mark.thinned(2)
def test_tokens_are_those_of_single_steps_over_several_dispatches(executor: JaxExecutor, want: list[list[int]]) -> None:
    """Also where forwards and decodes of the same rows go on behind one dispatch, and another behind those."""
    driver = Driver(executor)
    sequences = begin(driver)
    found: list[list[int]] = [[] for _ in PROMPTS]
    for num_rounds in (1, 2, 1):
        tokens, speculated = speculate(driver, sequences, num_rounds=num_rounds)
        assert speculated.num_rounds == num_rounds
        for so_far, more in zip(found, tokens, strict=True):
            so_far.extend(more)
    for so_far, more in zip(found, one_by_one(driver, sequences, num_steps=2), strict=True):
        so_far.extend(more)
    tokens, _ = speculate(driver, sequences, num_rounds=1)
    for so_far, more, tokens_of_row in zip(found, tokens, want, strict=True):
        so_far.extend(more)
        assert so_far == tokens_of_row[: len(so_far)]
        assert len(so_far) >= 5 + 2
    assert len({token for tokens in want for token in tokens}) > 5


def test_everything_is_accepted_of_a_draft_that_is_the_model(same: JaxExecutor, want: list[list[int]]) -> None:
    """For which its pool has to have the keys of all tokens, those of the last proposal of each round as well."""
    driver = Driver(same)
    sequences, shown = begin_seen(driver)
    for num_rounds in (2, 1, 3):
        before = [sequence.num_computed - len(sequence.tokens) for sequence in sequences]
        unseen = (shown,) if num_rounds == 2 else ()
        tokens, speculated = speculate(driver, sequences, num_rounds=num_rounds, unseen=unseen)
        assert [len(one) for one in tokens] == [num_rounds * (NUM_TOKENS + 1)] * len(PROMPTS)
        for row, (begin_at, one) in enumerate(zip(before, tokens, strict=True)):
            assert one == want[row][begin_at : begin_at + len(one)]
        for counts_nr in (speculated.num_proposed_nr, speculated.num_accepted_nr):
            assert counts_nr[:num_rounds, : len(PROMPTS)].tolist() == [[NUM_TOKENS] * len(PROMPTS)] * num_rounds
            assert not counts_nr[num_rounds:].any()
            assert not counts_nr[:, len(PROMPTS) :].any()


def test_a_draft_that_knows_nothing_is_seldom_right(other: JaxExecutor, want: list[list[int]]) -> None:
    driver = Driver(other)
    tokens, speculated = speculate(driver, begin(driver))
    assert tokens == [one[: len(found)] for one, found in zip(want, tokens, strict=True)]
    accepted = speculated.num_accepted_nr.sum(axis=0)
    assert [len(found) for found in tokens] == (accepted[: len(tokens)] + NUM_ROUNDS).tolist()
    assert accepted.sum() < NUM_ROUNDS * len(tokens)
    assert speculated.num_proposed_nr[:NUM_ROUNDS, : len(tokens)].min() == NUM_TOKENS


@pytest.mark.long
def test_nan_in_the_draft_changes_no_token(want: list[list[int]]) -> None:
    executor = make_executor(spoilt_draft())
    driver = Driver(executor)
    tokens, speculated = speculate(driver, begin(driver))
    assert tokens == [one[: len(found)] for one, found in zip(want, tokens, strict=True)]
    assert speculated.num_rounds == NUM_ROUNDS
    executor.shutdown()


def test_nan_in_the_pool_of_the_draft_changes_no_token(same: JaxExecutor, want: list[list[int]]) -> None:
    driver = Driver(same)
    sequences = begin(driver)
    _, pool = pools(same)
    pool.put(jnp.full_like(pool.take(), jnp.nan))
    tokens, speculated = speculate(driver, sequences, num_rounds=2)
    assert tokens == [one[: len(found)] for one, found in zip(want, tokens, strict=True)]
    assert speculated.num_accepted_nr.sum() < 2 * NUM_TOKENS * len(PROMPTS)


def test_a_row_ends_with_the_token_that_ends_it(executor: JaxExecutor, want: list[list[int]]) -> None:
    """In the middle of a round and of a dispatch, whether the token was proposed or not; the others go on."""
    ends, ending_ids_rx = {0: 1, 2: 5}, NO_IDS.copy()
    for row, end in ends.items():
        ending_ids_rx[row, 7 * row] = want[row][end]
    driver = Driver(executor)
    sequences = begin(driver)
    tokens, _ = speculate(driver, sequences, ending_ids_rx=ending_ids_rx, num_rounds=7)
    for row, found in enumerate(tokens):
        assert found == want[row][: len(found)]
        assert len(found) == want[row].index(want[row][ends[row]]) + 1 if row in ends else len(found) >= 7
    again, after = speculate(driver, sequences, left=3, ending_ids_rx=ending_ids_rx, num_rounds=1)
    assert [len(one) > 0 for one in again] == [False, True, False, True]
    assert after.num_proposed_nr[0, : len(PROMPTS)].tolist() == [0, 2, 0, 2]


def test_nothing_is_run_when_all_rows_have_ended(executor: JaxExecutor) -> None:
    driver = Driver(executor)
    _, speculated = speculate(driver, begin(driver), left=[0, -1, 0, 0])
    assert speculated.num_rounds == 0


@pytest.mark.parametrize("left", [[1, 2, 3, 4], [5, 13, 6, 1]])
def test_nothing_is_written_behind_the_room_that_a_row_has(executor: JaxExecutor, left: list[int]) -> None:
    driver = Driver(executor)
    sequences = begin(driver)
    begins = [sequence.num_computed for sequence in sequences]
    for pool in pools(executor):
        pool.put(jnp.full_like(pool.take(), 7.0))
    speculate(driver, sequences, left=left, num_rounds=13)
    first, of_draft = (blocks_of(pool, executor.geometry.num_blocks) for pool in pools(executor))
    block_size = executor.geometry.block_size
    for content in (first, of_draft):
        mine = [block for sequence in sequences for block in sequence.blocks]
        assert (np.delete(content, [0, *mine], axis=0) == 7.0).all()
        for sequence, position, count in zip(sequences, begins, left, strict=True):
            slots = content[sequence.blocks].reshape(len(sequence.blocks) * block_size, -1)
            was_written = (slots != 7.0).any(axis=1)
            assert not was_written[:position].any()
            assert not was_written[position + count :].any()
            assert was_written[position : position + count].all() or content is of_draft


def test_budgets_end_rows_where_single_steps_would_be(executor: JaxExecutor, want: list[list[int]]) -> None:
    driver = Driver(executor)
    left = [1, 9, 4, 6]
    tokens, speculated = speculate(driver, begin(driver), left=left, num_rounds=16)
    assert tokens == [one[:count] for one, count in zip(want, left, strict=True)]
    proposed = speculated.num_proposed_nr[:, : len(left)]
    assert proposed[0].tolist() == [0, 3, 3, 3]
    assert (speculated.num_accepted_nr[:, : len(left)] <= proposed).all()


def test_the_next_forward_finds_the_last_tokens(executor: JaxExecutor, want: list[list[int]]) -> None:
    driver = Driver(executor)
    sequences = begin(driver)
    tokens, _ = speculate(driver, sequences, num_rounds=2)
    more = one_by_one(driver, sequences, num_steps=1)
    for row, (so_far, (token,)) in enumerate(zip(tokens, more, strict=True)):
        assert token == want[row][len(so_far)]


def test_a_copy_is_one_of_the_drafts_keys_too(same: JaxExecutor, want: list[list[int]]) -> None:
    driver = Driver(same)
    sequences, shown = begin_seen(driver)
    first, _ = speculate(driver, sequences, num_rounds=1, unseen=(shown,))
    copies = [driver.sequence([1]).blocks for _ in range(2)]
    same.move_blocks(BlockMoves(Move.COPY, [*sequences[0].blocks, *sequences[3].blocks], [*copies[0], *copies[1]]))
    sequences[0].blocks, sequences[3].blocks = copies
    tokens, speculated = speculate(driver, sequences, num_rounds=2)
    assert [[*a, *b] for a, b in zip(first, tokens, strict=True)] == [one[: 3 * (NUM_TOKENS + 1)] for one in want]
    assert speculated.num_accepted_nr[:2, : len(PROMPTS)].min() == NUM_TOKENS


def test_nothing_was_compiled_after_warm_up(executor: JaxExecutor) -> None:
    assert executor.num_compiles_after_warm_up == 0


def test_rounds_without_a_draft_are_refused(same: JaxExecutor) -> None:
    plain = JaxExecutor.create(tiny_model.model(), tiny_model.params(), tiny_model.OPTIONS)
    driver = Driver(same)
    rows = [Row(sequence, 1, prev_sampled_row=i) for i, sequence in enumerate(begin(driver))]
    inputs, sampling, left = driver.inputs(rows), driver.sampling(rows, detail=Detail.TOKENS), np.ones(8, np.int32)
    with pytest.raises(InternalError, match="require a draft model"):
        plain.speculate(inputs, sampling, NO_IDS, left, num_rounds=1)
    with pytest.raises(InternalError, match="17 speculative rounds exceed the limit of 16"):
        same.speculate(inputs, sampling, NO_IDS, left, num_rounds=17)
    plain.shutdown()


def pools(executor: JaxExecutor) -> tuple[KVPool, DraftPool]:
    assert executor._drafter is not None
    return executor._pool, executor._drafter._pool


def blocks_of(pool: DraftPool, num_blocks: int) -> np.ndarray:
    """What the first layer holds in each block."""
    array = pool.take()
    content = np.array(array[: num_blocks + 1])
    pool.put(array)
    return content


def pinned(positions: list[int], length: int) -> list[int]:
    found: list[int] = np.asarray(num_pinned(jnp.array(positions), length)).tolist()
    return found


@pytest.mark.parametrize("length", [1000, 1001, 1500, 2333, 3510, 4000])
def test_rounds_of_a_pinned_length_have_that_mean(length: int) -> None:
    position, counts = 12, list[int]()
    while position < 400:
        counts.append(1 + pinned([position], length)[0])
        position += counts[-1]
    assert set(counts) <= set(range(1, -(-length // 1000) + 1))
    assert sum(counts[1:]) / len(counts[1:]) == pytest.approx(length / 1000, abs=2 / len(counts))


def test_a_pinned_length_is_accepted_whatever_the_model_samples(want: list[list[int]]) -> None:
    """Also of a draft that is seldom right: its proposals are then the tokens, and the model's sample the last one."""
    rule = '"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}'
    options = OPTIONS.replace(speculative_config=f"{SPECULATION[:-1]}, {rule}")
    executor = make_executor(small_draft(), options)
    try:
        driver = Driver(executor)
        sequences = begin(driver)
        starts = [len(sequence.tokens) for sequence in sequences]
        tokens, speculated = speculate(driver, sequences, num_rounds=4)
        positions = np.array(starts)
        for accepted_r in speculated.num_accepted_nr[:4, : len(PROMPTS)]:
            assert accepted_r.tolist() == pinned(positions.tolist(), 2500)
            positions = positions + accepted_r + 1
        assert [len(one) for one in tokens] == (positions - np.array(starts)).tolist()
        assert speculated.num_proposed_nr[:4, : len(PROMPTS)].min() == NUM_TOKENS
        assert all(one != right[: len(one)] for one, right in zip(tokens, want, strict=True))
    finally:
        executor.shutdown()
