"""The configurations of well-known models, in the fields of their config.json on the Hugging Face hub.

They are for planning, compiling and simulating without a checkpoint at hand: `KNOWN_MODELS["opt-13b"].config` is what
reading the hub's config.json gives.

known_model.py  what a published model is
dense.py        Llama, Mistral, Qwen and OPT
decoders.py     Gemma, Phi, the GPT families, Falcon and StarCoder2
experts.py      Mixtral, Qwen2-MoE, Qwen3-MoE and gpt-oss
deepseek.py     DeepSeek
"""

from __future__ import annotations

from collections.abc import Mapping

from jpaged.capacity.known_models import decoders, deepseek, dense, experts
from jpaged.capacity.known_models.known_model import KnownModel

__all__ = ["KNOWN_MODELS", "KnownModel", "find_known"]

KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model for model in (*dense.MODELS, *decoders.MODELS, *experts.MODELS, *deepseek.MODELS)
}
"""Published models by name."""

_SAME_SHAPE = {"hf", "instruct", "chat", "base", "meta", "it", "pt"}
"""Words of hub names that say nothing of the shape."""


def find_known(name: str) -> KnownModel | None:
    """The well-known model that a name means: its own, or a hub id, in any case, tuned for chat or not; else None."""
    wanted = _plain(name)
    for model in KNOWN_MODELS.values():
        if wanted in (_plain(model.name), _plain(model.repository), _plain(model.repository.rpartition("/")[2])):
            return model
    return None


def _plain(name: str) -> str:
    """Returns the name in lower case, without words that say nothing of the shape; a repository's owner stays."""
    owner, slash, own = name.lower().rpartition("/")
    return f"{owner}{slash}" + "-".join(word for word in own.split("-") if word not in _SAME_SHAPE)
