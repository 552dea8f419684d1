"""Errors for the modules of an adapter that do not support adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from jpaged.checkpoints.names import is_ignored, model_leaves
from jpaged.errors import InvalidArgument, Unsupported
from jpaged.models.config import ModelConfig
from jpaged.models.lora import is_of_experts
from jpaged.models.param_specs import module_of

_MAX_SHOWN = 5
_OUTER = frozenset({"lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe", "word_embeddings"})
_NOT_OUTER = "adapters of embeddings and lm_head are not supported; merge the adapter into the model"
_ROUTERS = frozenset({"gate", "router"})


def refuse_others(modules: Sequence[str], config: ModelConfig, folder: Path) -> None:
    """Raise an error for modules that do not support adapters; no-op for an empty list.

    Raises:
        Unsupported: the model has some of them; the message has the reason.
        InvalidArgument: the model has none of them.
    """
    if not modules:
        return
    leaves = model_leaves(config)
    every = [leaf for each in (leaves.outer, *leaves.layers) for leaf in each]
    has_experts = any(map(is_of_experts, every))
    known = {module_of(name) for leaf in every for name, _ in leaf.tensors}
    kinds: tuple[tuple[Callable[[str], bool], str], ...] = (
        (lambda module: has_experts and _is_of_experts(module), "adapters of experts and routers are not supported"),
        (lambda module: _words_of(module)[-1] in _OUTER, _NOT_OUTER),
        (known.__contains__, "adapters are supported only for linear modules of layers"),
        (lambda module: is_ignored(f"{module}.weight", config), "the server does not load these modules of the model"),
    )
    for is_of_kind, why in kinds:
        found = [module for module in modules if is_of_kind(module)]
        if found:
            raise Unsupported(f"{folder}: {_listed(found)}: {why}; train the adapter without them")
    raise InvalidArgument("lora", f"{folder}: {_listed(modules)}: no such module in {config.architecture}")


def _words_of(module: str) -> list[str]:
    return module.split(".")


def _is_of_experts(module: str) -> bool:
    """Return True if the name is that of experts, which varies between releases of transformers."""
    words = module.split(".")
    return "experts" in words or words[-1] in _ROUTERS


def _listed(modules: Sequence[str]) -> str:
    shown, num_more = ", ".join(modules[:_MAX_SHOWN]), len(modules) - _MAX_SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown
