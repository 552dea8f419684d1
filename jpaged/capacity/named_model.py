"""The model that a plan is for: a name, a single config.json, or a folder; weights are not needed."""

from __future__ import annotations

from jpaged.capacity.known_models import KNOWN_MODELS, find_known
from jpaged.checkpoints.hub import expand_home, find_local, read_config, read_json
from jpaged.errors import NotFound
from jpaged.models.config import ModelConfig
from jpaged.models.hf_config import from_hf


def find_config(name: str) -> tuple[str, ModelConfig]:
    """Return the model's name and config.

    Args:
        name: `demo`, a well-known model's name or hub id, a config.json or a folder that has one.

    Raises:
        NotFound: no model has that name; the message lists the well-known ones.
        InvalidArgument, Unsupported: its config.json cannot be read or served.
    """
    folder = find_local(name)
    if folder is not None:
        return name, read_config(folder)
    path = expand_home(name, "model")
    if path.is_file():
        return name, from_hf(read_json(path))
    known = find_known(name)
    if known is None:
        raise NotFound(
            f"model: {name!r} is not a config.json, a folder or a built-in configuration; built in are "
            f"{', '.join(KNOWN_MODELS)}, by these names or their hub ids"
        )
    return known.name, known.config
