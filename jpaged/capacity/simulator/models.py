"""Simulated models: the built-in configurations, and the paper's models as it served them, all in 16 bits.

KV bytes of a token = 2 (key, value) * num_layers * num_kv_heads * head_dim * 2 bytes
OPT-13B    2 * 40 *  5120 * 2 =   819 200      12 GiB hold 15 728 tokens      the paper's Table 1: 12 GB, 15.7K
OPT-66B    2 * 64 *  9216 * 2 = 2 359 296      21 GiB hold  9 557             21 GB, 9.7K (so 21.3 GiB)
OPT-175B   2 * 96 * 12288 * 2 = 4 718 592     264 GiB hold 60 074             264 GB, 60.1K
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jpaged.capacity.cost import Shape
from jpaged.capacity.known_models import KNOWN_MODELS
from jpaged.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """One model.

    Attributes:
        num_params: all parameters; every one is read once per step.
        num_devices: default number of accelerators.
        num_kv_slots: tokens in the paper's pool on that number of `paper_hardware`; None if the pool is the memory that
            the weights leave.
        paper_hardware: hardware of num_kv_slots.
    """

    name: str
    config: ModelConfig
    num_params: float
    num_devices: int = 1
    num_kv_slots: int | None = None
    paper_hardware: str = ""

    @property
    def shape(self) -> Shape:
        """Size of the model's steps: bytes that they read, and FLOPs."""
        config = self.config
        return Shape(
            num_params=self.num_params,
            num_layers=config.num_layers,
            query_width=config.query_width,
            weight_bytes=2 * self.num_params,
            kv_bytes_per_token=config.num_layers * config.kv_width * 2,
        )


_OPT_13B, _OPT_66B, _OPT_175B, _LLAMA_2_13B = (
    KNOWN_MODELS[name].config for name in ("opt-13b", "opt-66b", "opt-175b", "llama-2-13b")
)
_PAPER = (  # Table 1 of the paper gives 26, 132 and 346 GB of weights
    SimulatedModel("opt-13b", _OPT_13B, 13e9, 1, 15_700, "a100-40gb"),
    SimulatedModel("opt-66b", _OPT_66B, 66e9, 4, 9_700, "a100-40gb"),
    SimulatedModel("opt-175b", _OPT_175B, 173e9, 8, 60_100, "a100-80gb"),
    # The first LLaMA has the shape of the second and half the length.
    SimulatedModel("llama-13b", replace(_LLAMA_2_13B, max_position_embeddings=2048), 13e9, 1, 15_700, "a100-40gb"),
)

MODELS = {name: SimulatedModel(name, known.config, known.num_params) for name, known in KNOWN_MODELS.items()} | {
    model.name: model for model in _PAPER
}
"""Models by name; the paper's replace the built-in ones of the same names."""
