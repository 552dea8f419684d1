"""The supported families, by the architecture names of Hugging Face checkpoints."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from jpaged.errors import Unsupported
from jpaged.models.eagle import HEADS
from jpaged.models.families import (
    deepseek,
    encoders,
    gemma,
    gpt,
    kimi_linear,
    lfm2,
    llama,
    mamba,
    opt,
    qwen_moe,
    qwen_next,
    variants,
)
from jpaged.models.family import AnyFamily

_FAMILIES = (
    *(llama, qwen_moe, deepseek, gemma),
    *(gpt, opt, lfm2, qwen_next, kimi_linear, mamba, variants, encoders),
)

ARCHITECTURES: Mapping[str, AnyFamily] = {
    name: family for module in _FAMILIES for name, family in module.ARCHITECTURES.items()
}

SYNONYMS: Mapping[str, str] = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Names of architectures in published files, and those of transformers' classes."""


def find_family(architecture: str) -> AnyFamily:
    """Return the family of an architecture, or of a head.

    Raises:
        Unsupported: the architecture is not supported; the message lists those that are.
    """
    family = ARCHITECTURES.get(architecture) or HEADS.get(architecture)
    if family is None:
        raise unsupported("architecture", architecture)
    return family


def unsupported(field: str, name: str) -> Unsupported:
    """Return the error for a model that is not supported, with the architecture whose name is closest."""
    by_name = {_stem(architecture): architecture for architecture in reversed(list(ARCHITECTURES))}
    if field == "model_type":
        by_name = {family.model_type: architecture for architecture, family in ARCHITECTURES.items()}
    closest = difflib.get_close_matches(_stem(name), by_name, n=1, cutoff=0.0)
    return Unsupported(
        f"{field} {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}; the closest is "
        f"{by_name[closest[0]]}; docs/models.md describes how to add a model"
    )


def _stem(name: str) -> str:
    """Return the name of a model without its task."""
    return name.partition("For")[0].lower()
