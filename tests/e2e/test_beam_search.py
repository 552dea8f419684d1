"""Beam search finds what transformers finds: the same sequences, in the same order, with the same scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jpaged.device.executor import JaxExecutor
from jpaged.engine.output.beam import EarlyStopping
from jpaged.types import SamplingParams
from tests.e2e.sharing_rig import Rig
from tests.models.tiny import write_checkpoint
from tests.parity.beam_cases import CHECKPOINT, GOLDENS, BeamCase, Found, beam_cases, found_by_transformers

SEARCHES = json.loads(GOLDENS.read_text(encoding="utf-8"))["searches"]


def found_by_us(executor: JaxExecutor, case: BeamCase) -> list[Found]:
    rig = Rig(executor, eos_token_ids=frozenset(case.eos_token_ids))
    params = SamplingParams(
        beam_width=case.width,
        n=case.n,
        max_tokens=case.max_tokens,
        min_tokens=case.min_tokens,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
    )
    answer = rig.answer(case.prompt(), params)
    return [
        Found(tokens, answer.cumulative_logprobs[index] / len(tokens) ** case.length_penalty)
        for index, tokens in enumerate(answer.sequences)
    ]


def agree(found: list[Found], expected: list[Found]) -> None:
    assert [sequence.token_ids for sequence in found] == [sequence.token_ids for sequence in expected]
    np.testing.assert_allclose([s.score for s in found], [s.score for s in expected], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", beam_cases(), ids=lambda case: case.name)
def test_a_search_finds_what_transformers_found(executor: JaxExecutor, case: BeamCase) -> None:
    agree(found_by_us(executor, case), [Found(**sequence) for sequence in SEARCHES[case.name]])


def test_the_goldens_are_of_these_cases_and_end_both_ways() -> None:
    assert set(SEARCHES) == {case.name for case in beam_cases()}
    ends = [
        sequence["token_ids"][-1] in case.eos_token_ids and len(sequence["token_ids"]) < case.max_tokens
        for case in beam_cases()
        for sequence in SEARCHES[case.name]
    ]
    assert 50 < sum(ends) < len(ends) - 50


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_a_random_search_finds_what_transformers_finds_now(executor: JaxExecutor, seed: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    write_checkpoint(CHECKPOINT, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(seed)
    width = int(rng.integers(2, 7))
    rules: list[EarlyStopping] = [True, False, "never"]
    case = BeamCase(
        prompt_seed=int(rng.integers(3, 20)),
        width=width,
        n=int(rng.integers(1, width + 1)),
        max_tokens=int(rng.integers(2, 25)),
        eos_token_ids=tuple(sorted(rng.choice(np.arange(3, 131), 3, replace=False).tolist())),
        length_penalty=float(rng.choice([-1.0, 0.0, 0.7, 1.0, 2.0])),
        early_stopping=rules[seed % 3],
    )
    agree(found_by_us(executor, case), found_by_transformers(model, case))
