"""Perplexity and logits over documents that the packaged model was not trained on."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from benchmarks.demo_model.attention import attend
from benchmarks.demo_model.data import Batch, Lesson, batch
from benchmarks.demo_model.train import TrainSettings, cross_entropy
from benchmarks.quantisation.theirs import Transformers, is_there
from jpaged.checkpoints.hub import read_config
from jpaged.checkpoints.quantized.quantizer import quantized_here
from jpaged.checkpoints.weights import load_params
from jpaged.demo import FOLDER
from jpaged.kernels.matmul.quantized import QuantizedMatrix, dequantize
from jpaged.models.layers import Params
from jpaged.models.model import Model
from jpaged.models.tokens import TokenBatch


@dataclass(frozen=True, slots=True)
class Quality:
    """One format beside the weights that it stands for.

    Attributes:
        perplexity: of the model as it is served.
        dequantized_perplexity: of the same with its weights in the model's own type.
        logit_error: the root mean square of the difference of their logits, as a share of that of the logits.
        their_perplexity: of transformers with the dequantized weights; None without torch.
        their_logit_error: of the model as it is served, against the logits of transformers.
    """

    perplexity: float
    dequantized_perplexity: float
    logit_error: float
    their_perplexity: float | None = None
    their_logit_error: float | None = None


def held_text(num_batches: int) -> list[Batch]:
    """Batches of documents that no training step saw."""
    settings, tokenizer = TrainSettings(), Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    shape = (settings.num_rows, settings.row_len)
    return [batch(tokenizer, settings.seed + 1, step, shape, Lesson()) for step in range(num_batches)]


class _Sums:
    """Losses over targets, and squares of logits, added up."""

    def __init__(self) -> None:
        self.losses = self.errors = self.sizes = 0.0

    def add(self, rows: Batch, got: jax.Array, want: jax.Array) -> None:
        """Adds the losses of the logits that are wanted, and how far those that were got are from them."""
        is_target = rows.weights.reshape(-1) > 0
        self.losses += float(cross_entropy(want, jnp.asarray(rows.targets).reshape(-1))[is_target].sum())
        self.errors += float(jnp.square(got - want)[is_target].sum())
        self.sizes += float(jnp.square(want)[is_target].sum())

    @property
    def error(self) -> float:
        return math.sqrt(self.errors / self.sizes)


def measure(asked: str, dtype: np.dtype, batches: Sequence[Batch]) -> Quality:
    """The packaged model, rounded as `--quantization` says: auto is not at all."""
    plain = read_config(FOLDER)
    model = Model(quantized_here(plain, asked), dtype)
    params = load_params(model, FOLDER, "loop")
    reference, weights = Model(plain, dtype), _weights(params)
    theirs = Transformers(weights, plain) if is_there() else None
    served, dequantized, others = _Sums(), _Sums(), _Sums()
    for rows in batches:
        got, want = (_logits(m, p, rows) for m, p in ((model, params), (reference, weights)))
        served.add(rows, got, got)
        dequantized.add(rows, got, want)
        if theirs is not None:
            others.add(rows, got, jnp.asarray(theirs.logits(rows)))
    count = sum(float((rows.weights > 0).sum()) for rows in batches)
    quality = Quality(math.exp(served.losses / count), math.exp(dequantized.losses / count), dequantized.error)
    if theirs is None:
        return quality
    return dataclasses.replace(
        quality, their_perplexity=math.exp(others.losses / count), their_logit_error=others.error
    )


def _weights(params: Params) -> Params:
    """The parameters with weights in place of quantized matrices."""

    def of(leaf: object) -> object:
        return dequantize(leaf) if isinstance(leaf, QuantizedMatrix) else leaf

    weights: Params = jax.tree.map(of, params, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix))
    return weights


@functools.partial(jax.jit, static_argnames="model")
def _run(model: Model, params: Params, arrays: dict[str, jax.Array]) -> jax.Array:
    segments = arrays["segments"]
    row_len = segments.shape[1]
    mask_bst = (segments[:, :, None] == segments[:, None, :]) & jnp.triu(jnp.ones((row_len, row_len), bool))
    positions_t = arrays["positions"].reshape(-1)
    tokens = TokenBatch(arrays["token_ids"].reshape(-1), positions_t, jnp.full_like(positions_t, row_len))
    hidden, _ = model.run(params, tokens, functools.partial(attend, mask_bst), (), "loop")
    return model.logits(params, hidden)


def _logits(model: Model, params: Params, rows: Batch) -> jax.Array:
    names = ("segments", "positions", "token_ids")
    arrays = {field.name: jnp.asarray(getattr(rows, field.name)) for field in dataclasses.fields(rows)}
    return _run(model, params, {name: arrays[name] for name in names})
