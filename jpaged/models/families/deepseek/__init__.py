"""DeepSeek-V2 and V3 (2024): multi-head latent attention, with one latent per token, and experts chosen by groups.

Kimi K2, GLM-4.7-Flash and Mistral 4 differ from V3 in switches; Kimi K2 has its architecture's name.

config.py   their fields of config.json; the leaves of the parameters: axes, and tensors in a checkpoint
modules.py  attention whose keys and values are latents
"""

from jpaged.models.decoder.leaves import outer_leaves
from jpaged.models.families.deepseek.config import GLM, MISTRAL, NAMES, DeepseekConfig, Variant, layer_leaves
from jpaged.models.family import Family, Modules
from jpaged.models.param_specs import LM_HEAD


def _modules() -> Modules[DeepseekConfig]:
    from jpaged.models.decoder.modules import DecoderEnds
    from jpaged.models.families.deepseek.modules import LatentLayer

    return Modules(DecoderEnds, LatentLayer)


def _family(variant: Variant) -> Family[DeepseekConfig]:
    return Family(
        variant.model_type,
        variant.read,
        variant.to_hf,
        _modules,
        lambda config, prefix: outer_leaves(config, prefix, NAMES, LM_HEAD),
        lambda config, prefix, kind: layer_leaves(config, prefix, kind, variant.experts),
        ignores_later_layers=True,
    )


ARCHITECTURES = {
    "DeepseekV2ForCausalLM": _family(Variant("deepseek_v2", has_choice_bias=False)),
    "DeepseekV3ForCausalLM": _family(Variant("deepseek_v3", has_choice_bias=True)),
    "Glm4MoeLiteForCausalLM": _family(GLM),
    "Mistral4ForCausalLM": _family(MISTRAL),
}
