"""A model whose layers differ in their attention, served from the pool, against a dense pass of the same model."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.device.executor import JaxExecutor
from jpaged.kernels.attention_kind import AttentionKind
from jpaged.models.decoder import DecoderConfig
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.model import Model
from jpaged.models.stack import LayerMode
from tests.device import tiny_model
from tests.device.driver import Driver, Row
from tests.models import dense

pytestmark = pytest.mark.usefixtures("quick_programs")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlternatingConfig(DecoderConfig):
    """Every second layer has a narrow window and a soft cap."""

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        full = AttentionKind(self.head_dim**-0.5)
        narrow = dataclasses.replace(full, sliding_window=5, soft_cap=0.5)
        return tuple(LayerKind(narrow if index % 2 else full) for index in range(self.num_layers))


FIELDS = {field.name: getattr(tiny_model.CONFIG, field.name) for field in dataclasses.fields(tiny_model.CONFIG)}
MODEL = Model(AlternatingConfig(**FIELDS), jnp.dtype("float32"))


@pytest.mark.parametrize(
    ("layer_mode", "backend"),
    [
        ("loop", "xla"),
        ("scan", "auto"),
        pytest.param("loop", "auto", marks=pytest.mark.long),
        pytest.param("scan", "xla", marks=pytest.mark.deep),
    ],
)
@pytest.mark.long
def test_each_layer_attends_in_its_own_way(layer_mode: LayerMode, backend: str) -> None:
    chosen = dataclasses.replace(tiny_model.OPTIONS.model, attention_backend=backend)
    options = dataclasses.replace(tiny_model.OPTIONS, model=chosen)
    executor = JaxExecutor.create(MODEL, tiny_model.params(layer_mode, of=MODEL), options)
    executor.warm_up(tiny_model.quiet)
    assert executor.geometry.cascade is not None
    assert executor.geometry.cascade.windows == ((5, 1 / 3),)
    driver = Driver(executor)
    prompt = np.random.default_rng(0).integers(0, tiny_model.CONFIG.vocab_size, 20).tolist()
    sequence = driver.sequence(prompt)
    while len(sequence.tokens) < 32:
        row = Row(sequence, min(7, len(sequence.tokens) - sequence.num_computed))
        token = driver.run([row]).token_ids_rn[0, 0]
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(int(token))
    executor.shutdown()
    params = tiny_model.params()
    assert sequence.tokens[20:] == dense.greedy(MODEL, params, prompt, 12)
    assert sequence.tokens[20:] != dense.greedy(tiny_model.model(), params, prompt, 12)
