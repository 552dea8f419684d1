"""Programs with given stages of sampling: without branches, and with the tokens of the program that has branches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from jpaged.config import EngineConfig
from jpaged.device import sampling
from jpaged.device.compilation import lowering
from jpaged.device.executor import JaxExecutor
from jpaged.device.logits_processors import TokenCounts, edited
from jpaged.device.mesh import build_mesh
from jpaged.device.sampling import SamplingStages, SamplingVocabulary
from jpaged.engine.executor import BEYOND_TOKENS, Detail, SamplingInputs
from jpaged.engine.executor.io import LogitsProcessorInputs, TokenCountReset
from tests.device import tiny_model
from tests.device.driver import Driver, Row
from tests.device.step.edits_oracle import Edits
from tests.device.step.sampling_oracle import Params
from tests.device.step.test_decode import NO_IDS, begin, decode, one_by_one
from tests.device.step.test_edits import rows_of
from tests.device.step.test_sampling import V, random_logits, row_sampling

VOCABULARY, NUM_ROWS = SamplingVocabulary(V), 8
BANNED = (0, 30, V - 1)
ROWS = {
    SamplingStages.GREEDY: [Params(temperature=0.0), Params(temperature=0.0, banned=BANNED)],
    SamplingStages.RANDOM: [
        Params(temperature=1.0, seed=3),
        Params(temperature=0.7, min_p=0.1, seed=2**63, position=9, banned=BANNED),
    ],
    SamplingStages.ALL: [
        Params(temperature=0.7, top_k=5, seed=2**63, position=9),
        Params(temperature=1.3, top_p=0.8, seed=4, index=2),
        Params(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=6, banned=BANNED),
    ],
}


def branches(jaxpr: Jaxpr) -> list[str]:
    """The branches of a program but those by its platform, and its loops of a number of turns that it computes."""
    found, by_platform = [], set[Any]()
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, equation.invars
        if name == "platform_index" or (inputs and all(isinstance(x, Literal) or x in by_platform for x in inputs)):
            by_platform.update(equation.outvars)
        if name == "while" or (name == "cond" and inputs[0] not in by_platform):
            found.append(name)
        for inner in jaxprs_in_params(equation.params):
            found += branches(inner)
    return found


def branches_of(call: Any, *arguments: Any) -> list[str]:
    return branches(jax.make_jaxpr(call)(*arguments).jaxpr)


@functools.partial(jax.jit, static_argnames=("detail", "stages"))
def _sample(logits: jax.Array, how: Any, detail: Detail, stages: SamplingStages | None) -> Any:
    return sampling.sample(logits, how, VOCABULARY, detail, stages=stages)


@functools.partial(jax.jit, static_argnames="stages")
def _edited(logits: jax.Array, edits: Any, counts: Any, stages: SamplingStages | None) -> jax.Array:
    return edited(logits, edits, counts, jnp.ones(len(logits)), VOCABULARY, stages)


def counts_of(num_rows: int) -> TokenCounts:
    random = np.random.default_rng(0).integers(0, 2, (num_rows + 1, V)) * np.array(3, np.int16)
    return TokenCounts(jnp.asarray(random.astype(np.int16)), jnp.zeros(num_rows + 1, jnp.int32))


def sampling_call(stages: SamplingStages | None, detail: Detail) -> tuple[Any, ...]:
    call = functools.partial(sampling.sample, vocabulary=VOCABULARY, detail=detail, stages=stages)
    return call, random_logits(8), row_sampling([Params()] * 8)


def edits_call(stages: SamplingStages | None) -> tuple[Any, ...]:
    def call(logits: jax.Array, edits: Any, counts: Any) -> jax.Array:
        return edited(logits, edits, counts, jnp.ones(8), VOCABULARY, stages)

    return call, random_logits(8), rows_of([Edits()] * 8), counts_of(8)


@pytest.mark.parametrize("stages", list(SamplingStages))
def test_a_program_of_given_stages_has_no_branches(stages: SamplingStages) -> None:
    assert branches_of(*sampling_call(stages, Detail.TOP_LOGPROBS)) == []
    assert branches_of(*edits_call(stages)) == []


def test_a_program_that_decides_has_branches() -> None:
    assert branches_of(*sampling_call(None, Detail.TOKENS)) == ["while", *["cond"] * 3]
    assert set(branches_of(*edits_call(None))) == {"while", "cond"}


@pytest.mark.parametrize("stages", list(SamplingStages))
def test_the_stages_of_a_program_change_no_token(stages: SamplingStages) -> None:
    rows = [row for level, some in ROWS.items() if level <= stages for row in some]
    logits, how = random_logits(NUM_ROWS), row_sampling((rows * NUM_ROWS)[:NUM_ROWS])
    logits[1, 4], logits[2, 5] = np.nan, np.inf
    want, got = (_sample(logits, how, Detail.TOP_LOGPROBS, one) for one in (None, stages))
    assert np.asarray(want.is_sound_r).sum() == NUM_ROWS - 2
    for name in ("is_sound_r", "token_ids_r", "logprobs_r", "ranks_r", "top_ids_rk", "top_logprobs_rk"):
        is_sound = np.asarray(want.is_sound_r)
        np.testing.assert_array_equal(getattr(got, name)[is_sound], getattr(want, name)[is_sound], err_msg=name)


def test_a_token_that_is_banned_twice_counts_once() -> None:
    logits, how = random_logits(NUM_ROWS), row_sampling([Params(temperature=0.0, banned=(7, 3, 7))] * NUM_ROWS)
    want, got = (_sample(logits, how, Detail.TOP_LOGPROBS, one) for one in (None, SamplingStages.ALL))
    for name in ("token_ids_r", "logprobs_r", "ranks_r"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


@pytest.mark.parametrize("stages", list(SamplingStages))
def test_processors_of_a_program_change_the_same_logits(stages: SamplingStages) -> None:
    rows = [
        Edits(),
        Edits(repetition=1.3, frequency=0.7, presence=-0.3),
        Edits(top_n_sigma=1.0, singles=((3, -1, -np.inf), (5, -1, 2.0))),
        Edits(allowed=tuple(range(20))),
        Edits(typical_p=0.5) if stages == SamplingStages.ALL else Edits(presence=1.5),
    ]
    logits, edits, counts = random_logits(len(rows)), rows_of(rows), counts_of(len(rows))
    want, got = (_edited(logits, edits, counts, one) for one in (None, stages))
    np.testing.assert_array_equal(got, want)
    neutral = rows_of([Edits()] * len(rows))
    np.testing.assert_array_equal(_edited(logits, neutral, counts, stages), logits)


@pytest.mark.parametrize(
    ("fields", "typical_p", "want"),
    [
        ({}, None, SamplingStages.GREEDY),
        ({"temperature_r": 0.5, "min_p_r": 0.1}, None, SamplingStages.RANDOM),
        ({"temperature_r": 0.5, "top_p_r": 0.9}, None, SamplingStages.ALL),
        ({"temperature_r": 0.5, "top_k_r": 20}, None, SamplingStages.ALL),
        ({"top_k_r": BEYOND_TOKENS}, 1.0, SamplingStages.GREEDY),
        ({}, 0.9, SamplingStages.ALL),
    ],
)
def test_the_stages_that_rows_need(fields: dict[str, float], typical_p: float | None, want: SamplingStages) -> None:
    inputs = SamplingInputs.neutral(3)
    inputs.fill_columns([1], {name: [value] for name, value in fields.items()})
    if typical_p is not None:
        edits = LogitsProcessorInputs.neutral(3)
        edits.rows_r["typical_p_r"][2] = typical_p
        inputs = dataclasses.replace(inputs, edits=edits)
    assert SamplingStages.of(inputs) is want


@pytest.fixture(scope="module")
def without_branches() -> Iterator[JaxExecutor]:
    """An executor on a CPU that has the programs of GPUs, and its steps dispatched one after another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "has_cheap_branches", lambda mesh: False)
        executor = tiny_model.warm_executor()
    yield executor
    executor.shutdown()


