"""The executor against a dense forward pass of the same model, and its promises to the engine."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.device.executor import JaxExecutor
from jpaged.engine.executor import Detail, Executor, StepInputs
from jpaged.errors import InternalError, InvalidArgument
from jpaged.models.stack import LayerMode
from tests.device import tiny_model
from tests.device.driver import Driver, Row, Sequence
from tests.models import dense


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, tiny_model.CONFIG.vocab_size, length).tolist()


def dense_logprobs(sequence: Sequence) -> np.ndarray:
    """Log-probabilities [tokens, V] after every token of a sequence, recomputed from nothing at one padded shape."""
    token_ids = np.zeros(64, np.int32)
    token_ids[: len(sequence.tokens)] = sequence.tokens
    logits = dense.logits(tiny_model.model(), tiny_model.params(), token_ids, sequence.prompt_len)
    return np.asarray(jax.nn.log_softmax(logits))[: len(sequence.tokens)]


def step_randomly(driver: Driver, sequences: list[Sequence], rng: np.random.Generator) -> None:
    """One step of random chunks and decodes; every token that ends its sequence's known tokens appends a new one."""
    chosen = [sequences[i] for i in rng.permutation(len(sequences))[: rng.integers(1, 5)]]
    budget, rows = driver.geometry.buckets.tokens[-1], []
    for sequence in chosen:
        left = min(budget, len(sequence.tokens) - sequence.num_computed)
        if left:
            rows.append(Row(sequence, int(rng.integers(1, left + 1))))
            budget -= rows[-1].num_tokens
    outputs = driver.run(rows)
    for i, row in enumerate(rows):
        sequence = row.sequence
        want = dense_logprobs(sequence)[sequence.num_computed - 1]
        token = int(outputs.token_ids_rn[i, 0])
        assert outputs.logprob(i) == pytest.approx(want[token], abs=1e-4)
        assert outputs.position(i, 0).chosen.rank == 1
        assert want[token] >= want.max() - 1e-4
        if sequence.num_computed == len(sequence.tokens) < driver.geometry.max_model_len:
            sequence.tokens.append(token)


def is_alive(sequence: Sequence) -> bool:
    return sequence.num_computed < len(sequence.tokens)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.long
