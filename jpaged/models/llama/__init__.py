"""The Llama family: rotary positions, RMS norms, a gated feed-forward; Llama, Mistral, Qwen2 and Qwen3.

config.py   what its architectures fix in code, and what they read of a config.json
modules.py  one layer, and what is around the layers
leaves.py   the leaves of its parameters: axes, and tensors in a checkpoint
"""

from jpaged.models.family import Family, Modules
from jpaged.models.llama.config import LlamaConfig, LlamaVariant
from jpaged.models.llama.leaves import layer_leaves, outer_leaves


def _modules() -> Modules[LlamaConfig]:
    from jpaged.models.llama.modules import LlamaEnds, LlamaLayer

    return Modules(LlamaEnds, LlamaLayer)


def _family(variant: LlamaVariant) -> Family[LlamaConfig]:
    return Family(variant.model_type, variant.read, variant.to_hf, _modules, outer_leaves, layer_leaves)


ARCHITECTURES = {
    "LlamaForCausalLM": _family(LlamaVariant("llama", "config", True, False, "none", None, None, 2048)),
    "MistralForCausalLM": _family(LlamaVariant("mistral", "none", False, False, "length", None, 8, 131072)),
    "Qwen2ForCausalLM": _family(LlamaVariant("qwen2", "qkv", False, False, "switch", None, None, 32768)),
    "Qwen3ForCausalLM": _family(LlamaVariant("qwen3", "config", False, True, "switch", 128, None, 32768)),
}
