"""Which matrices of a model are quantised, and how: rules over the names that modules have in a checkpoint."""

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
"""What the same modules' names begin with in the library that quantised them, and in checkpoints of others."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the matrices of a model are quantised; hashable, a part of its config.

    Attributes:
        method: what the checkpoint calls it, or what was asked for when it is quantised here.
        rules: regular expressions and formats; the first that is found in a module's name holds. None leaves it.
        has_output: the rules hold for the output matrix too, which is left otherwise.
        num_parts: that the model is split into: groups are cut nowhere else.
    """

    method: str
    rules: tuple[tuple[str, MatrixFormat | None], ...]
    has_output: bool = False
    num_parts: int = 1

    def split(self, num_parts: int) -> Quantisation:
        """The same of a model in so many parts."""
        return dataclasses.replace(self, num_parts=num_parts)

    def format_of(self, module: str) -> MatrixFormat | None:
        """The format of a module's matrix as published, by its name (`model.layers.0.mlp.up_proj`); None has none."""
        place = self.rule_of(module)
        return None if place is None else self.rules[place][1]

    def rule_of(self, module: str) -> int | None:
        """The place of the rule that holds for a module, by any of the names that it may have; None has none."""
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