def test_chunked_prefill_and_decode_mixes_give_the_dense_logits(driver: Driver, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [driver.sequence(prompt(int(n), seed)) for n in rng.integers(1, 50, 5)]
    for _ in range(40):
        step_randomly(driver, [s for s in sequences if is_alive(s)], rng)


@pytest.mark.long
def test_scan_over_layers_computes_the_same() -> None:
    scheduler = dataclasses.replace(tiny_model.OPTIONS.scheduler, max_num_batched_tokens=8)
    options = dataclasses.replace(tiny_model.OPTIONS, scheduler=scheduler)
    executor = tiny_model.warm_executor(options, layer_mode="scan")
    driver, rng = Driver(executor), np.random.default_rng(1)
    sequences = [driver.sequence(prompt(n)) for n in (13, 4, 30)]
    for _ in range(12):
        step_randomly(driver, sequences, rng)
    executor.shutdown()


def test_nothing_is_compiled_while_serving(driver: Driver, executor: JaxExecutor) -> None:
    rng = np.random.default_rng(9)
    sequences = [driver.sequence(prompt(int(n)), temperature=1.0, top_p=0.9, seed=3) for n in rng.integers(1, 40, 5)]
    for i in range(30):
        rows = [Row(s, int(rng.integers(1, min(4, len(s.tokens) - s.num_computed) + 1))) for s in sequences[:4]]
        outputs = driver.run(rows, detail=Detail(i % 3))
        for row, token in zip(rows, outputs.token_ids_rn[:, 0], strict=False):
            if not is_alive(row.sequence):
                row.sequence.tokens.append(int(token))
        sequences = [*sequences[1:], sequences[0]]
    assert executor.num_compiles_after_warm_up == 0


def test_tokens_that_stay_on_the_device_are_those_that_were_sampled(driver: Driver) -> None:
    """Three sequences decode without the host; their rows change places, and each names its place before."""
    by_host = [driver.sequence(prompt(n), temperature=1.0, seed=n) for n in (5, 3, 7)]
    by_device = [driver.sequence(prompt(n), temperature=1.0, seed=n) for n in (5, 3, 7)]
    sampled = driver.run([Row(s, s.prompt_len) for s in by_host]).token_ids_rn[:3, 0].tolist()
    for _ in range(6):
        for sequence, token in zip(by_host, sampled, strict=True):
            sequence.tokens.append(token)
        sampled = driver.run([Row(s, 1) for s in by_host]).token_ids_rn[:3, 0].tolist()

    driver.run([Row(s, s.prompt_len) for s in by_device])
    places = [0, 1, 2]
    for step in range(6):
        order = np.roll([0, 1, 2], step).tolist()
        rows = [Row(by_device[i], 1, prev_sampled_row=places[i]) for i in order]
        outputs = driver.run(rows)
        places = [order.index(i) for i in range(3)]
    assert [int(outputs.token_ids_rn[places[i], 0]) for i in range(3)] == sampled


def test_a_step_can_be_dispatched_before_the_last_is_collected(driver: Driver, executor: JaxExecutor) -> None:
    sequence = driver.sequence(prompt(6))
    handles = [driver.start([Row(sequence, 6)])]
    sequence.num_computed = 6
    for _ in range(5):
        handles.append(driver.start([Row(sequence, 1, prev_sampled_row=0)]))
        sequence.num_computed += 1
    tokens = [int(executor.collect(handle).token_ids_rn[0, 0]) for handle in handles]
    assert tokens == dense.greedy(tiny_model.model(), tiny_model.params(), prompt(6), 6)


def test_tokens_do_not_depend_on_the_batch(driver: Driver) -> None:
    def generate(num_others: int, chunk: int) -> list[int]:
        sequence = driver.sequence(prompt(9), temperature=0.8, top_p=0.9, seed=2**40 + 1)
        others = [driver.sequence(prompt(3, i), temperature=1.0, seed=i) for i in range(num_others)]
        while len(sequence.tokens) < 20:
            rows = [Row(s, min(chunk, len(s.tokens) - s.num_computed)) for s in [*others, sequence]]
            for row, token in zip(rows, driver.run(rows).token_ids_rn[:, 0], strict=False):
                if not is_alive(row.sequence):
                    row.sequence.tokens.append(int(token))
        for s in [*others, sequence]:
            driver.release(s)
        return sequence.tokens

    alone = generate(0, 9)
    assert generate(3, 2) == alone
    assert generate(1, 4) == alone


def test_alternatives_come_in_order_and_with_the_dense_logprobs(driver: Driver) -> None:
    sequence = driver.sequence(prompt(10))
    outputs = driver.run([Row(sequence, 10)], detail=Detail.TOP_LOGPROBS)
    want = dense_logprobs(sequence)[-1]
    assert outputs.top_ids_rnk is not None
    assert outputs.top_logprobs_rnk is not None
    np.testing.assert_allclose(
        outputs.top_logprobs_rnk[0, 0], np.sort(want)[::-1][: outputs.top_ids_rnk.shape[2]], atol=1e-4
    )
    np.testing.assert_allclose(outputs.top_logprobs_rnk[0, 0], want[outputs.top_ids_rnk[0, 0]], atol=1e-4)
    assert driver.run([Row(driver.sequence(prompt(3)), 3)]).top_ids_rnk is None


def test_padding_writes_nothing_but_the_null_block(executor: JaxExecutor, driver: Driver) -> None:
    """A context is unharmed by steps whose padding is many times its length."""
    kept = driver.sequence(prompt(20))
    driver.run([Row(kept, 16)])
    driver.run([Row(kept, 4)])
    for seed in range(5):
        other = driver.sequence(prompt(1, seed))
        driver.run([Row(other, 1)])
        driver.release(other)
    kept.tokens.append(5)
    outputs = driver.run([Row(kept, 1)])
    assert outputs.logprob(0) == pytest.approx(dense_logprobs(kept)[-1].max(), abs=1e-4)


def _change(inputs: StepInputs, **changes: object) -> StepInputs:
    return dataclasses.replace(inputs, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("detail", list(Detail))
def test_a_row_whose_keys_are_nan_is_not_sound_and_the_others_are_as_ever(
    driver: Driver, executor: JaxExecutor, detail: Detail
) -> None:
    sequences = [driver.sequence(prompt(4, i), temperature=i * 0.5, seed=7) for i in range(3)]
    rows = [Row(sequence, 4) for sequence in sequences]
    undisturbed = driver.run(rows, detail=detail)
    assert undisturbed.is_finite_rn[:3].all()
    for sequence in sequences:
        sequence.num_computed = 3
    pool = executor._pool.take()
    executor._pool.put(pool.at[sequences[1].blocks[0]].set(np.nan))
    disturbed = driver.run([Row(sequence, 1) for sequence in sequences], detail=detail)
    assert disturbed.is_finite_rn[:3, 0].tolist() == [True, False, True]
    assert disturbed.token_ids_rn[[0, 2], 0].tolist() == undisturbed.token_ids_rn[[0, 2], 0].tolist()
    for sequence in sequences:
        driver.release(sequence)


def test_inputs_of_no_compiled_shape_are_refused_and_harm_nothing(driver: Driver, executor: JaxExecutor) -> None:
    sequence = driver.sequence(prompt(6))
    good = driver.inputs([Row(sequence, 6)])
    with pytest.raises(InternalError, match=r"program forward\[5\] is not compiled; compiled are forward\["):
        executor.forward(_change(good, token_ids_t=np.zeros(5, np.int32)))
    with pytest.raises(InternalError, match=r"slots_gt is int64\(1, 8\); the program expects int32\(1, 8\)"):
        executor.forward(_change(good, slots_gt=np.zeros((1, 8), np.int64)))
    with pytest.raises(InternalError, match=r"block_tables_gsm is int32\(1, 4, 3\)"):
        executor.forward(_change(good, block_tables_gsm=np.zeros((1, 4, 3), np.int32)))
    outputs = driver.run([Row(sequence, 6)])
    assert outputs.logprob(0) == pytest.approx(dense_logprobs(sequence)[-1].max(), abs=1e-4)


def test_a_spent_executor_refuses_everything(driver: Driver) -> None:
    executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), tiny_model.OPTIONS)
    inputs = driver.inputs([Row(driver.sequence([1]), 1)])
    with pytest.raises(InternalError, match="none: warm_up has not run"):
        executor.forward(inputs)
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(InternalError, match="shut down"):
        executor.forward(inputs)
    with pytest.raises(InternalError, match="shut down"):
        executor.warm_up(tiny_model.quiet)


