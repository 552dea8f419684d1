"""MTP layers under their published names, next to the tiny checkpoints of their families."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tests.models.tiny import TinyCase, tensor, tensors, tiny_case

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class MtpCase:
    """A tiny model with an MTP layer.

    Attributes:
        case: the model; its config.json counts the layer.
        made: the case whose tensors it has, of which the layer's own are more.
        prefix: of the names of the layer's tensors.
        names: of the two norms, the projection and the last norm; those of the embedding and of the output matrix,
            which a checkpoint repeats, if it does.
        sparse: what makes a model of one layer have the layer's kind.
        state_first: in the input of the projection.
        outer: prefix of the norms and the projection; None for that of the layer.
        norm_offset: what norms add to their weights.
    """

    case: TinyCase
    made: TinyCase
    prefix: str
    names: tuple[str, str, str, str] = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    repeated: tuple[tuple[str, str], ...] = (
        ("embed_tokens", "model.embed_tokens"),
        ("shared_head.head", "lm_head"),
    )
    sparse: Mapping[str, object] = dataclasses.field(default_factory=dict)
    state_first: bool = False
    outer: str | None = None
    norm_offset: float = 0.0

    @property
    def outer_prefix(self) -> str:
        """That of the norms and the projection."""
        return self.prefix if self.outer is None else self.outer

    @property
    def num_layers(self) -> int:
        found = self.case.config["num_hidden_layers"]
        assert isinstance(found, int)
        return found

    @property
    def width(self) -> int:
        found = self.case.config["hidden_size"]
        assert isinstance(found, int)
        return found

    def model_tensors(self) -> dict[str, np.ndarray]:
        """Those of the model alone."""
        return tensors(self.made)

    def tensors(self) -> dict[str, np.ndarray]:
        """Those of the MTP layer, which is like the last layer of the model."""
        found, last = self.model_tensors(), f"model.layers.{self.num_layers - 1}."
        layer = {
            self.prefix + name.removeprefix(last): tensor(self.made, f"mtp.{name}", array.shape)
            for name, array in found.items()
            if name.startswith(last)
        }
        token_norm, state_norm, projection, norm = (f"{self.outer_prefix}{name}.weight" for name in self.names)
        for name in (token_norm, state_norm, norm):
            layer[name] = tensor(self.made, name, (self.width,))
        layer[projection] = tensor(self.made, projection, (self.width, 2 * self.width))
        repeated = {f"{self.prefix}{name}.weight": found[f"{of_model}.weight"] for name, of_model in self.repeated}
        return layer | repeated


def mtp_cases() -> dict[str, MtpCase]:
    """A case of each family."""
    mimo = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    qwen2 = TinyCase("mimo", {**tiny_case("qwen2").config, **small, **heads}, 24)
    counted = {"num_nextn_predict_layers": 1}
    renamed = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", **counted}
    first = {"first_k_dense_replace": 0}
    cases = {
        "mimo": MtpCase(
            TinyCase("mimo", {**qwen2.config, **renamed}, qwen2.prompt_len),
            qwen2,
            "model.mtp_layers.0.",
            names=mimo,
            repeated=(),
            state_first=True,
        )
    }
    for name, sparse in (
        ("deepseek_v3", first),
        ("glm4_moe", first),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}),
    ):
        made = tiny_case(name)
        case = TinyCase(name, {**made.config, **counted}, made.prompt_len)
        cases[name] = MtpCase(case, made, f"model.layers.{made.config['num_hidden_layers']}.", sparse=sparse)
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        made = tiny_case(name)
        case = TinyCase(name, {**made.config, "mtp_num_hidden_layers": 1}, made.prompt_len)
        full: Mapping[str, object] = {"layer_types": ["full_attention"], "mlp_only_layers": []}
        full = {key: value for key, value in full.items() if key in made.config or key == "layer_types"}
        cases[name] = MtpCase(
            *(case, made, "mtp.layers.0.", names, (), full),
            outer="mtp.",
            norm_offset=1.0,
        )
    return cases
