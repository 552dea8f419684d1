"""Fields of config.json that families with experts share."""

from __future__ import annotations

from jpaged.errors import Unsupported
from jpaged.models.config import MAX_LAYERS, MAX_WIDTH
from jpaged.models.json_fields import JsonFields

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