@pytest.mark.long
def test_every_program_of_an_executor_without_branches_has_none(without_branches: JaxExecutor) -> None:
    programs = without_branches._programs
    assert {spec.kind for spec in programs.specs}.isdisjoint({"decode"})
    assert set(programs.ready) == set(programs.specs)
    for spec, program in programs.ready.items():
        if spec.kind in ("sample", "edited"):
            text = program.executable.as_text() or ""
            assert " conditional(" not in text, spec


@pytest.mark.long
def test_the_samples_of_an_executor_without_branches_are_those_of_one_with(
    without_branches: JaxExecutor, executor: JaxExecutor
) -> None:
    how = [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "top_p": 0.9, "seed": 2}]
    num_runs = 0
    for detail in Detail:
        for num in (1, 2, 3):  # of the stages GREEDY, RANDOM, ALL
            tokens = []
            for one in (executor, without_branches):
                for edits in (None, LogitsProcessorInputs.neutral(8)):
                    driver = Driver(one)
                    rows = [Row(driver.sequence([3 + i, 5, 8 - i], **how[i]), 3) for i in range(num)]
                    inputs = dataclasses.replace(driver.sampling(rows, detail=detail), edits=edits)
                    assert SamplingStages.of(inputs) == num - 1
                    outputs = one.collect(one.sample(one.forward(driver.inputs(rows)), inputs))
                    tokens.append(outputs.token_ids_rn[:num])
                    assert (outputs.top_ids_rnk is None) <= (detail < Detail.TOP_LOGPROBS)
                    assert (outputs.logprobs_rn is None) <= (detail < Detail.LOGPROBS)
            for found in tokens[1:]:
                np.testing.assert_array_equal(found, tokens[0])
            num_runs += 1
    assert num_runs == 9
    assert without_branches.num_compiles_after_warm_up == 0


