"""Fields of config.json that families share, and those that families with experts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from jpaged.errors import Unsupported
from jpaged.models.config import MAX_LAYERS, MAX_VOCAB_SIZE, MAX_WIDTH, Activation
from jpaged.models.json_fields import JsonFields

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""Activations by their names in transformers, some of which are synonyms; `name_of_activation` writes the first one."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""The two kinds of attention in `layer_types`."""


def read_activation(fields: JsonFields, key: str, default: str | None = None) -> Activation:
    """Read the activation of the feed-forward.

    Raises:
        Unsupported: it is not in `ACTIVATIONS`.
    """
    name = fields.text(key, default)
    if name not in ACTIVATIONS:
        raise Unsupported(f"config.json: {key} is {name!r}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def name_of_activation(activation: Activation) -> str:
    """Return the name of an activation; the inverse of `read_activation`."""
    return next(name for name, found in ACTIVATIONS.items() if found == activation)


class Sizes(TypedDict):
    """Fields of `ModelConfig`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int


class HeadFields(TypedDict):
    """Fields of `ModelConfig`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_sizes(fields: JsonFields) -> Sizes:
    """Read the sizes whose keys most families share, as fields of `ModelConfig`."""
    return {
        "vocab_size": fields.integer("vocab_size", maximum=MAX_VOCAB_SIZE),
        "hidden_size": fields.integer("hidden_size", maximum=MAX_WIDTH),
        "intermediate_size": fields.integer("intermediate_size", maximum=MAX_WIDTH),
        "num_layers": fields.integer("num_hidden_layers", maximum=MAX_LAYERS),
    }


def read_heads(
    fields: JsonFields, hidden_size: int, *, num_kv_heads: int | None = None, head_dim: int | None = None
) -> HeadFields:
    """Read the heads, as fields of `ModelConfig`.

    Args:
        num_kv_heads: the default of a missing key; None is the number of query heads, and so is a null in the config.
        head_dim: the default of a missing key; None derives it from hidden_size.
    """
    num_heads = fields.integer("num_attention_heads", maximum=MAX_WIDTH)
    if head_dim is None and not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.bad("hidden_size", f"is {hidden_size}; without head_dim num_attention_heads must divide it")
    is_null = fields.value("num_key_value_heads", num_kv_heads) is None
    missing = num_heads if is_null or num_kv_heads is None else num_kv_heads
    return {
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", missing, maximum=MAX_WIDTH),
        "head_dim": fields.integer("head_dim", head_dim or hidden_size // num_heads, maximum=MAX_WIDTH),
    }


def divided_heads(fields: JsonFields, hidden_size: int, num_heads: int) -> int:
    """Return the dimension of heads that are equal parts of the hidden state.

    Raises:
        InvalidArgument: they do not divide it.
    """
    if hidden_size % num_heads:
        raise fields.bad("hidden_size", f"is {hidden_size}; num_attention_heads, {num_heads}, must divide it")
    return hidden_size // num_heads


def read_window(fields: JsonFields, missing: int | None = None) -> int | None:
    """Read the sliding window in tokens; None (null in the config) means no window."""
    if fields.value("sliding_window", missing) is None:
        return None
    return fields.integer("sliding_window", missing)


MAX_EXPERTS = 2**14
NUM_EXPERTS = ("num_local_experts", "num_experts")
"""Keys of the number of experts; most families accept both."""
TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Keys about the training of routers, which inference does not read."""


def read_width(fields: JsonFields, key: str, default: int | None = None) -> int:
    """Read the width of an expert."""
    return fields.integer(key, default, maximum=MAX_WIDTH)


def read_choice(fields: JsonFields, default: tuple[int, int], names: tuple[str, ...] = NUM_EXPERTS) -> tuple[int, int]:
    """Read (experts, experts of each row).

    Args:
        names: synonyms of the key of the first number.

    Raises:
        InvalidArgument: several are present, and they differ.
    """
    found = {name: fields.integer(name, maximum=MAX_EXPERTS) for name in names if fields.has(name)}
    num_experts = next(iter(found.values()), default[0])
    if any(count != num_experts for count in found.values()):
        raise fields.bad(names[1], f"is {found[names[1]]}, but {names[0]} is {num_experts}")
    return num_experts, fields.integer("num_experts_per_tok", default[1], maximum=num_experts)


def read_sparse_layers(fields: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts: every `decoder_sparse_step`th, except those in `mlp_only_layers`.

    Raises:
        Unsupported: no layer has experts.
    """
    step = fields.integer("decoder_sparse_step", 1, maximum=MAX_LAYERS)
    dense = fields.value("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in dense):
        raise fields.bad("mlp_only_layers", f"is {dense!r}; it must be a list of layers")
    is_sparse = tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))
    if not any(is_sparse):
        raise Unsupported(f"{fields.name}: decoder_sparse_step and mlp_only_layers leave no layer with experts")
    return is_sparse
