"""The same checkpoint in transformers, its weights written out as those that they stand for."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.demo_model.data import Batch
from benchmarks.demo_model.saving import save_params
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Params


class Transformers:
    """A model of transformers in float32. Needs torch: `make torch`.

    Args:
        weights: no matrix of them is quantized.
        config: as published, without quantization.
    """

    def __init__(self, weights: Params, config: ModelConfig) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        with tempfile.TemporaryDirectory() as folder:
            save_params(weights, config, Path(folder) / "model")
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                Path(folder) / "model", dtype=self._torch.float32, attn_implementation="eager"
            ).eval()

    def logits(self, rows: Batch) -> np.ndarray:
        """What follows each token, `[rows * row_len, V]` float32, each document read by itself; 0 in padding."""
        found: np.ndarray | None = None
        for place, segment in _documents(rows.segments):
            with self._torch.no_grad():
                token_ids = self._torch.from_numpy(rows.token_ids[place][segment][None].astype(np.int64))
                of_document = self._model(token_ids).logits[0].numpy()
            if found is None:
                found = np.zeros((*rows.segments.shape, of_document.shape[-1]), np.float32)
            found[place][segment] = of_document
        if found is None:
            raise ValueError("the batch has no document")
        return found.reshape(-1, found.shape[-1])


def is_there() -> bool:
    """Whether torch can be imported."""
    return importlib.util.find_spec("torch") is not None


def _documents(segments: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(row, which of its tokens) of each document."""
    return [(row, of_row == number) for row, of_row in enumerate(segments) for number in np.unique(of_row[of_row > 0])]
