"""Configurations of well-known models, in the fields of their config.json on the Hugging Face hub.

They allow planning, compiling and simulating without a checkpoint: `KNOWN_MODELS["opt-13b"].config` is the result of
reading the hub's config.json.

known_model.py  a published model
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
"""Words of hub names that do not affect the shape."""


def find_known(name: str) -> KnownModel | None:
    """Return the model with a name or hub id, ignoring case and words like "instruct"; None if unknown."""
    wanted = _plain(name)
    for model in KNOWN_MODELS.values():
        if wanted in (_plain(model.name), _plain(model.repository), _plain(model.repository.rpartition("/")[2])):
            return model
    return None


def _plain(name: str) -> str:
    """Return the name in lower case, without words that do not affect the shape; the owner stays."""
    owner, slash, own = name.lower().rpartition("/")
    return f"{owner}{slash}" + "-".join(word for word in own.split("-") if word not in _SAME_SHAPE)
