"""The example of docs/models.md is a family that works."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jpaged.errors import Unsupported
from jpaged.models import registry
from jpaged.models.hf_config import from_hf, to_hf
from jpaged.models.model import Model
from tests.models import dense
from tests.models.tiny import tiny_case

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TOKEN_IDS = np.arange(3, 27, dtype=np.int32)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the page's module, whose family is served."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    monkeypatch.setattr(registry, "ARCHITECTURES", {**registry.ARCHITECTURES, **names["ARCHITECTURES"]})
    return names


def test_the_example_is_a_llama_under_other_names(example: dict[str, Any]) -> None:
    fields = {**tiny_case("llama_mha").config, "architectures": ["ExampleForCausalLM"], "model_type": "example"}
    config, llama = from_hf(fields), from_hf(tiny_case("llama_mha").config)
    assert dataclasses.replace(config, architecture="LlamaForCausalLM") == llama
    assert from_hf(to_hf(config)) == config
    (family,) = example["ARCHITECTURES"].values()
    names = {name for leaf in family.layer_leaves(config, "", config.layer_kinds[0]) for name, _ in leaf.tensors}
    assert {"ln_1.weight", "ln_2.weight", "self_attn.q_proj.weight", "mlp.gate_proj.weight"} <= names
    model = Model(config, np.dtype(np.float32))
    params = model.init_params(jax.random.key(0), "loop")
    want = dense.logits(Model(llama, model.dtype), params, TOKEN_IDS, len(TOKEN_IDS))
    np.testing.assert_array_equal(dense.logits(model, params, TOKEN_IDS, len(TOKEN_IDS)), want)
    with pytest.raises(Unsupported, match="attention_bias is True; this family has no biases"):
        from_hf({**fields, "attention_bias": True})
