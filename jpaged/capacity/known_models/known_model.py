"""A published model: name, hub repository, and the fields of the config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jpaged.checkpoints.names import num_params
from jpaged.models.config import ModelConfig
from jpaged.models.hf_config import from_hf


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published model.

    Attributes:
        name: in lower case, the size after the last hyphen.
        repository: hub repository of the config.json. OPT-175B's weights are not there, and its fields follow those of
            the other sizes.
        fields: fields of config.json.
    """

    name: str
    repository: str
    fields: Mapping[str, object]

    @property
    def config(self) -> ModelConfig:
        """The parsed fields."""
        return from_hf(self.fields)

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        return num_params(self.config)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that differ within a family: L, E, F, H, K."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int


def decoder(name: str, repository: str, shape: Shape, **settings: object) -> KnownModel:
    """Return a model whose config.json has the usual names for its sizes."""
    fields = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "hidden_act": "silu",
    }
    return KnownModel(name, repository, fields | settings)