@pytest.mark.long
def test_counts_of_tokens_apply_without_branches(without_branches: JaxExecutor) -> None:
    driver = Driver(without_branches)
    rows = [Row(driver.sequence([9, 1, 1]), 3)]
    edits = LogitsProcessorInputs.neutral(8)
    edits.rows_r["slots_r"][0], edits.rows_r["presence_r"][0] = 3, -1e6
    edits = dataclasses.replace(edits, due=(TokenCountReset(3, [9, 1, 1, 42], 3),))
    inputs = dataclasses.replace(driver.sampling(rows, detail=Detail.TOKENS), edits=edits)
    outputs = without_branches.collect(without_branches.sample(without_branches.forward(driver.inputs(rows)), inputs))
    assert outputs.token(0) == 42


@pytest.mark.long
def test_steps_one_after_another_are_a_dispatch_of_several(
    without_branches: JaxExecutor, executor: JaxExecutor
) -> None:
    assert without_branches.geometry.buckets.decodes == executor.geometry.buckets.decodes == (8,)
    driver = Driver(without_branches)
    want = [one_by_one(driver, sequences := begin(driver)), one_by_one(driver, sequences)]
    for one in (without_branches, executor):
        driver = Driver(one)
        outputs = [decode(driver, sequences := begin(driver)), decode(driver, sequences)]
        for found, tokens in zip(outputs, want, strict=True):
            np.testing.assert_array_equal(found.token_ids_rn[:3, : tokens.shape[1]], tokens)
    single = decode(Driver(without_branches), begin(Driver(without_branches)), NO_IDS, 1)
    assert single.token_ids_rn.shape == (8, 1)
    assert without_branches.num_compiles_after_warm_up == 0


@pytest.mark.parametrize("max_num_seqs", [64, 100])
def test_rows_without_a_forward_of_their_size_run_single_steps(
    max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineConfig.load(
        {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 128, "num_blocks": 8, "num_scheduler_steps": 2}
    )
    mesh = build_mesh(jax.devices()[:1])
    sizes = [lowering.sized_step(tiny_model.model(), options, "loop", 8, mesh)[1].buckets]
    monkeypatch.setattr(lowering, "has_cheap_branches", lambda mesh: False)
    step, geometry = lowering.sized_step(tiny_model.model(), options, "loop", 8, mesh)
    assert not step.has_branches
    assert sizes[0].decodes == sizes[0].rows
    assert geometry.buckets.decodes == (8, 16, 32, 64)