def test_a_failed_step_is_an_internal_error_and_spends_the_pool(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = JaxExecutor.create(tiny_model.model(), tiny_model.params(), tiny_model.OPTIONS)

    def fail(*arguments: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(executor._programs, "find", lambda spec: fail)
    inputs = driver.inputs([Row(driver.sequence([1]), 1)])
    with pytest.raises(InternalError, match="a forward of 8 tokens failed: RESOURCE_EXHAUSTED"):
        executor.forward(inputs)
    with pytest.raises(InternalError, match="the KV pool is gone"):
        executor.forward(inputs)
    executor.shutdown()


def test_geometry_is_what_was_asked_for(executor: JaxExecutor) -> None:
    geometry = executor.geometry
    assert (geometry.num_blocks, geometry.block_size, geometry.max_num_seqs, geometry.max_model_len) == (56, 8, 4, 64)
    assert geometry.bytes_per_block == 3 * 8 * 2 * 2 * 16 * 4
    assert (geometry.vocab_size, geometry.buckets.tokens, geometry.buckets.rows) == (97, (8, 16), (8,))
    assert geometry.num_host_blocks == 40
    steps = ["forward[8]", "forward[16]", "sample[8]", "sample[8, top]", "sample[8, logprobs]", "decode[8]"]
    edits = ["edited[8]", "count[256]"]
    tells = ["tell[64, logprobs]", "tell[8, all-logprobs]", "tell[64, hidden]"]
    moves = [f"{kind}[{size}]" for kind in ("copy", "swap_out", "swap_in") for size in (8, 64)]
    assert sorted(map(str, executor._programs.ready)) == sorted(steps + edits + tells + moves)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 97}, "max_model_len: 97 is above the limit of the model, 96"),
        ({"num_blocks": 10**7}, r"num_blocks: 10000000 blocks do not fit: .* of 12288 bytes; lower num_blocks to \d+"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        JaxExecutor.create(tiny_model.model(), tiny_model.params(), EngineConfig.load(options))


@pytest.mark.parametrize("layer_mode", ["loop", "scan"])
def test_parameters_of_another_shape_are_refused_by_name(layer_mode: LayerMode) -> None:
    tree = dict(tiny_model.params(layer_mode))
    tree["norm"] = {"scale": np.zeros(31, np.float32)}
    with pytest.raises(InvalidArgument, match=r"params\['norm'\]\['scale'\]: is float32\(31,\); the model has float32"):
        JaxExecutor.create(tiny_model.model(), tree, tiny_model.OPTIONS)
    del tree["norm"]
    with pytest.raises(InvalidArgument, match=r"params\['norm'\]\['scale'\]: is missing"):
        JaxExecutor.create(tiny_model.model(), tree, tiny_model.OPTIONS)


def test_it_is_an_executor(executor: JaxExecutor) -> None:
    as_engine_sees_it: Executor = executor
    assert as_engine_sees_it.num_compiles_after_warm_up == 0
