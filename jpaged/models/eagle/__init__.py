"""EAGLE-3 heads (2025): one layer that proposes tokens, from embeddings and the target model's hidden states.

config.py   their shape, fields of config.json, and leaves: axes, and tensors in a checkpoint
modules.py  the layer, and the modules around it

    the model's layers 2, L/2, L - 3     f f f ── fc ──> g            of the token at p
    the token at p + 1                   x ── embed ──> e             (norm(e), norm(g)) ── layer ──> h ── lm_head ──>
                                                                      a token at p + 2
    after a proposed token               the head's own h replaces g

Equation and names are those of the EAGLE-3 paper's code (https://arxiv.org/abs/2503.01840), and of vLLM's and SGLang's
`llama_eagle3.py`.
"""

from jpaged.models.eagle.config import ARCHITECTURE, EagleConfig, layer_leaves, outer_leaves, read
from jpaged.models.family import Family, Modules
from jpaged.models.param_specs import LM_HEAD


def _modules() -> Modules[EagleConfig]:
    from jpaged.models.eagle.modules import EagleEnds, EagleLayer

    return Modules(EagleEnds, EagleLayer)


HEADS = {
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
}
"""The families of heads, by their canonical names."""

NAMES = dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"), ARCHITECTURE)
"""Names of a head in config.json; the paper's authors use the model's architecture name."""

__all__ = ["HEADS", "NAMES", "EagleConfig"]
