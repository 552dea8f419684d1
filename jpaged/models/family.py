"""What a family of models is to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from jpaged.models.config import ModelConfig
from jpaged.models.json_fields import JsonFields
from jpaged.models.layer_kinds import LayerKind
from jpaged.models.leaves import LM_HEAD, Leaf

if TYPE_CHECKING:
    from flax import nnx

    from jpaged.models.layers import Ends, EndsKeys

ConfigT = TypeVar("ConfigT", bound=ModelConfig)


def model_prefix(stored: Iterable[str]) -> str:
    """The prefix of most families."""
    return "model."


@dataclass(frozen=True, slots=True)
class Modules(Generic[ConfigT]):
    """What a model of a family is built of.

    Attributes:
        ends: makes the module of what is around the layers.
        layer: makes the module of one layer of a kind, called with (x, what all share, attend, carry, its place).
    """

    ends: Callable[[ConfigT, np.dtype, EndsKeys], Ends]
    layer: Callable[[ConfigT, np.dtype, nnx.Rngs, LayerKind], nnx.Module]


@dataclass(frozen=True, slots=True)
class Family(Generic[ConfigT]):
    """All that is asked of a family: what a room, such as `jpaged.models.llama`, hands to the registry.

    Attributes:
        model_type: the `model_type` of its config.json.
        read: the config of an architecture, read from the fields of a config.json; token ids and the type of weights,
            which all families have alike, are read by `jpaged.models.hf_config`: those of `read` are for a config
            that has no such key.
        to_hf: the fields of a config.json that are the family's own, for `read`.
        modules: imports what its models are built of, and jax with it: a config is read and planned for without.
        outer_leaves: the leaves around the layers with a prefix of tensors' names, the embedding first.
        layer_leaves: the leaves of a layer of a kind, with its prefix; paths start inside the layer.
        layers_prefix: what the names of a layer's tensors begin with, behind the other prefix and before its number.
        ignored: parts of the names of tensors that are in checkpoints and without effect.
        lm_head: the name of the output matrix.
        name_prefix: what all names but that of the output matrix begin with, given those that a checkpoint holds.
        ignores_later_layers: checkpoints have layers behind those of the model, which draft.
        language: of a model that reads more than text, the fields of its language model alone, given those of the
            whole, of which it reads what tells of text.
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
    ignores_later_layers: bool = False
    language: Callable[[JsonFields], JsonFields] | None = None


AnyFamily = Family[Any]
"""A family whose configs are not known to the type checker."""
