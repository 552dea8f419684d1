"""Models by their shape alone: what a step reads and computes follows from a few numbers of each.

The shapes are those of `jpaged.capacity.known_models`; for the models of the paper, weights and pool are the paper's.

KV bytes of a token = 2 (key, value) * num_layers * kv_width * 2 bytes          all in 16 bits
OPT-13B    2 * 40 *  5120 * 2 =   819 200      12 GiB hold 15 728 tokens      the paper's Table 1: 12 GB, 15.7K
OPT-66B    2 * 64 *  9216 * 2 = 2 359 296      21 GiB hold  9 557             21 GB, 9.7K (so 21.3 GiB)
OPT-175B   2 * 96 * 12288 * 2 = 4 718 592     264 GiB hold 60 074             264 GB, 60.1K
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jpaged.capacity.known_models import KNOWN_MODELS


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model.

    Attributes:
        num_params: all of them; every one is read once a step.
        width: query heads times head dimension.
        kv_width: key/value heads times head dimension.
        head_dim: of one head.
        max_model_len: tokens of a sequence at most.
        num_devices: accelerators that it is served on when nothing else is said.
        num_kv_slots: tokens that the paper's pool for it holds on that many of `paper_hardware`; None when the pool is
            what the memory leaves.
        paper_hardware: what num_kv_slots is for.
    """

    name: str
    num_params: float
    num_layers: int
    width: int
    kv_width: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    num_devices: int = 1
    num_kv_slots: int | None = None
    paper_hardware: str = ""

    @property
    def weight_bytes(self) -> float:
        return 2 * self.num_params

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.kv_width * 2


def _known(name: str) -> ModelShape:
    model = KNOWN_MODELS[name]
    config = model.config
    return ModelShape(
        name=name,
        num_params=model.num_params,
        num_layers=config.num_layers,
        width=config.num_heads * config.head_dim,
        kv_width=config.num_kv_heads * config.head_dim,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
    )


def _in_paper(shape: ModelShape, num_params: float, num_devices: int, num_kv_slots: int, hardware: str) -> ModelShape:
    """The shape with the paper's weights and pool: Table 1 gives 26, 132 and 346 GB of weights."""
    return replace(
        shape, num_params=num_params, num_devices=num_devices, num_kv_slots=num_kv_slots, paper_hardware=hardware
    )


_PAPER = (
    _in_paper(_known("opt-13b"), 13e9, 1, 15_700, "a100-40gb"),
    _in_paper(_known("opt-66b"), 66e9, 4, 9_700, "a100-40gb"),
    _in_paper(_known("opt-175b"), 173e9, 8, 60_100, "a100-80gb"),
    # The first LLaMA is shaped as the second and ends at half of its length.
    _in_paper(replace(_known("llama-2-13b"), name="llama-13b", max_model_len=2048), 13e9, 1, 15_700, "a100-40gb"),
)

MODELS = {name: _known(name) for name in KNOWN_MODELS} | {shape.name: shape for shape in _PAPER}
"""The built-in configurations, and the models of the paper as it served them."""
