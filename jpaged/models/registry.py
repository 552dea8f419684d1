"""The families that are served, by the architecture names of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from jpaged.errors import Unsupported
from jpaged.models import llama, opt
from jpaged.models.family import AnyFamily

ARCHITECTURES: Mapping[str, AnyFamily] = {**llama.ARCHITECTURES, **opt.ARCHITECTURES}


def find_family(architecture: str) -> AnyFamily:
    """The family of an architecture.

    Raises:
        Unsupported: the architecture is not served; the message lists those that are.
    """
    family = ARCHITECTURES.get(architecture)
    if family is None:
        raise Unsupported(f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return family
