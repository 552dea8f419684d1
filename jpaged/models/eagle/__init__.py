"""Draft heads: one layer that proposes tokens, from embeddings and the target model's hidden states.

config.py   the shape of EAGLE-3 heads (2025), fields of config.json, and leaves; those of MTP layers
modules.py  the layer of EAGLE-3, and the modules around it and around MTP layers

An EAGLE-3 head has its own checkpoint:

    the model's layers 2, L/2, L - 3     f f f ── fc ──> g            of the token at p
    the token at p + 1                   x ── embed ──> e             (norm(e), norm(g)) ── layer ──> h ── lm_head ──>
                                                                      a token at p + 2
    after a proposed token               the head's own h replaces g

Equation and names are those of the EAGLE-3 paper's code (https://arxiv.org/abs/2503.01840), and of vLLM's and SGLang's
`llama_eagle3.py`.

The model's checkpoint contains an MTP layer (multi-token prediction; DeepSeek-V3, 2024). This is a layer of the same
family, and uses the model's embedding and output matrix:

    the model's output, normalized       g                            of the token at p
    the token at p + 1                   x ── embed ──> e             (norm(e), norm(g)) ── eh_proj ──> layer ──>
                                                                      norm ──> h ── lm_head ──> a token at p + 2
    after a proposed token               the layer's own h replaces g

As in vLLM, both g and h are outputs of a final norm, and the first layer is used if a checkpoint has several.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jpaged.models.eagle.config import (
    ARCHITECTURE,
    MTP_LAYERS,
    EagleConfig,
    MtpLayer,
    is_mtp,
    layer_leaves,
    mtp_config,
    mtp_leaves,
    outer_leaves,
    read,
    stored_mtp,
)
from jpaged.models.families import deepseek, llama, qwen_next, variants
from jpaged.models.family import AnyFamily, Family, Modules
from jpaged.models.param_specs import LM_HEAD


def _modules() -> Modules[EagleConfig]:
    from jpaged.models.eagle.modules import EagleEnds, EagleLayer

    return Modules(EagleEnds, EagleLayer)


def _mtp_family(mtp: MtpLayer, model: AnyFamily) -> AnyFamily:
    """Return the family of the MTP layers of a model's family."""

    def modules() -> Modules[Any]:
        from jpaged.models.eagle.modules import MtpEnds

        return Modules(functools.partial(MtpEnds, state_first=mtp.state_first), model.modules().layer)

    return dataclasses.replace(
        model,
        modules=modules,
        outer_leaves=lambda config, prefix: mtp_leaves(config, prefix, mtp),
        name_prefix=(lambda stored: mtp.name_prefix) if mtp.name_prefix else model.name_prefix,
        layers_prefix=mtp.layers_prefix,
        ignored=("",),  # all other tensors are the model's
        lm_head="",
        ignores_later_layers=False,
    )


_MODELS: Mapping[str, AnyFamily] = {
    **llama.ARCHITECTURES,
    **deepseek.ARCHITECTURES,
    **variants.ARCHITECTURES,
    **qwen_next.ARCHITECTURES,
}
HEADS: dict[str, AnyFamily] = {
    ARCHITECTURE: Family(
        model_type="llama",
        read=read,
        to_hf=lambda config: config.to_hf(),
        modules=_modules,
        outer_leaves=outer_leaves,
        layer_leaves=layer_leaves,
        name_prefix=lambda stored: "",
        ignored=("t2d",),
        lm_head=LM_HEAD,
    )
} | {
    architecture: _mtp_family(mtp, _MODELS[name])
    for name, mtp in MTP_LAYERS.items()
    for architecture in (mtp.architecture, mtp.fused)
    if architecture
}
"""The families of heads, by their canonical names."""

NAMES = dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"), ARCHITECTURE)
"""Names of an EAGLE-3 head in config.json; the paper's authors use the model's architecture name."""

__all__ = ["HEADS", "NAMES", "EagleConfig", "is_mtp", "mtp_config", "stored_mtp"]
