"""The families that are served, by the architecture names of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from jpaged.errors import Unsupported
from jpaged.models.families import (
    deepseek,
    falcon,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    llama,
    mixtral,
    opt,
    phi3,
    qwen_moe,
    starcoder2,
)
from jpaged.models.family import AnyFamily
from jpaged.models.heads import HEADS

_FAMILIES = (
    *(llama, mixtral, qwen_moe, gpt_oss, deepseek, gemma, phi3),
    *(gpt2, gpt_neox, falcon, starcoder2, opt),
)

ARCHITECTURES: Mapping[str, AnyFamily] = {
    name: family for module in _FAMILIES for name, family in module.ARCHITECTURES.items()
}


def find_family(architecture: str) -> AnyFamily:
    """The family of an architecture, or of a head.

    Raises:
        Unsupported: the architecture is not served; the message lists those that are.
    """
    family = ARCHITECTURES.get(architecture) or HEADS.get(architecture)
    if family is None:
        raise Unsupported(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return family
