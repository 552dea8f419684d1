"""The interface of a family of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from jpaged.models.config import ModelConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.param_specs import LM_HEAD, Leaf

if TYPE_CHECKING:
    from jpaged.models.layers import Ends, EndsKeys, Module, RandomKeys

ConfigT = TypeVar("ConfigT", bound=ModelConfig)


def model_prefix(stored: Iterable[str]) -> str:
    """Return the prefix of most families."""
    return "model."


@dataclass(frozen=True, slots=True)
class Modules(Generic[ConfigT]):
    """The modules of a family's models.

    Attributes:
        ends: makes the module around the layers.
        layer: makes the module of one layer of a kind, called with (x, shared values, attend, carry, its place).
    """

    ends: Callable[[ConfigT, np.dtype, EndsKeys], Ends]
    layer: Callable[[ConfigT, np.dtype, RandomKeys, LayerKind], Module]


@dataclass(frozen=True, slots=True)
class Family(Generic[ConfigT]):
    """The complete interface of a family, such as `jpaged.models.families.llama`, for the registry.

    Attributes:
        model_type: the `model_type` of config.json.
        read: reads the config of an architecture from the fields of a config.json. Token ids and the dtype of weights
            are read by `jpaged.models.hf_config` for all families; `read` sets the defaults of missing keys.
        to_hf: the family's own fields of a config.json, for `read`.
        modules: imports the modules of the family's models, and so jax; reading a config and planning do not need them.
        outer_leaves: the leaves around the layers, with a prefix of tensors' names, the embedding first.
        layer_leaves: the leaves of a layer of a kind, with its prefix; paths start inside the layer.
        layers_prefix: prefix of a layer's tensors, after the other prefix and before its number.
        ignored: parts of tensor names that are in checkpoints and without effect.
        lm_head: the name of the output matrix.
        name_prefix: prefix of all names except the output matrix, given the names in a checkpoint.
        other_names: parts of names of a layer's tensors, and what some checkpoints have in place of each.
        ignores_later_layers: checkpoints have layers after those of the model, for drafts.
        overflows_float16: hidden states of trained models exceed float16's largest number.
        language: for a multimodal model, returns the fields of the language model, given those of the whole; it also
            marks the fields that it reads of the whole.
    """

    model_type: str
    read: Callable[[JsonFields, str], ConfigT]
    to_hf: Callable[[ConfigT], dict[str, object]]
    modules: Callable[[], Modules[ConfigT]]
    outer_leaves: Callable[[ConfigT, str], list[Leaf]]
    layer_leaves: Callable[[ConfigT, str, LayerKind], list[Leaf]]
    name_prefix: Callable[[Iterable[str]], str] = model_prefix
    layers_prefix: str = "layers."
    ignored: tuple[str, ...] = ()
    lm_head: str = LM_HEAD
    other_names: tuple[tuple[str, str], ...] = ()
    ignores_later_layers: bool = False
    overflows_float16: bool = False
    language: Callable[[JsonFields], JsonFields] | None = None


AnyFamily = Family[Any]
"""A family whose configs are not known to the type checker."""
