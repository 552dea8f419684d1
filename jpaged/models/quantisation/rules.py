"""Quantization of a model's matrices: rules over the names of modules in a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from jpaged.kernels.matrix_format import MatrixFormat

_PREFIXES = (
    ("transformer.h.", "h."),
    ("model.decoder.", "decoder."),
    ("model.language_model.", "language_model.model."),
    ("model.layers.", "layers."),
)
"""Pairs of equivalent prefixes of module names: those of quantization libraries, and those of other checkpoints."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Quantization of the matrices of a model; hashable, a part of the model's config.

    Attributes:
        method: the method's name in the checkpoint, or the requested one if the model is quantized at load time.
        rules: regular expressions and formats; the first one found in a module's name applies. None is unquantized.
        has_output: the rules apply to the output matrix too, which is otherwise unquantized.
        num_parts: parts that the model is split into; groups do not cross their boundaries.
    """

    method: str
    rules: tuple[tuple[str, MatrixFormat | None], ...]
    has_output: bool = False
    num_parts: int = 1

    def split(self, num_parts: int) -> Quantisation:
        """Return the quantization of the model in `num_parts` parts."""
        return dataclasses.replace(self, num_parts=num_parts)

    def format_of(self, module: str) -> MatrixFormat | None:
        """Return the format of a module's matrix as published, by its name (`model.layers.0.mlp.up_proj`), or None."""
        place = self.rule_of(module)
        return None if place is None else self.rules[place][1]

    def rule_of(self, module: str) -> int | None:
        """Return the index of the rule that applies to a module, under any equivalent name; None if none does."""
        names = _names_of(module)
        return next(
            (place for place, (pattern, _) in enumerate(self.rules) if any(re.search(pattern, name) for name in names)),
            None,
        )


def _names_of(module: str) -> list[str]:
    others = [
        prefix + module.removeprefix(own)
        for pair in _PREFIXES
        for own, prefix in (pair, pair[::-1])
        if module.startswith(own)
    ]
    return [module, *others]
