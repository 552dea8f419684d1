"""The OPT family (Zhang et al. 2022): learned positions, layer norms, a plain feed-forward.

config.py   its fields of config.json; the leaves of the parameters: axes, and tensors in a checkpoint
modules.py  one layer, and the modules around the layers
"""

from jpaged.models.families.opt.config import OptConfig, layer_leaves, name_prefix, outer_leaves, read, to_hf
from jpaged.models.family import Family, Modules


def _modules() -> Modules[OptConfig]:
    from jpaged.models.families.opt.modules import OptEnds, OptLayer

    return Modules(OptEnds, OptLayer)


ARCHITECTURES = {
    "OPTForCausalLM": Family("opt", read, to_hf, _modules, outer_leaves, layer_leaves, name_prefix),
}
