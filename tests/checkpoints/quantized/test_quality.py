"""What fewer bits cost on held text: little, and no more than the weights that they stand for, also in transformers."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quantisation.measure import held_text, measure
from jpaged.checkpoints.quantized.quantizer import ASKED


@pytest.mark.deep
def test_the_demo_reads_held_text_as_well_in_fewer_bits() -> None:
    batches = held_text(1)
    plain = measure("auto", np.dtype(np.float32), batches)
    for asked, most, error in (("int8", 1.001, 1e-5), ("int4", 1.01, 1e-5), ("fp8", 1.002, 1e-5)):
        quality = measure(asked, np.dtype(np.float32), batches)
        assert quality.perplexity < plain.perplexity * most
        assert quality.perplexity < quality.dequantized_perplexity * (1 + 1e-6)
        assert quality.logit_error < error


@pytest.mark.deep
@pytest.mark.parametrize("asked", ASKED)
def test_transformers_reads_no_better_with_the_same_weights(asked: str) -> None:
    pytest.importorskip("torch")
    quality = measure(asked, np.dtype(np.float32), held_text(1))
    assert quality.their_perplexity is not None and quality.their_logit_error is not None
    assert quality.perplexity < quality.their_perplexity * (1 + 1e-6)
    assert quality.their_logit_error < 1e-4
