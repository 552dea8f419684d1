"""Logits and greedy tokens equal those that transformers gave for the same weights (tests/models/goldens)."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints.weights import load_params
from jpaged.models.config import ModelConfig
from jpaged.models.model import model_for
from tests.models import dense
from tests.models.tiny import TinyCase, tiny_cases, write_checkpoint

GOLDENS = Path(__file__).parent / "goldens"


@pytest.mark.parametrize("case", tiny_cases(), ids=lambda case: case.name)
def test_logits_and_greedy_tokens_equal_those_of_transformers(case: TinyCase, tmp_path: Path) -> None:
    golden = json.loads((GOLDENS / f"{case.name}.json").read_text(encoding="utf-8"))
    model = model_for(ModelConfig.from_hf(case.config), np.dtype(jnp.float32))
    params = load_params(model, write_checkpoint(case, tmp_path), "loop")
    prompt, num_tokens = case.prompt(), len(golden["tokens"])
    assert prompt == golden["prompt"]

    logits = dense.logits(model, params, np.array(prompt + golden["tokens"], np.int32), len(prompt))
    np.testing.assert_allclose(logits[jnp.array(golden["rows"])], golden["logits"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits[len(prompt) + num_tokens - 2], golden["last_logits"], rtol=0, atol=1e-4)

    # Each token follows from those before it, so equal choices along the golden text are an equal greedy text.
    assert num_tokens == 64
    assert jnp.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist() == golden["tokens"]
    assert golden["smallest_gap"] > 1e-4


def test_every_case_has_a_golden_file_and_every_file_a_case() -> None:
    assert {path.stem for path in GOLDENS.glob("*.json")} == {case.name for case in tiny_cases()}
